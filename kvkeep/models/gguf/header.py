"""The files of a GGUF model, and checks of a file before gguf-py reads it.

A model is one file or several parts. llama.cpp's gguf-split names these NAME-00001-of-00003.gguf
and so on; the first has the metadata.

gguf-py trusts the counts in a header: one damaged byte makes it iterate over 2^60 entries that are
not there. `check_header` compares them with the length of the file, in milliseconds.
"""

import mmap
import re
from functools import cache
from pathlib import Path

from kvkeep.errors import BadModelFile, UnsupportedModel

_PART_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_STRING_TYPE, _ARRAY_TYPE = 8, 9
# Bytes of a value by its GGUF type number: uint8, int8, uint16, int16, uint32, int32, float32,
# bool, uint64, int64, float64.
_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_MAX_ARRAY_DEPTH = 4  # of nested arrays; existing models have depth 1
_MAX_DIMENSIONS = 4
_MAX_TENSOR_TYPES = 256  # GGML numbers its types from 0: no release has more than these


def part_paths(path: Path) -> list[Path]:
    """Return the paths of a model's parts, in order. Raises BadModelFile if one is missing.

    The name of a part may be that of the file or, as in the hub's cache, of links to the files.
    """
    target = path.resolve()
    if _PART_NAME.fullmatch(target.name):
        path = target
    match = _PART_NAME.fullmatch(path.name)
    if match is None:
        return [path]
    name, part_number, count = match[1], int(match[2]), int(match[3])
    if not 1 <= part_number <= count:
        raise BadModelFile(
            f"{path} says that it is part {part_number} of {count}: restore its file name"
        )
    parts = [path.with_name(f"{name}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise BadModelFile(
            f"{path} is one of {count} parts of a model, and these are missing from its folder: "
            f"{', '.join(missing[:3])}{more}; fetch them too"
        )
    return parts


def check_header(path: Path) -> None:
    """Check a file's header, before gguf-py reads it. Raises BadModelFile, UnsupportedModel."""
    _check_magic(path)
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            _HeaderScanner(data).scan()
    except (ValueError, OSError) as error:
        raise BadModelFile(
            f"{path} is a truncated or corrupt GGUF file ({error}); fetch it again"
        ) from error
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{path}: {error}") from None


def _check_magic(path: Path) -> None:
    try:
        with path.open("rb") as file:
            first_bytes = file.read(24)
    except OSError as error:
        raise BadModelFile(f"{path} cannot be read ({error.strerror}); check the path") from error
    if not first_bytes:
        raise BadModelFile(f"{path} is empty; fetch it again")
    if first_bytes[:4] != b"GGUF":
        raise BadModelFile(
            f"{path} is not a GGUF file: it starts with {first_bytes[:4]!r}, not b'GGUF'; "
            "give a .gguf file, or a folder with config.json and model.safetensors"
        )
    if len(first_bytes) < 24:
        raise BadModelFile(f"{path} is truncated: {len(first_bytes)} bytes; fetch it again")
    version = int.from_bytes(first_bytes[4:8], "little")
    if version not in (2, 3):
        raise BadModelFile(
            f"{path} is GGUF version {version}; kvkeep reads versions 2 and 3 (little-endian): "
            "convert the model to GGUF again"
        )


class _HeaderScanner:
    """A cursor over a header's entries. Methods move it on, and raise ValueError at the end."""

    def __init__(self, data: mmap.mmap):
        self._data = data
        self._file_size = len(data)
        self._offset = 8  # after the magic and the version

    def scan(self) -> None:
        tensor_count, field_count = self._read_uint(8), self._read_uint(8)
        # An entry has at least these bytes: the length of a key, and a value's type; or the length
        # of a tensor's name, its number of dimensions, type, and offset.
        for _ in range(self._checked_count(field_count, entry_bytes=8 + 4)):
            self._read_string()
            self._skip_value(self._read_uint(4), depth=0)
        for _ in range(self._checked_count(tensor_count, entry_bytes=8 + 4 + 4 + 8)):
            self._check_tensor_entry()

    def _checked_count(self, count: int, entry_bytes: int) -> int:
        """Return the count. Raises ValueError unless so many entries fit into the rest."""
        if count * entry_bytes > self._file_size - self._offset:
            raise ValueError(f"{count} entries at {self._offset} would extend past its end")
        return count

    def _read(self, num_bytes: int) -> bytes:
        begin = self._offset
        self._offset += self._checked_count(num_bytes, entry_bytes=1)
        return self._data[begin : self._offset]

    def _read_uint(self, num_bytes: int) -> int:
        return int.from_bytes(self._read(num_bytes), "little")

    def _read_string(self) -> bytes:
        return self._read(self._read_uint(8))

    def _skip_value(self, value_type: int, depth: int) -> None:
        if value_type in _SCALAR_BYTES:
            self._read(_SCALAR_BYTES[value_type])
        elif value_type == _STRING_TYPE:
            self._read_string()
        elif value_type == _ARRAY_TYPE and depth < _MAX_ARRAY_DEPTH:
            item_type, count = self._read_uint(4), self._read_uint(8)
            if item_bytes := _SCALAR_BYTES.get(item_type):
                # Not by _read, which would copy a large array.
                self._offset += self._checked_count(count, item_bytes) * item_bytes
                return
            for _ in range(self._checked_count(count, entry_bytes=8)):
                self._skip_value(item_type, depth + 1)
        else:
            raise ValueError(f"a field of kind {value_type}")

    def _check_tensor_entry(self) -> None:
        """Move past the description of a tensor. Raises UnsupportedModel for an unknown type."""
        name = self._read_string().decode(errors="replace")
        num_dimensions = self._read_uint(4)
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise ValueError(f"tensor {name!r} of {num_dimensions} dimensions")
        self._read(8 * num_dimensions)
        tensor_type = self._read_uint(4)
        self._read(8)  # the offset of its data
        if tensor_type >= _MAX_TENSOR_TYPES:
            raise ValueError(f"tensor {name!r} of type {tensor_type}")
        if tensor_type not in _known_tensor_types():
            raise UnsupportedModel(
                f"tensor {name!r} is stored in type {tensor_type}, which the installed gguf "
                "package does not know: the file is newer (update gguf), or the type was dropped; "
                "use a Q4_0, Q4_1, Q8_0, K-quant, F16, BF16 or F32 file of the model"
            )


@cache
def _known_tensor_types() -> frozenset[int]:
    from gguf import GGMLQuantizationType

    return frozenset(map(int, GGMLQuantizationType))

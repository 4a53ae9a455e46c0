"""The header of a GGUF file: metadata, and where each tensor lies.

gguf-py's reader makes several arrays for every string, which takes 30 times as long for a large
vocabulary, and it trusts the counts in a header: one damaged byte makes it iterate over 2^60
entries. `read_header` makes one pass, and checks each count before it reads.

Counts are limited, since a sparse file takes no disk space, but its values take up to 100 bytes of
memory each.
"""

import mmap
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from kvkeep.errors import BadModelFile, UnsupportedModel

_STRING_TYPE, _ARRAY_TYPE = 8, 9
# Scalars by GGUF's type number: uint8, int8, uint16, int16, uint32, int32, float32, bool, (string,
# array,) uint64, int64, float64.
_SCALARS = {
    number: struct.Struct(f"<{code}") for number, code in enumerate("BbHhIif?  Qqd") if code != " "
}
_UINT32, _UINT64 = _SCALARS[4], _SCALARS[10]
_MAX_DIMENSIONS = 4
_MAX_TENSOR_TYPES = 256  # GGML numbers its types from 0: no release has more than these
_MAX_ITEMS = 1 << 22  # of all arrays together; models with 262,144 tokens have 1.3 million
_MAX_HEADER_BYTES = 64 << 20
_ALIGNMENT_KEY, _DEFAULT_ALIGNMENT = "general.alignment", 32  # bytes


@dataclass(frozen=True)
class TensorLocation:
    """A tensor's entry in a header."""

    name: str
    type_number: int  # GGML's number of the format
    shape: tuple[int, ...]  # in torch's order
    offset: int  # of its first byte in the file


@dataclass(frozen=True)
class GgufHeader:
    """The header of a file, with the tensors in the order of their entries."""

    metadata: Mapping[str, Any]  # by GGUF key
    tensors: tuple[TensorLocation, ...]


def map_file(path: Path) -> mmap.mmap:
    """Map a GGUF file into memory, read-only. Raises BadModelFile unless it begins as one."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise BadModelFile(f"{path} is not a regular file; check the path")
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise BadModelFile(f"{path} cannot be read ({error.strerror}); check the path") from error
    except ValueError as error:  # nothing to map
        raise BadModelFile(f"{path} is empty; fetch it again") from error
    _check_start(path, data[:24])
    return data


def _check_start(path: Path, first_bytes: bytes) -> None:
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


def read_header(path: Path, data: mmap.mmap) -> GgufHeader:
    """Read a file's header. data: of `map_file`. Raises BadModelFile, UnsupportedModel."""
    try:
        return _HeaderReader(data).read()
    except ValueError as error:
        raise BadModelFile(
            f"{path} is a truncated or corrupt GGUF file ({error}); fetch it again"
        ) from error
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{path}: {error}") from None


class _HeaderReader:
    """A cursor over a header's entries. Methods move it on, and raise ValueError at the end."""

    def __init__(self, data: mmap.mmap):
        self._data = data
        self._file_size = len(data)
        self._offset = 8  # after the magic and the version
        self._item_count = 0  # of the arrays so far

    def read(self) -> GgufHeader:
        tensor_count, field_count = self._scalar(_UINT64), self._scalar(_UINT64)
        metadata: dict[str, Any] = {}
        # An entry has at least these bytes: the length of a key, and a value's type; or the length
        # of a tensor's name, its number of dimensions, type, and offset.
        for _ in range(self._checked_count(field_count, entry_bytes=8 + 4)):
            key = self._string()
            if key in metadata:
                raise ValueError(f"field {key!r} appears twice")
            value_type = self._scalar(_UINT32)
            if key == _ALIGNMENT_KEY and _SCALARS.get(value_type) is not _UINT32:
                raise ValueError(f"{key} of type {value_type}")
            metadata[key] = self._value(value_type)
        tensors: dict[str, TensorLocation] = {}
        for _ in range(self._checked_count(tensor_count, entry_bytes=8 + 4 + 4 + 8)):
            tensor = self._tensor()
            if tensor.name in tensors:
                raise ValueError(f"tensor {tensor.name!r} appears twice")
            tensors[tensor.name] = tensor
        return GgufHeader(metadata, self._located(tensors, metadata))

    def _checked_count(self, count: int, entry_bytes: int) -> int:
        """Return the count. Raises ValueError unless so many entries fit into a header's rest."""
        end = self._offset + count * entry_bytes
        if end > self._file_size:
            raise ValueError(f"{count} entries at {self._offset} would extend past its end")
        if end > _MAX_HEADER_BYTES:
            raise ValueError(f"a header of more than {_MAX_HEADER_BYTES >> 20} MiB")
        return count

    def _skip(self, num_bytes: int) -> int:
        """Move past some bytes. Returns the offset of the first."""
        begin = self._offset
        self._offset += self._checked_count(num_bytes, entry_bytes=1)
        return begin

    def _scalar(self, form: struct.Struct) -> Any:
        return form.unpack_from(self._data, self._skip(form.size))[0]

    def _string(self) -> str:
        length = self._scalar(_UINT64)
        begin = self._skip(length)
        return self._data[begin : begin + length].decode()

    def _value(self, value_type: int) -> Any:
        if form := _SCALARS.get(value_type):
            return self._scalar(form)
        if value_type == _STRING_TYPE:
            return self._string()
        if value_type == _ARRAY_TYPE:
            return self._array()
        raise ValueError(f"a field of type {value_type}")

    def _array(self) -> list[Any]:
        """Read an array of scalars or strings; GGUF files have no others."""
        item_type, count = self._scalar(_UINT32), self._scalar(_UINT64)
        self._item_count += count
        if self._item_count > _MAX_ITEMS:
            raise ValueError(f"arrays of more than {_MAX_ITEMS:,} items")
        if form := _SCALARS.get(item_type):
            begin = self._skip(count * form.size)
            return list(struct.unpack_from(f"<{count}{form.format[1:]}", self._data, begin))
        if item_type == _STRING_TYPE:
            return [self._string() for _ in range(self._checked_count(count, entry_bytes=8))]
        raise ValueError(f"an array of type {item_type}")

    def _tensor(self) -> TensorLocation:
        """Read a tensor's entry, with its offset in the data. Raises UnsupportedModel."""
        name = self._string()
        num_dimensions = self._scalar(_UINT32)
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise ValueError(f"tensor {name!r} of {num_dimensions} dimensions")
        shape = tuple(self._scalar(_UINT64) for _ in range(num_dimensions))[::-1]
        type_number, offset = self._scalar(_UINT32), self._scalar(_UINT64)
        if type_number >= _MAX_TENSOR_TYPES:
            raise ValueError(f"tensor {name!r} of type {type_number}")
        if type_number not in _known_tensor_types():
            raise UnsupportedModel(
                f"tensor {name!r} is stored in type {type_number}, which the installed gguf "
                "package does not know: the file is newer (update gguf), or the type was dropped; "
                "use a Q4_0, Q4_1, Q8_0, K-quant, F16, BF16 or F32 file of the model"
            )
        return TensorLocation(name, type_number, shape, offset)

    def _located(
        self, tensors: Mapping[str, TensorLocation], metadata: Mapping[str, Any]
    ) -> tuple[TensorLocation, ...]:
        """Return the tensors with offsets in the file: their data follow the header, aligned."""
        alignment = metadata.get(_ALIGNMENT_KEY, _DEFAULT_ALIGNMENT)
        if alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"an alignment of {alignment} bytes")
        start = -(-self._offset // alignment) * alignment
        return tuple(replace(tensor, offset=start + tensor.offset) for tensor in tensors.values())


@cache
def _known_tensor_types() -> frozenset[int]:
    from gguf import GGMLQuantizationType

    return frozenset(map(int, GGMLQuantizationType))

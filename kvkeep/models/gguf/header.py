"""The header of a GGUF file: metadata, and where each tensor lies.

gguf-py's reader makes several arrays for every string, which takes 30 times as long for a large
vocabulary, and it trusts the counts in a header: one damaged byte makes it iterate over 2^60
entries. `read_header` makes one pass, and checks each count before it reads.
"""

import mmap
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
_MAX_ARRAY_DEPTH = 4  # of nested arrays; existing models have depth 1
_MAX_DIMENSIONS = 4
_MAX_TENSOR_TYPES = 256  # GGML numbers its types from 0: no release has more than these
# Of one array, and of the whole header: far above those of models, since a sparse file costs
# nothing, and its values would take many times its size in memory.
_MAX_ARRAY_ITEMS = 1 << 24
_MAX_HEADER_BYTES = 1 << 28
_DEFAULT_ALIGNMENT = 32  # bytes


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


def read_header(path: Path) -> GgufHeader:
    """Read a file's header, in less than a second. Raises BadModelFile, UnsupportedModel."""
    _check_magic(path)
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _HeaderReader(data).read()
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


class _HeaderReader:
    """A cursor over a header's entries. Methods move it on, and raise ValueError at the end."""

    def __init__(self, data: mmap.mmap):
        self._data = data
        self._file_size = len(data)
        self._offset = 8  # after the magic and the version

    def read(self) -> GgufHeader:
        tensor_count, field_count = self._scalar(_UINT64), self._scalar(_UINT64)
        metadata: dict[str, Any] = {}
        # An entry has at least these bytes: the length of a key, and a value's type; or the length
        # of a tensor's name, its number of dimensions, type, and offset.
        for _ in range(self._checked_count(field_count, entry_bytes=8 + 4)):
            key = self._string()
            if key in metadata:
                raise ValueError(f"field {key!r} appears twice")
            metadata[key] = self._value(self._scalar(_UINT32), depth=0)
        tensors: dict[str, TensorLocation] = {}
        for _ in range(self._checked_count(tensor_count, entry_bytes=8 + 4 + 4 + 8)):
            tensor = self._tensor()
            if tensor.name in tensors:
                raise ValueError(f"tensor {tensor.name!r} appears twice")
            tensors[tensor.name] = tensor
        return GgufHeader(metadata, self._located(tensors, metadata))

    def _checked_count(self, count: int, entry_bytes: int) -> int:
        """Return the count. Raises ValueError unless so many entries fit into the rest."""
        end = self._offset + count * entry_bytes
        if end > self._file_size:
            raise ValueError(f"{count} entries at {self._offset} would extend past its end")
        if end > _MAX_HEADER_BYTES:
            raise ValueError(f"its header has more than {_MAX_HEADER_BYTES >> 20} MiB")
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

    def _value(self, value_type: int, depth: int) -> Any:
        if form := _SCALARS.get(value_type):
            return self._scalar(form)
        if value_type == _STRING_TYPE:
            return self._string()
        if value_type != _ARRAY_TYPE or depth == _MAX_ARRAY_DEPTH:
            raise ValueError(f"a field of kind {value_type}")
        item_type, count = self._scalar(_UINT32), self._scalar(_UINT64)
        if count > _MAX_ARRAY_ITEMS:
            raise ValueError(f"an array of {count} items")
        if form := _SCALARS.get(item_type):
            begin = self._skip(count * form.size)
            return list(struct.unpack_from(f"<{count}{form.format[1:]}", self._data, begin))
        items = range(self._checked_count(count, entry_bytes=8))
        if item_type == _STRING_TYPE:
            return [self._string() for _ in items]
        return [self._value(item_type, depth + 1) for _ in items]

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
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"an alignment of {str(alignment)[:80]} bytes")
        start = -(-self._offset // alignment) * alignment
        return tuple(replace(each, offset=start + each.offset) for each in tensors.values())


@cache
def _known_tensor_types() -> frozenset[int]:
    from gguf import GGMLQuantizationType

    return frozenset(map(int, GGMLQuantizationType))

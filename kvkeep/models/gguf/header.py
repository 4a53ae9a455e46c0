"""What a GGUF file's header promises, held against the file before a reader trusts it.

A reader believes the counts in a header: one damaged byte makes it walk 2^60 entries that are not
there. Walking the header with an eye on the file's end costs milliseconds, takes no memory, and
tells apart a damaged file from one that is newer than the reader.
"""

import mmap
import struct
from functools import cache
from pathlib import Path

from kvkeep.errors import BadModelFile, UnsupportedModel

_STRING, _ARRAY = 8, 9
# Bytes of a value, by its type: three integers twice, float32, bool, two integers, float64.
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_DEEPEST = 4  # arrays within arrays; the models that exist have one
_MOST_DIMENSIONS = 4
_MOST_TYPES = 256  # GGML counts its types from 0: a number beyond this is no type of any release


def check_header(path: Path) -> None:
    """Raises BadModelFile where the header contradicts itself or the file's length.

    Raises UnsupportedModel for tensors of a type that the installed `gguf` does not know.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            _Walk(data).header()
    except (struct.error, ValueError, OSError) as error:
        raise BadModelFile(
            f"{path} is a truncated or corrupt GGUF file ({error}); fetch it again"
        ) from error
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{path}: {error}") from None


class _Walk:
    """at: the offset of what comes next."""

    def __init__(self, data: mmap.mmap):
        self._data = data
        self._size = len(data)
        self._at = 8  # behind the magic and the version

    def header(self) -> None:
        tensors, fields = self._number("Q"), self._number("Q")
        for _ in range(self._count(fields, minimum=8 + 4)):
            self._string()
            self._value(self._number("I"), 0)
        for _ in range(self._count(tensors, minimum=8 + 4 + 4 + 8)):
            self._tensor()

    def _number(self, code: str) -> int:
        (number,) = struct.unpack_from(f"<{code}", self._data, self._at)
        self._at += struct.calcsize(code)
        return int(number)

    def _skip(self, count: int) -> None:
        if count > self._size - self._at:
            raise ValueError(f"{count} bytes at {self._at} would go beyond its end")
        self._at += count

    def _count(self, count: int, minimum: int) -> int:
        """least: bytes that each of them takes at least."""
        if count * minimum > self._size - self._at:
            raise ValueError(f"{count} entries at {self._at} would go beyond its end")
        return count

    def _string(self) -> bytes:
        start = self._at + 8
        self._skip(self._number("Q"))
        return self._data[start : self._at]

    def _value(self, kind: int, depth: int) -> None:
        if kind in _SIZES:
            self._skip(_SIZES[kind])
        elif kind == _STRING:
            self._string()
        elif kind == _ARRAY and depth < _DEEPEST:
            inner, count = self._number("I"), self._number("Q")
            if inner in _SIZES:
                self._skip(count * _SIZES[inner])
                return
            for _ in range(self._count(count, minimum=8)):
                self._value(inner, depth + 1)
        else:
            raise ValueError(f"a field of kind {kind}")

    def _tensor(self) -> None:
        name = self._string().decode(errors="replace")
        dimensions = self._number("I")
        if not 1 <= dimensions <= _MOST_DIMENSIONS:
            raise ValueError(f"tensor {name!r} of {dimensions} dimensions")
        for _ in range(dimensions):
            self._number("Q")
        _check_type(name, self._number("I"))
        self._number("Q")


def _check_type(name: str, kind: int) -> None:
    if kind in _known_types():
        return
    if kind >= _MOST_TYPES:
        raise ValueError(f"tensor {name!r} of type {kind}")
    raise UnsupportedModel(
        f"tensor {name!r} is stored in type {kind}, which the installed gguf package does not "
        "know: the file is newer (update gguf), or of a type that was given up; take a Q4_0, "
        "Q4_1, Q8_0, K-quant, F16, BF16 or F32 file of the model instead"
    )


@cache
def _known_types() -> frozenset[int]:
    from gguf import GGMLQuantizationType

    return frozenset(int(each) for each in GGMLQuantizationType)

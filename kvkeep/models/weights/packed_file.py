"""Packed matrices in a file: made once, then memory-mapped.

A safetensors file, a model's tensors by their names; of a packed one NAME.codes and NAME.scales,
and its format in the metadata. A checksum lies beside it.
"""

import contextlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvkeep.errors import BadModelFile
from kvkeep.models.weights.checksum import Checksum, write_checksum
from kvkeep.models.weights.formats import FORMATS, Format
from kvkeep.models.weights.packing import Matrix, PackedMatrix, packed_shapes
from kvkeep.storage.files.tensors import DTYPE_NAMES, Entry, tensor_bytes, write_tensors

_VERSION = "3"
_ALTOGETHER = "packed weights"


@dataclass(frozen=True)
class Stored:
    """What a file holds under a name. kind: a format, or the dtype of a plain tensor."""

    kind: Format | torch.dtype
    shape: tuple[int, ...]

    def entries(self, name: str) -> dict[str, Entry]:
        """Of the tensors in the file."""
        if isinstance(self.kind, torch.dtype):
            nbytes = self.kind.itemsize * math.prod(self.shape)
            return {name: Entry(DTYPE_NAMES[self.kind], self.shape, nbytes)}
        codes, scales = packed_shapes(self.kind, *self.shape)
        return {
            f"{name}.codes": Entry("U8", codes, math.prod(codes)),
            f"{name}.scales": Entry("U8", scales, math.prod(scales)),
        }


def write_packed(
    path: Path, stored: Mapping[str, Stored], each: Mapping[str, Iterator[Matrix]]
) -> str:
    """Writes a file whole, and the checksum beside it, which it returns.

    each: of every name, what is stored in its order, some rows at a time: whole blocks of 16, but
    for the last. Of what is packed the scales are held until all codes are written.
    """
    entries: dict[str, Entry] = {}
    for name, one in stored.items():
        entries |= one.entries(name)
    checksum = Checksum()

    def pieces() -> Iterator[memoryview | bytes]:
        for name in stored:
            scales = []
            for matrix in each[name]:
                packed = isinstance(matrix, PackedMatrix)
                piece = tensor_bytes(matrix.data if isinstance(matrix, PackedMatrix) else matrix)
                checksum.take(f"{name}.codes" if packed else name, piece)
                if isinstance(matrix, PackedMatrix):
                    scales.append(tensor_bytes(matrix.scales))
                yield piece
            for piece in scales:
                checksum.take(f"{name}.scales", piece)
                yield piece

    formats = {n: one.kind.name for n, one in stored.items() if isinstance(one.kind, Format)}
    metadata = {"kvkeep": _ALTOGETHER, "version": _VERSION, "formats": json.dumps(formats)}
    write_tensors(path, entries, pieces(), metadata)
    digest = checksum.hexdigest()
    write_checksum(path, digest)
    return digest


def read_packed(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Matrix]:
    """What a file holds, by name, mapped; verifies no bytes.

    shapes: of all that it must hold. Raises BadModelFile where it is of another model, or not
    whole.
    """
    with _opened(path) as (file, formats):
        names = set(file.keys())  # type: ignore[no-untyped-call]
        found = {name: _read(file, names, name, formats.get(name), shapes[name]) for name in shapes}
        unused = names - {f"{name}{end}" for name in shapes for end in ("", ".codes", ".scales")}
        if unused:
            raise ValueError(f"it has {min(unused)}, which the model has not")
        return found


def stored_formats(path: Path) -> dict[str, str]:
    """The format of every packed matrix, from the header alone. Raises BadModelFile."""
    with _opened(path) as (_, formats):
        return formats


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[safe_open, dict[str, str]]]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            metadata = file.metadata() or {}
            if metadata.get("version") != _VERSION or metadata.get("kvkeep") != _ALTOGETHER:
                raise BadModelFile(f"{path} is of another version of kvkeep; remove it")
            formats = json.loads(metadata.get("formats", ""))
            if not isinstance(formats, dict) or not set(formats.values()) <= FORMATS.keys():
                raise ValueError("its formats are not those of kvkeep")
            yield file, formats
    except (SafetensorError, OSError, ValueError, TypeError) as error:
        raise BadModelFile(f"{path} is not whole ({error}); remove it") from error


def _read(
    file: safe_open, names: set[str], name: str, packed: str | None, shape: tuple[int, ...]
) -> Matrix:
    if packed is None:
        if name not in names:
            raise ValueError(f"it lacks {name}")
        plain: Tensor = file.get_tensor(name)  # type: ignore[no-untyped-call]
        if tuple(plain.shape) != shape or not plain.dtype.is_floating_point:
            raise ValueError(f"{name} has another shape than the model's")
        return plain
    kind = FORMATS[packed]
    codes: Tensor = file.get_tensor(f"{name}.codes")  # type: ignore[no-untyped-call]
    scales: Tensor = file.get_tensor(f"{name}.scales")  # type: ignore[no-untyped-call]
    held = [(tuple(each.shape), each.dtype) for each in (codes, scales)]
    if len(shape) != 2 or held != [(each, torch.uint8) for each in packed_shapes(kind, *shape)]:
        raise ValueError(f"{name} has another shape than the model's")
    return PackedMatrix(kind, shape[0], codes, scales)

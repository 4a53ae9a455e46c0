"""A model's matrices packed for decoding: made once, then memory-mapped."""

import contextlib
import hashlib
import math
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from kvkeep.errors import BadModelFile, InvalidArgument, ModelError, StoreError
from kvkeep.files.tensors import Entry, write_tensors
from kvkeep.models.checksum import (
    Checksum,
    checksum_of,
    read_checksum,
    remove_checksum,
    says_the_same,
    write_checksum,
)
from kvkeep.models.library import home
from kvkeep.models.packing import (
    GROUP,
    MatrixBits,
    PackedMatrix,
    packable,
    packed,
    packed_shapes,
    quantise,
)
from kvkeep.models.spec import ModelSpec
from kvkeep.models.weights import EMBEDDING, tensor_shapes
from kvkeep.models.weights import HEAD as HEAD

Weights = Literal["bf16", "int8", "int4"]
WEIGHTS: tuple[Weights, ...] = ("bf16", "int8", "int4")
_VERSION = "1"


def matrices(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """Name and shape of what a decode step multiplies; the head under its own name, if tied too."""
    shapes = tensor_shapes(spec)
    shapes[HEAD] = shapes.pop(EMBEDDING)
    return {name: (shape[0], shape[1]) for name, shape in shapes.items() if len(shape) == 2}


def require_packable(spec: ModelSpec, weights: Weights) -> None:
    """Raises InvalidArgument for a model whose rows are not whole groups."""
    for name, (rows, columns) in matrices(spec).items():
        if not packable(rows, columns):
            raise InvalidArgument(
                f'weights="{weights}" packs groups of {GROUP} columns, and {name} has {columns}: '
                'use weights="bf16"'
            )


def stored(folder: Path) -> Weights:
    """What the model's own file held: packed weights lie beside it where nothing was lost."""
    for weights in ("int4", "int8"):
        if packed_path(folder, weights).exists():
            return weights
    return "bf16"


def find_packed(
    folder: Path,
    spec: ModelSpec,
    weights: Literal["int8", "int4"],
    tensors: Mapping[str, Tensor],
    progress: bool,
) -> dict[str, PackedMatrix]:
    """The matrices of a model, rounded and packed first where that was not done before.

    They are verified. Those that were rounded here are made anew where they are damaged; what a
    model's own file held cannot be.

    tensors: the model's, to pack. Raises InvalidArgument, ModelError, BadModelFile.
    """
    require_packable(spec, weights)
    own = packed_path(folder, weights)
    if own.exists():
        return _own(own, spec, tensors)
    path = _elsewhere(folder, weights)
    if path.exists():
        with contextlib.suppress(BadModelFile):
            found = read_packed(path, spec)
            if checksum_of(found) == read_checksum(path):
                return found
        if read_checksum(path):  # else it was packed before there were any
            message = f"{path} is damaged: it is packed anew from the model's tensors"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
    checksum = _pack(path, spec, weights, tensors, progress)
    found = read_packed(path, spec)
    if checksum_of(found) != checksum:
        raise BadModelFile(
            f"{path} was written and is not what was written: the disk or memory fails. Set "
            'KVKEEP_HOME to a folder elsewhere, or use weights="bf16"'
        )
    return found


def _own(path: Path, spec: ModelSpec, tensors: Mapping[str, Tensor]) -> dict[str, PackedMatrix]:
    """What the model's file held, which lies beside the tensors that it was unpacked to."""
    found = read_packed(path, spec)
    checksum = checksum_of(found)
    if checksum == read_checksum(path):
        return found
    for name, matrix in found.items():
        if not says_the_same(matrix, tensors[_source(name, spec)]):
            raise BadModelFile(
                f"{path} is damaged: {name} is not what the model's tensors say. Remove it, and "
                'the model is fetched or converted again, or use weights="bf16"'
            )
    write_checksum(path, checksum)
    return found


def _pack(
    path: Path,
    spec: ModelSpec,
    weights: Literal["int8", "int4"],
    tensors: Mapping[str, Tensor],
    progress: bool,
) -> str:
    """Returns the checksum of what was written. Raises ModelError."""
    shapes = matrices(spec)
    bits: MatrixBits = 4 if weights == "int4" else 8
    how: dict[str, MatrixBits] = {name: 8 if name == HEAD else bits for name in shapes}

    def each() -> Iterator[PackedMatrix]:
        for name in tqdm(shapes, f"packing to {weights}", disable=None if progress else True):
            yield packed(quantise(tensors[_source(name, spec)], how[name]))

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_checksum(path)
        checksum = write_packed(path, shapes, how, each())
        write_checksum(path, checksum)
        return checksum
    except (OSError, StoreError) as error:
        raise ModelError(
            f"cannot write packed weights to {path.parent} ({error}); free some space, set "
            'KVKEEP_HOME to a folder that can be written, or use weights="bf16"'
        ) from error


def write_packed(
    path: Path,
    shapes: Mapping[str, tuple[int, int]],
    bits: Mapping[str, MatrixBits],
    each: Iterator[PackedMatrix],
) -> str:
    """A safetensors file: NAME.data of each matrix, then NAME.scales of each.

    shapes, bits: of the matrices, in the order in which `each` yields them. Returns the checksum.
    """
    sizes = {name: packed_shapes(bits[name], *shape) for name, shape in shapes.items()}
    entries = {
        f"{name}.data": Entry("U8", data, math.prod(data)) for name, (data, _) in sizes.items()
    } | {
        f"{name}.scales": Entry("F16", scales, 2 * math.prod(scales))
        for name, (_, scales) in sizes.items()
    }

    checksum = Checksum()

    def pieces() -> Iterator[memoryview]:
        scales = []
        for name, matrix in zip(shapes, each, strict=True):
            checksum.take(f"{name}.data", matrix.data)
            yield matrix.data.numpy().data
            scales.append(matrix.scales)
        for name, x in zip(shapes, scales, strict=True):
            checksum.take(f"{name}.scales", x)
            yield x.view(torch.int16).numpy().data

    write_tensors(path, entries, pieces(), {"kvkeep": "packed weights", "version": _VERSION})
    return checksum.hexdigest()


def read_packed(path: Path, spec: ModelSpec) -> dict[str, PackedMatrix]:
    """Raises BadModelFile where the file is not of this model, or not whole; verifies no bytes."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            if (file.metadata() or {}).get("version") != _VERSION:
                raise BadModelFile(f"{path} is of another version of kvkeep; remove it")
            return {name: _read(file, name, *shape) for name, shape in matrices(spec).items()}
    except (SafetensorError, OSError, ValueError) as error:
        raise BadModelFile(f"{path} is not whole ({error}); remove it") from error


def _read(file: safe_open, name: str, rows: int, columns: int) -> PackedMatrix:
    data: Tensor = file.get_tensor(f"{name}.data")  # type: ignore[no-untyped-call]
    scales: Tensor = file.get_tensor(f"{name}.scales")  # type: ignore[no-untyped-call]
    matrix = PackedMatrix(4 if data.shape[-1] == 256 else 8, rows, data, scales)
    if packed_shapes(matrix.bits, rows, columns) != (tuple(data.shape), tuple(scales.shape)):
        raise ValueError(f"{name} has another shape than the model's")
    return matrix


def _source(name: str, spec: ModelSpec) -> str:
    """The tensor that a matrix is packed from."""
    return EMBEDDING if name == HEAD and spec.tied_head else name


def packed_path(folder: Path, weights: str) -> Path:
    """Where a model's own packed matrices lie, in the folder that it was converted to."""
    return folder / _file_name(weights)


def _file_name(weights: str) -> str:
    return f"packed-{weights}.safetensors"


def _elsewhere(folder: Path, weights: str) -> Path:
    """For a folder that may not be ours to write to: under kvkeep's home, for this state of it."""
    files = sorted(folder.glob("*.safetensors"))
    state = [f"{folder.resolve()}"] + [
        f"{path.name} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in files
    ]
    digest = hashlib.sha256("\n".join(state).encode()).hexdigest()[:16]
    return home() / "packed" / f"{folder.name}-{digest}" / _file_name(weights)

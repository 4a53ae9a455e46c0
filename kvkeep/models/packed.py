"""A model's matrices packed for decoding: made once, then memory-mapped."""

import hashlib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from kvkeep.errors import BadModelFile, InvalidArgument, ModelError, StoreError
from kvkeep.files.tensors import Entry, write_tensors
from kvkeep.models.library import home
from kvkeep.models.packing import (
    GROUP,
    Bits,
    PackedMatrix,
    packable,
    packed,
    packed_shapes,
    quantise,
)
from kvkeep.models.spec import ModelSpec
from kvkeep.models.weights import tensor_shapes

Weights = Literal["bf16", "int8", "int4"]
WEIGHTS: tuple[Weights, ...] = ("bf16", "int8", "int4")
HEAD = "lm_head.weight"
_VERSION = "1"


def matrices(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """Name and shape of what a decode step multiplies; the head under its own name, if tied too."""
    shapes = tensor_shapes(spec)
    shapes[HEAD] = shapes.pop("model.embed_tokens.weight")
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

    tensors: the model's, to pack. Raises InvalidArgument, ModelError, BadModelFile.
    """
    require_packable(spec, weights)
    own = packed_path(folder, weights)
    path = own if own.exists() else _elsewhere(folder, weights)
    if not path.exists():
        bits: Bits = 4 if weights == "int4" else 8

        shapes = matrices(spec)
        how: dict[str, Bits] = {name: 8 if name == HEAD else bits for name in shapes}

        def each() -> Iterator[PackedMatrix]:
            for name in tqdm(shapes, f"packing to {weights}", disable=None if progress else True):
                source = "model.embed_tokens.weight" if _tied(name, spec) else name
                yield packed(quantise(tensors[source], how[name]))

        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_packed(path, shapes, how, each())
        except (OSError, StoreError) as error:
            raise ModelError(
                f"cannot write packed weights to {path.parent} ({error}); free some space, set "
                'KVKEEP_HOME to a folder that can be written, or use weights="bf16"'
            ) from error
    return read_packed(path, spec)


def write_packed(
    path: Path,
    shapes: Mapping[str, tuple[int, int]],
    bits: Mapping[str, Bits],
    each: Iterator[PackedMatrix],
) -> None:
    """A safetensors file: NAME.data of each matrix, then NAME.scales of each.

    shapes, bits: of the matrices, in the order in which `each` yields them.
    """
    sizes = {name: packed_shapes(bits[name], *shape) for name, shape in shapes.items()}
    entries = {
        f"{name}.data": Entry("U8", data, math.prod(data)) for name, (data, _) in sizes.items()
    } | {
        f"{name}.scales": Entry("F16", scales, 2 * math.prod(scales))
        for name, (_, scales) in sizes.items()
    }

    def pieces() -> Iterator[memoryview]:
        scales = []
        for matrix in each:
            yield matrix.data.numpy().data
            scales.append(matrix.scales)
        yield from (x.view(torch.int16).numpy().data for x in scales)

    write_tensors(path, entries, pieces(), {"kvkeep": "packed weights", "version": _VERSION})


def read_packed(path: Path, spec: ModelSpec) -> dict[str, PackedMatrix]:
    """Raises BadModelFile where the file is not of this model, or not whole."""
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


def _tied(name: str, spec: ModelSpec) -> bool:
    return name == HEAD and spec.tied_head


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

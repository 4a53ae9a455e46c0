"""A converted model as a folder that transformers and others read: all tensors unpacked."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from kvkeep.errors import InvalidArgument, ModelError, StoreError
from kvkeep.models.spec.config import read_spec
from kvkeep.models.spec.model_spec import ModelSpec
from kvkeep.models.weights.checkpoint import stored_parts
from kvkeep.models.weights.clamped_experts import as_stored
from kvkeep.models.weights.packed import find_own, own_file
from kvkeep.models.weights.packing import Matrix, PackedMatrix, as_tensor, some_rows
from kvkeep.models.weights.rows import half_layout
from kvkeep.models.weights.stored_experts import stack_shape
from kvkeep.storage.files.folder import making
from kvkeep.storage.files.tensors import Entry, tensor_bytes, write_tensors

_NAMES = {torch.bfloat16: "BF16", torch.float32: "F32"}


def export(
    folder: Path, to: Path, dtype: torch.dtype = torch.bfloat16, progress: bool = False
) -> None:
    """Writes `to`, whole or not at all: config, tokenizer, template, and model.safetensors.

    folder: of a model that was converted. dtype: bfloat16, to which weights are rounded once, or
    float32. Memory: some rows at a time.

    Raises InvalidArgument where `to` is there already or the model was never packed, BadModelFile
    for one that is damaged, ModelError where it cannot be written.
    """
    own = own_file(folder)
    if own is None:
        raise InvalidArgument(f"{folder} is in that form already: give that folder")
    if to.exists():
        raise InvalidArgument(f"{to} is there already: give a folder that is not")
    spec = read_spec(folder)
    found, parts = find_own(own, spec), stored_parts(spec)
    entries = {
        name: _entry([found[each] for each in of], dtype, stack_shape(spec, name))
        for name, of in parts.items()
    }
    bar = tqdm(
        total=sum(entry.nbytes for entry in entries.values()),
        desc="unpacking",
        unit="B",
        unit_scale=True,
        disable=None if progress else True,
    )

    def pieces() -> Iterator[bytes]:
        for stored, of in parts.items():
            for rows in _pieces(spec, stored, {name: found[name] for name in of}, dtype):
                piece = tensor_bytes(rows)
                yield piece
                bar.update(len(piece))

    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        with making(to.absolute()) as partial, bar:
            for path in folder.iterdir():
                if path.is_file() and path.name != "kvkeep.json" and not path.match(f"{own.name}*"):
                    shutil.copy(path, partial)
            write_tensors(partial / "model.safetensors", entries, pieces(), {"format": "pt"})
    except (OSError, StoreError) as error:
        raise ModelError(f"cannot write the model to {to} ({error}); free some space") from error


def _entry(parts: list[Matrix], dtype: torch.dtype, stack: tuple[int, ...] | None) -> Entry:
    """Of a tensor that has the rows of these, one behind the other. stack: its shape if it is one
    of experts.
    """
    shapes = [_shape(matrix) for matrix in parts]
    shape = stack or (sum(each[0] for each in shapes), *shapes[0][1:])
    return Entry(_NAMES[dtype], shape, torch.Size(shape).numel() * dtype.itemsize)


def _pieces(
    spec: ModelSpec, stored: str, parts: dict[str, Matrix], dtype: torch.dtype
) -> Iterator[Tensor]:
    """What is stored under one name, some of it at a time."""
    if not spec.clamped_experts or stack_shape(spec, stored) is None:
        for name, matrix in parts.items():
            yield from _as_stored(spec, name, matrix, dtype)
        return
    each = len(parts) // spec.experts  # of gate and up, or of one
    matrices = iter(parts.values())
    for expert in zip(*[matrices] * each, strict=True):
        yield as_stored([as_tensor(matrix, dtype) for matrix in expert])


def _as_stored(spec: ModelSpec, name: str, matrix: Matrix, dtype: torch.dtype) -> Iterator[Tensor]:
    """A matrix, some rows at a time, in the order in which its family stores them."""
    half = half_layout(spec, name, _shape(matrix)[0])
    if half is not None:
        yield as_tensor(matrix, dtype)[half.argsort()]
        return
    for rows in some_rows(matrix):
        yield as_tensor(rows, dtype)


def _shape(matrix: Matrix) -> tuple[int, ...]:
    if isinstance(matrix, PackedMatrix):
        return matrix.rows, matrix.columns
    return tuple(matrix.shape)

"""Export of a converted model as a folder of unpacked tensors, which transformers reads."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from kvkeep.errors import InvalidArgument, ModelError, StoreError
from kvkeep.models.spec.config import read_spec
from kvkeep.models.spec.model_spec import ModelSpec
from kvkeep.models.weights.checkpoint import rope_row_order, stored_parts
from kvkeep.models.weights.expert_stacks import clamped_stack_entry, stack_shape
from kvkeep.models.weights.packed import converted_file, load_converted
from kvkeep.models.weights.packing import Matrix, PackedMatrix, as_tensor, row_chunks
from kvkeep.storage.files.atomic import atomic_folder
from kvkeep.storage.files.tensors import TensorEntry, tensor_bytes, write_tensors

_DTYPE_NAMES = {torch.bfloat16: "BF16", torch.float32: "F32"}


def export(
    folder: Path, to: Path, dtype: torch.dtype = torch.bfloat16, progress: bool = False
) -> None:
    """Write `to` atomically: config, tokenizer, template, and model.safetensors.

    Memory use: some rows of one matrix at a time.

    Args:
        folder: of a converted model.
        dtype: bfloat16, to which weights are rounded once, or float32.

    Raises:
        InvalidArgument: `to` exists, or the model was not converted.
        BadModelFile: the model is damaged.
        ModelError: `to` cannot be written.
    """
    converted = converted_file(folder)
    if converted is None:
        raise InvalidArgument(f"{folder} is in that form already: give that folder")
    if to.exists():
        raise InvalidArgument(f"{to} is there already: give a folder that is not")
    spec = read_spec(folder)
    matrices, parts = load_converted(converted, spec), stored_parts(spec)
    entries = {
        stored: _entry([matrices[name] for name in names], dtype, stack_shape(spec, stored))
        for stored, names in parts.items()
    }
    bar = tqdm(
        total=sum(entry.nbytes for entry in entries.values()),
        desc="unpacking",
        unit="B",
        unit_scale=True,
        disable=None if progress else True,
    )

    def pieces() -> Iterator[bytes]:
        for stored, names in parts.items():
            for rows in _stored_rows(spec, stored, {name: matrices[name] for name in names}, dtype):
                data = tensor_bytes(rows)
                yield data
                bar.update(len(data))

    def is_copied(path: Path) -> bool:
        written = path.name == "kvkeep.json" or path.match(f"{converted.name}*")
        return path.is_file() and not written

    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        with atomic_folder(to.absolute()) as partial, bar:
            for path in filter(is_copied, folder.iterdir()):
                shutil.copy(path, partial)
            write_tensors(partial / "model.safetensors", entries, pieces(), {"format": "pt"})
    except (OSError, StoreError) as error:
        raise ModelError(f"cannot write the model to {to} ({error}); free some space") from error


def _entry(parts: list[Matrix], dtype: torch.dtype, stack: tuple[int, ...] | None) -> TensorEntry:
    """The header entry of a tensor with the rows of its parts. stack: its shape if it is one."""
    shapes = [_shape(matrix) for matrix in parts]
    shape = stack or (sum(shape[0] for shape in shapes), *shapes[0][1:])
    return TensorEntry(_DTYPE_NAMES[dtype], shape, torch.Size(shape).numel() * dtype.itemsize)


def _stored_rows(
    spec: ModelSpec, stored: str, parts: dict[str, Matrix], dtype: torch.dtype
) -> Iterator[Tensor]:
    """The rows of a checkpoint's tensor, some at a time."""
    if not spec.clamped_experts or stack_shape(spec, stored) is None:
        for name, matrix in parts.items():
            yield from _in_stored_order(spec, name, matrix, dtype)
        return
    parts_per_expert = len(parts) // spec.experts  # gate and up, or one matrix
    matrices = iter(parts.values())
    for expert in zip(*[matrices] * parts_per_expert, strict=True):
        yield clamped_stack_entry([as_tensor(matrix, dtype) for matrix in expert])


def _in_stored_order(
    spec: ModelSpec, name: str, matrix: Matrix, dtype: torch.dtype
) -> Iterator[Tensor]:
    """A matrix, some rows at a time, in the row order of its family's checkpoints."""
    order = rope_row_order(spec, name, _shape(matrix)[0])
    if order is not None:
        yield as_tensor(matrix, dtype)[order.argsort()]
        return
    for rows in row_chunks(matrix):
        yield as_tensor(rows, dtype)


def _shape(matrix: Matrix) -> tuple[int, ...]:
    if isinstance(matrix, PackedMatrix):
        return matrix.rows, matrix.columns
    return tuple(matrix.shape)

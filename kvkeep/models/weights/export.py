"""Export of a converted model as a folder of unpacked tensors, which transformers reads."""

import shutil
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from kvkeep.errors import InvalidArgument, ModelError, StoreError
from kvkeep.models.spec.config import read_spec
from kvkeep.models.spec.model_spec import ModelSpec
from kvkeep.models.weights.checkpoint import rope_row_order, stored_parts
from kvkeep.models.weights.packed import converted_file, load_converted
from kvkeep.models.weights.packed_file import byte_bar
from kvkeep.models.weights.packing import Matrix, as_tensor, row_chunks
from kvkeep.models.weights.stacks import find_stack
from kvkeep.storage.files.atomic import atomic_folder
from kvkeep.storage.files.tensors import DTYPE_NAMES, TensorEntry, tensor_bytes, write_tensors


def export(
    folder: Path, to: Path, dtype: torch.dtype = torch.bfloat16, progress: bool = False
) -> None:
    """Write a converted model to a new folder: config, tokenizer, template, and model.safetensors.

    Atomic. Memory use: some rows of one matrix at a time.

    dtype: bfloat16, to which weights are rounded once, or float32.

    Raises:
        InvalidArgument: `to` exists, or the model was not converted.
        BadModelFile: the model is damaged.
        ModelError: `to` cannot be written.
    """
    converted = converted_file(folder)
    if converted is None:
        raise InvalidArgument(f"{folder} is a safetensors folder already: use it as it is")
    if to.exists():
        raise InvalidArgument(f"{to} already exists: choose another folder")
    spec = read_spec(folder)
    matrices = load_converted(converted, spec)
    parts = {
        stored: {name: matrices[name] for name in names}
        for stored, names in stored_parts(spec).items()
    }
    entries = {stored: _header_entry(spec, stored, parts[stored], dtype) for stored in parts}
    bar = byte_bar(sum(entry.nbytes for entry in entries.values()), "unpacking", progress)

    def chunks() -> Iterator[bytes]:
        for stored in parts:
            for rows in _stored_rows(spec, stored, parts[stored], dtype):
                chunk = tensor_bytes(rows)
                yield chunk
                bar.update(len(chunk))

    def is_copied(path: Path) -> bool:
        is_conversion_file = path.name == "kvkeep.json" or path.match(f"{converted.name}*")
        return path.is_file() and not is_conversion_file

    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        with atomic_folder(to.absolute()) as partial_folder, bar:
            for path in filter(is_copied, folder.iterdir()):
                shutil.copy(path, partial_folder)
            write_tensors(partial_folder / "model.safetensors", entries, chunks(), {"format": "pt"})
    except (OSError, StoreError) as error:
        raise ModelError(f"cannot write the model to {to} ({error}); free some space") from error


def _header_entry(
    spec: ModelSpec, stored: str, parts: Mapping[str, Matrix], dtype: torch.dtype
) -> TensorEntry:
    """Return the header entry of the tensor `stored`. parts: the decoder's tensors in it."""
    part_shape = tuple(next(iter(parts.values())).shape)
    stack = find_stack(spec, stored, part_shape[1:])
    shape = stack.shape if stack else part_shape
    return TensorEntry(DTYPE_NAMES[dtype], shape, prod(shape) * dtype.itemsize)


def _stored_rows(
    spec: ModelSpec, stored: str, parts: Mapping[str, Matrix], dtype: torch.dtype
) -> Iterator[Tensor]:
    if spec.clamped_experts and find_stack(spec, stored):
        matrices, count = list(parts.values()), len(parts) // spec.experts  # gate and up, or down
        for first in range(0, len(matrices), count):
            expert = matrices[first : first + count]
            rows = torch.stack([as_tensor(matrix, dtype) for matrix in expert], 1).flatten(0, 1)
            yield rows.t().contiguous()  # rows of gate and up alternate
        return
    for name, matrix in parts.items():
        row_order = rope_row_order(spec, name, matrix.shape[0])
        if row_order is not None:
            yield as_tensor(matrix, dtype)[row_order.argsort()]
        else:
            yield from (as_tensor(rows, dtype) for rows in row_chunks(matrix))

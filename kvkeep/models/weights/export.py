"""Export of a converted model as a folder of unpacked tensors, which transformers reads."""

import json
import shutil
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from kvkeep.errors import InvalidArgument, ModelError, StoreError
from kvkeep.models.layers.delta_net import DELTA_NET_OUTPUT, output_columns
from kvkeep.models.spec.config import read_spec
from kvkeep.models.spec.config_fields import read_json
from kvkeep.models.spec.config_states import TILED_OUTPUT_FIELD
from kvkeep.models.spec.model_spec import ModelSpec
from kvkeep.models.spec.pooling import POOLING_FOLDER
from kvkeep.models.text.template_files import ADDITIONAL_FOLDER
from kvkeep.models.weights.checkpoint import decoder_names_by_stored_name, rope_row_order
from kvkeep.models.weights.packed import converted_file, load_converted
from kvkeep.models.weights.packed_file import byte_progress_bar
from kvkeep.models.weights.packing import Matrix, as_tensor, row_chunks
from kvkeep.models.weights.stacks import find_stack
from kvkeep.models.weights.value_heads import fused_row_order
from kvkeep.storage.files.atomic import atomic_folder
from kvkeep.storage.files.tensors import DTYPE_NAMES, TensorEntry, tensor_bytes, write_tensors


def export(
    folder: Path, to: Path, dtype: torch.dtype = torch.bfloat16, progress: bool = False
) -> None:
    """Write a converted model to a new folder: config, tokenizer, template, and model.safetensors.

    Atomic. Memory use: some rows of one matrix at a time, and of one whose rows have another order
    in the checkpoint some copies in `dtype`. dtype: bfloat16, to which weights are rounded once, or
    float32.

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
    parts_by_name = {
        stored_name: {name: matrices[name] for name in names}
        for stored_name, names in decoder_names_by_stored_name(spec).items()
    }
    entries = {name: _header_entry(spec, name, x, dtype) for name, x in parts_by_name.items()}
    bar = byte_progress_bar(sum(entry.nbytes for entry in entries.values()), "unpacking", progress)

    def chunks() -> Iterator[bytes]:
        for stored_name, parts in parts_by_name.items():
            for rows in _stored_rows(spec, stored_name, parts, dtype):
                chunk = tensor_bytes(rows)
                yield chunk
                bar.update(len(chunk))

    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        with atomic_folder(to.absolute()) as partial_folder, bar:
            _copy_other_files(folder, partial_folder, converted)
            write_tensors(partial_folder / "model.safetensors", entries, chunks(), {"format": "pt"})
    except (OSError, StoreError) as error:
        raise ModelError(f"cannot write the model to {to} ({error}); free some space") from error


def _copy_other_files(folder: Path, to: Path, converted: Path) -> None:
    """Copy a model's config, tokenizer and template. converted: the file of its weights."""
    for path in folder.iterdir():
        if path.name == "config.json":
            (to / path.name).write_bytes(_exported_config(path))
            continue
        is_conversion_file = path.name == "kvkeep.json" or path.match(f"{converted.name}*")
        if path.is_file() and not is_conversion_file:
            shutil.copy(path, to)
        elif path.name in (ADDITIONAL_FOLDER, POOLING_FOLDER):
            shutil.copytree(path, to / path.name)


def _exported_config(path: Path) -> bytes:
    """Return a config.json without the field that only converted weights need."""
    config = read_json(path)
    if config.pop(TILED_OUTPUT_FIELD, None) is None:
        return path.read_bytes()
    return f"{json.dumps(config, indent=2, ensure_ascii=False)}\n".encode()


def _header_entry(
    spec: ModelSpec, stored_name: str, parts: Mapping[str, Matrix], dtype: torch.dtype
) -> TensorEntry:
    """Return the header entry of a checkpoint tensor. parts: the decoder's tensors in it."""
    part_shape = tuple(next(iter(parts.values())).shape)
    stack = find_stack(spec, stored_name, part_shape[1:])
    shape = stack.shape if stack else part_shape
    return TensorEntry(DTYPE_NAMES[dtype], shape, prod(shape) * dtype.itemsize)


def _stored_rows(
    spec: ModelSpec, stored_name: str, parts: Mapping[str, Matrix], dtype: torch.dtype
) -> Iterator[Tensor]:
    """Yield the rows of a checkpoint tensor, some at a time, in the checkpoint's order."""
    if spec.clamped_experts and find_stack(spec, stored_name):
        matrices, per_expert = list(parts.values()), len(parts) // spec.experts
        for first in range(0, len(matrices), per_expert):  # gate and up of an expert, or down
            tensors = [as_tensor(matrix, dtype) for matrix in matrices[first : first + per_expert]]
            rows = torch.stack(tensors, 1).flatten(0, 1)  # rows of gate and up alternate
            yield rows.t().contiguous()
        return
    if (fused_order := fused_row_order(spec.states, stored_name)) is not None:
        fused = torch.cat([as_tensor(matrix, dtype) for matrix in parts.values()])
        yield fused[torch.from_numpy(fused_order.argsort())]
        return
    if spec.states is not None and stored_name.endswith(DELTA_NET_OUTPUT):
        (matrix,) = parts.values()
        yield from (output_columns(spec.states, as_tensor(x, dtype)) for x in row_chunks(matrix))
        return
    for name, matrix in parts.items():
        row_order = rope_row_order(spec, name, matrix.shape[0])
        if row_order is not None:
            yield as_tensor(matrix, dtype)[row_order.argsort()]
        else:
            yield from (as_tensor(rows, dtype) for rows in row_chunks(matrix))

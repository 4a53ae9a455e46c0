"""Conversion of a GGUF file to a model folder in Hugging Face layout.

Matrices keep their quantised formats, so that later starts only map one file.
"""

import json
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvkeep.models.gguf.config import config_from_gguf, generation_config
from kvkeep.models.gguf.file import GgufFile, PackedTensor
from kvkeep.models.gguf.tensors import named_tensors
from kvkeep.models.gguf.tokenizer import build_tokenizer
from kvkeep.models.gguf.vocabulary import special_token
from kvkeep.models.layers.delta_net import GATED_NORM
from kvkeep.models.layers.network import tensor_shapes
from kvkeep.models.spec.config import spec_from_config
from kvkeep.models.spec.model_spec import ModelSpec
from kvkeep.models.spec.pooling import pooling_files
from kvkeep.models.text.template_files import ADDITIONAL_FOLDER, TEMPLATE_FILE
from kvkeep.models.weights.checkpoint import decoder_name, decoder_shapes, rope_row_order
from kvkeep.models.weights.formats import FORMATS, Format
from kvkeep.models.weights.packed import converted_path
from kvkeep.models.weights.packed_file import NewMatrix, write_packed
from kvkeep.models.weights.packing import Matrix, from_gguf, is_packable, pack, row_ranges
from kvkeep.models.weights.stacks import find_stack
from kvkeep.models.weights.tensors import check_tensors
from kvkeep.models.weights.value_heads import delta_net_row_order, fused_row_order
from kvkeep.storage.files.atomic import write_atomic

_TEMPLATE_KEY = re.compile(r"tokenizer\.chat_template(\.(?P<name>[A-Za-z0-9_-]+))?")
_UNQUANTISED_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def convert(gguf_path: Path, folder: Path, progress: bool) -> None:
    """Write the model in a GGUF file to `folder`: its tensors, config, tokenizer, chat template.

    Everything is checked before `folder` is created. Tensors are converted in chunks of rows, which
    bounds memory. progress: show a progress bar. Raises BadModelFile, UnsupportedModel.
    """
    file = GgufFile.open(gguf_path)
    config = config_from_gguf(file)
    spec = spec_from_config(config, {}, gguf_path)
    tensors = named_tensors(file, spec.architecture)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    check_tensors(spec, decoder_shapes(spec, shapes), gguf_path)
    tokenizer = build_tokenizer(file)
    chat_templates = _chat_templates(file)
    pooling = pooling_files(file.non_negative_int("{arch}.pooling_type", 0))

    folder.mkdir(parents=True, exist_ok=True)
    _write_weights(converted_path(folder), tensors, spec, progress)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(file))
    _write_json(folder / "generation_config.json", generation_config(file))
    for path, content in pooling.items():
        (folder / path).parent.mkdir(exist_ok=True)
        _write_json(folder / path, content)
    for path, template in chat_templates.items():
        (folder / path).parent.mkdir(exist_ok=True)
        write_atomic(folder / path, template.encode())
    _write_json(folder / "config.json", config)


def _row_order(name: str, tensor: PackedTensor, spec: ModelSpec) -> NDArray[np.int64]:
    """Return the index of the GGUF row for each row of the Hugging Face tensor, `[rows]`.

    In queries and keys of `_REORDERED_ARCHITECTURES`, GGUF stores the two elements of each rotated
    pair as neighbours; Hugging Face stores all first elements of a head, then all second ones.
    The value heads of Gated DeltaNet have another order, too.
    Other tensors have the same order in both.

    Example: a head of 4 rows has the GGUF rows 0, 2, 1, 3.
    """
    rows = np.arange(tensor.shape[0], dtype=np.int64)
    if (fused_order := fused_row_order(spec.states, name)) is not None:
        return fused_order
    if spec.states is not None and (order := delta_net_row_order(spec.states, name)) is not None:
        return order
    projection = re.search(r"self_attn\.([qk])_proj\.", name)
    if projection is None or spec.architecture not in _REORDERED_ARCHITECTURES:
        return rows
    heads = spec.heads if projection[1] == "q" else spec.kv_heads
    return rows.reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


_REORDERED_ARCHITECTURES = [
    f"{name}ForCausalLM"
    for name in (
        *("Llama", "Mistral", "Ministral3", "Granite", "Mixtral", "GraniteMoe", "SmolLM3"),
        *("GraniteMoeHybrid", "Bamba"),
    )
]


def _write_weights(
    path: Path, tensors: Mapping[str, PackedTensor], spec: ModelSpec, progress: bool
) -> None:
    """Write all tensors, unpacked to bfloat16 with a warning where their format has no kernels."""
    sources, shapes = _tensor_sources(tensors, spec), tensor_shapes(spec)
    formats = {name: _stored_format(gguf_tensor) for name, (gguf_tensor, _) in sources.items()}
    types_without_kernel = {
        sources[name][0].ggml_type
        for name, stored_format in formats.items()
        if stored_format is torch.bfloat16 and sources[name][0].ggml_type != "BF16"
    }
    if types_without_kernel:
        warnings.warn(
            f"there are no kernels for {', '.join(sorted(types_without_kernel))}: these matrices "
            "are unpacked to bfloat16, which takes more memory and time; a Q4_K_M, Q5_K_M, Q6_K or "
            "Q8_0 file of the model is used without conversion",
            RuntimeWarning,
            stacklevel=2,
        )

    def converted_chunks(name: str) -> Iterator[Matrix]:
        gguf_tensor, row_indices = sources[name]
        for rows in row_ranges(len(row_indices), math.prod(gguf_tensor.shape[1:])):
            indices, transform = row_indices[rows], _transform(name, spec)
            yield _convert_rows(gguf_tensor, formats[name], indices, transform)

    matrices = {
        name: NewMatrix(stored_format, shapes[name], converted_chunks(name))
        for name, stored_format in formats.items()
    }
    write_packed(path, matrices, "converting weights", progress)


def _stored_format(tensor: PackedTensor) -> Format | torch.dtype:
    """Return the packed format or dtype in which a tensor is written."""
    packed_format = FORMATS.get(tensor.ggml_type)
    if packed_format and len(tensor.shape) == 2 and is_packable(packed_format, *tensor.shape):
        return packed_format
    return _UNQUANTISED_DTYPES.get(tensor.ggml_type, torch.bfloat16)


def _tensor_sources(
    tensors: Mapping[str, PackedTensor], spec: ModelSpec
) -> dict[str, tuple[PackedTensor, NDArray[np.int64]]]:
    """Return for each decoder tensor the GGUF tensor that holds it, and its rows there.

    Example: gate_proj and up_proj of a Phi-3 are the first and second half of one tensor's rows.
    """
    tensors_by_name = {decoder_name(spec, name): tensor for name, tensor in tensors.items()}
    sources = {}
    for stored_name, tensor in tensors_by_name.items():
        row_indices = _row_order(stored_name, tensor, spec)
        stack = find_stack(spec, stored_name)
        parts = stack.parts() if stack else [(stored_name, (), range(len(row_indices)))]
        for name, _, row_range in parts:
            part_indices = row_indices[row_range.start : row_range.stop]
            if (order := rope_row_order(spec, name, len(part_indices))) is not None:
                part_indices = part_indices[order.numpy()]
            # A tensor of its own has priority over a part of a fused one.
            if name == stored_name or name not in tensors_by_name:
                sources[name] = tensor, part_indices
    return {name: sources[name] for name in tensor_shapes(spec) if name in sources}


def _transform(name: str, spec: ModelSpec) -> Callable[[Tensor], Tensor]:
    """Return what makes the decoder's values of those in the file, which are float32."""
    # Norms are stored as weight + 1; subtracting it is exact.
    if spec.unit_norms and name.endswith("norm.weight") and not name.endswith(GATED_NORM):
        return lambda weight: weight - 1
    if name.endswith(".A_log"):  # stored as a decay, which is below 0
        return lambda decay: (-decay).log()
    return lambda weight: weight


def _convert_rows(
    tensor: PackedTensor,
    target: Format | torch.dtype,
    rows: NDArray[np.int64],
    transform: Callable[[Tensor], Tensor],
) -> Matrix:
    """Return rows in the target format or dtype. transform: applied to unpacked weights."""
    if isinstance(target, Format):
        return pack(from_gguf(target, torch.from_numpy(tensor.data[rows])))
    return transform(torch.from_numpy(tensor.unpack(rows))).to(target)


def _tokenizer_config(file: GgufFile) -> dict[str, Any]:
    """Return the contents of tokenizer_config.json: the class, and the texts of special tokens."""
    roles = ("bos", "eos", "unknown", "padding", "eot", "eom")
    hub_names = {"unknown": "unk", "padding": "pad"}  # the others are the same
    tokens = {f"{hub_names.get(role, role)}_token": special_token(file, role) for role in roles}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{name: token for name, token in tokens.items() if token is not None},
    }


def _chat_templates(file: GgufFile) -> dict[str, str]:
    """Return the chat templates by their paths in a model's folder: the default, and named ones."""
    templates = {}
    for key in file.metadata:
        match = _TEMPLATE_KEY.fullmatch(key)
        if match and (template := file.string(key)):
            name = match["name"]
            templates[f"{ADDITIONAL_FOLDER}/{name}.jinja" if name else TEMPLATE_FILE] = template
    return templates


def _write_json(path: Path, content: Any) -> None:
    write_atomic(path, f"{json.dumps(content, indent=2, ensure_ascii=False)}\n".encode())

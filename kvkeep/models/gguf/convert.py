"""Conversion of a GGUF file to a model folder in Hugging Face layout.

Matrices keep their quantised formats, so that later starts only map one file.
"""

import json
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvkeep.models.gguf.config import config_from_gguf, generation_config
from kvkeep.models.gguf.file import GgufFile, PackedTensor
from kvkeep.models.gguf.tensors import named_tensors
from kvkeep.models.gguf.tokenizer import build_tokenizer
from kvkeep.models.gguf.vocabulary import special_token
from kvkeep.models.layers.network import tensor_shapes
from kvkeep.models.spec.config import spec_from_config
from kvkeep.models.spec.model_spec import ModelSpec
from kvkeep.models.weights.checkpoint import decoder_name, decoder_shapes, rope_row_order
from kvkeep.models.weights.formats import FORMATS, Format
from kvkeep.models.weights.packed import converted_path
from kvkeep.models.weights.packed_file import NewMatrix, write_packed
from kvkeep.models.weights.packing import BLOCK, Matrix, from_gguf, is_packable, pack
from kvkeep.models.weights.stacks import find_stack
from kvkeep.models.weights.tensors import check_tensors
from kvkeep.storage.files.atomic import write_atomic

_CHUNK = 1 << 24  # weights that are converted at a time
_UNQUANTISED = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def convert(gguf: Path, folder: Path, progress: bool) -> None:
    """Write the model in a GGUF file to `folder`: its tensors, config, tokenizer, template.

    Everything is checked before `folder` is created. Memory is bounded by a chunk of rows.

    Raises BadModelFile, UnsupportedModel.
    """
    file = GgufFile.open(gguf)
    config = config_from_gguf(file)
    spec = spec_from_config(config, {}, gguf)
    tensors = named_tensors(file, spec.architecture)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    check_tensors(spec, decoder_shapes(spec, shapes), gguf)
    tokenizer = build_tokenizer(file)
    template = file.text("tokenizer.chat_template", "")

    folder.mkdir(parents=True, exist_ok=True)
    _write_weights(converted_path(folder), tensors, spec, progress)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(file))
    _write_json(folder / "generation_config.json", generation_config(file))
    if template:
        write_atomic(folder / "chat_template.jinja", template.encode())
    _write_json(folder / "config.json", config)


def _row_order(name: str, tensor: PackedTensor, spec: ModelSpec) -> NDArray[np.int64]:
    """Return the GGUF row of each row of the Hugging Face tensor.

    In the families of `_INTERLEAVED`, GGUF stores the two elements of each rotated pair as
    neighbours; Hugging Face stores all first elements of a head, then all second ones. Other
    families have the same order in both.

    Example: a head of 4 rows has the GGUF rows 0, 2, 1, 3.
    """
    rows = np.arange(tensor.shape[0], dtype=np.int64)
    projection = re.search(r"self_attn\.([qk])_proj\.", name)
    if projection is None or spec.architecture not in _INTERLEAVED:
        return rows
    heads = spec.heads if projection[1] == "q" else spec.kv_heads
    return rows.reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


_INTERLEAVED = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Ministral3ForCausalLM",
    "GraniteForCausalLM",
    "MixtralForCausalLM",
    "GraniteMoeForCausalLM",
    "SmolLM3ForCausalLM",
)


def _write_weights(
    path: Path, tensors: Mapping[str, PackedTensor], spec: ModelSpec, progress: bool
) -> None:
    """Write all tensors, unpacked to bfloat16 with a warning where their format has no kernels."""
    sources, shapes = _sources(tensors, spec), tensor_shapes(spec)
    formats = {name: _stored_format(tensor) for name, (tensor, _) in sources.items()}
    unpacked = {
        sources[name][0].quantisation
        for name, stored in formats.items()
        if stored is torch.bfloat16 and sources[name][0].quantisation != "BF16"
    }
    if unpacked:
        warnings.warn(
            f"there are no kernels for {', '.join(sorted(unpacked))}: matrices of the model in "
            "such a format are unpacked to bfloat16 and take more memory and time; a Q4_K_M, "
            "Q5_K_M, Q6_K or Q8_0 file of the model is read as it is",
            RuntimeWarning,
            stacklevel=2,
        )

    def converted_chunks(name: str) -> Iterator[Matrix]:
        tensor, rows = sources[name]
        for chunk in _row_chunks(rows, tensor):
            yield _convert_rows(tensor, formats[name], chunk, _norm_offset(spec, name))

    matrices = {
        name: NewMatrix(stored, shapes[name], converted_chunks(name))
        for name, stored in formats.items()
    }
    write_packed(path, matrices, "converting weights", progress)


def _stored_format(tensor: PackedTensor) -> Format | torch.dtype:
    """Return the packed format or dtype in which a tensor is written."""
    packed = FORMATS.get(tensor.quantisation)
    if packed and len(tensor.shape) == 2 and is_packable(packed, *tensor.shape):
        return packed
    return _UNQUANTISED.get(tensor.quantisation, torch.bfloat16)


def _row_chunks(rows: NDArray[np.int64], tensor: PackedTensor) -> Iterator[NDArray[np.int64]]:
    """Split rows into chunks of whole blocks, of about `_CHUNK` weights each."""
    row_size = max(1, int(np.prod(tensor.shape[1:])))
    step = max(BLOCK, _CHUNK // row_size // BLOCK * BLOCK)
    for start in range(0, len(rows), step):
        yield rows[start : start + step]


def _sources(
    tensors: Mapping[str, PackedTensor], spec: ModelSpec
) -> dict[str, tuple[PackedTensor, NDArray[np.int64]]]:
    """Return for each decoder tensor the GGUF tensor that holds it, and its rows there.

    Example: gate_proj and up_proj of a Phi-3 are the first and second half of one tensor's rows.
    """
    named = {decoder_name(spec, name): tensor for name, tensor in tensors.items()}
    sources = {}
    for stored, tensor in named.items():
        rows = _row_order(stored, tensor, spec)
        fused = find_stack(spec, stored)
        parts = fused.parts() if fused else [(stored, (), range(len(rows)))]
        for name, _, part in parts:
            part_rows = rows[part.start : part.stop]
            if (order := rope_row_order(spec, name, len(part_rows))) is not None:
                part_rows = part_rows[order.numpy()]
            if name == stored or name not in named:
                sources[name] = tensor, part_rows
    return {name: sources[name] for name in tensor_shapes(spec) if name in sources}


def _convert_rows(
    tensor: PackedTensor, stored: Format | torch.dtype, rows: NDArray[np.int64], offset: float
) -> Matrix:
    """Return rows in the stored format. offset: subtracted from unpacked weights."""
    if isinstance(stored, Format):
        return pack(from_gguf(stored, torch.from_numpy(tensor.data[rows])))
    unpacked = torch.from_numpy(tensor.unpack(rows))
    return (unpacked - offset if offset else unpacked).to(stored)


def _norm_offset(spec: ModelSpec, name: str) -> float:
    """Return 1 for Gemma's norms, else 0: GGUF stores weight + 1, in float32, where it is exact."""
    return 1.0 if spec.unit_norms and name.endswith("norm.weight") else 0.0


def _tokenizer_config(file: GgufFile) -> dict[str, Any]:
    roles = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    roles |= {"eot": "eot_token", "eom": "eom_token"}
    tokens = {key: special_token(file, role) for role, key in roles.items()}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{key: token for key, token in tokens.items() if token is not None},
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    write_atomic(path, f"{json.dumps(value, indent=2, ensure_ascii=False)}\n".encode())

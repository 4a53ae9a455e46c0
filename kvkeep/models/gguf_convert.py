"""GGUF to Hugging Face layout, once, so that every later start only maps a file."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from kvkeep.errors import UnsupportedModel
from kvkeep.files.tensors import Entry, write_tensors
from kvkeep.files.whole import write_whole
from kvkeep.models.checkpoint import decoder_shapes
from kvkeep.models.checksum import write_checksum
from kvkeep.models.config import spec_from_config
from kvkeep.models.fused import part_of
from kvkeep.models.gguf_config import config_from_gguf, eos_token_ids
from kvkeep.models.gguf_file import GgufFile, PackedTensor
from kvkeep.models.gguf_tokenizer import build_tokenizer, special_token
from kvkeep.models.packed import HEAD, matrices, packed_path, write_packed
from kvkeep.models.packing import MatrixBits, QuantisedMatrix, from_gguf, packable, packed, quantise
from kvkeep.models.rows import half_layout
from kvkeep.models.spec import ModelSpec
from kvkeep.models.weights import check_tensors

_CHUNK_VALUES = 1 << 24  # unpacked at a time: 64 MB of float32


def convert(gguf: Path, folder: Path, progress: bool) -> None:
    """Write the model in a GGUF file to `folder`: bf16 safetensors, config, tokenizer, template,
    and the packed matrices where the file has 4 or 8 bits.

    Everything is checked before `folder` is made. Memory: one chunk of rows, not the model.

    Raises BadModelFile, UnsupportedModel.
    """
    file = GgufFile.open(gguf)
    config = config_from_gguf(file)
    spec = spec_from_config(config, {}, gguf)
    tensors = _weights(file, spec.architecture)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    check_tensors(spec, decoder_shapes(spec, shapes), gguf)
    tokenizer = build_tokenizer(file)

    folder.mkdir(parents=True, exist_ok=True)
    _write_weights(folder / "model.safetensors", tensors, spec, progress)
    _write_packed(folder, tensors, spec)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(file))
    eos = eos_token_ids(file)
    if eos:
        _write_json(folder / "generation_config.json", {"eos_token_id": eos})
    template = file.metadata.get("tokenizer.chat_template")
    if template:
        write_whole(folder / "chat_template.jinja", template.encode())
    _write_json(folder / "config.json", config)


def row_order(name: str, tensor: PackedTensor, spec: ModelSpec) -> NDArray[np.int64] | slice:
    """Which stored row each row of the Hugging Face tensor is.

    For Llama, Mistral and Granite, GGUF lays the two halves of each rotated pair side by side;
    Hugging Face keeps all first halves, then all second ones. Other families are stored as they
    are: GLM-4's pairs lie side by side in both.
    """
    rotated = re.search(r"self_attn\.([qk])_proj\.", name)
    if rotated is None or spec.architecture not in _SIDE_BY_SIDE:
        return slice(None)
    heads = spec.heads if rotated.group(1) == "q" else spec.kv_heads
    pairs = np.arange(tensor.shape[0], dtype=np.int64).reshape(heads, -1, 2)
    return pairs.swapaxes(1, 2).reshape(-1)


_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# What is named otherwise in some: `qkv` and `up` are several matrices in one.
_LAYER_NAMES_OF = {
    "Phi3ForCausalLM": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    "Glm4ForCausalLM": {
        "ffn_up": "mlp.gate_up_proj",
        "post_attention_norm": "post_self_attn_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
    },
    "Olmo2ForCausalLM": {
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
}
_SIDE_BY_SIDE = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Ministral3ForCausalLM",
    "GraniteForCausalLM",
)
# Tables that the config says in another way.
_NOT_WEIGHTS = re.compile(
    r"rope_freqs\.weight|rope_factors_(long|short)\.weight|blk\.\d+\.attn_rot_embd\.weight"
)


def _weights(file: GgufFile, architecture: str) -> dict[str, PackedTensor]:
    """The tensors of the model by Hugging Face name, in file order."""
    names = _LAYER_NAMES | _LAYER_NAMES_OF.get(architecture, {})
    return {
        _hugging_face_name(name, names): tensor
        for name, tensor in file.tensors.items()
        if not _NOT_WEIGHTS.fullmatch(name)
    }


def _hugging_face_name(name: str, of_a_layer: Mapping[str, str]) -> str:
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if layer and layer.group(2) in of_a_layer:
        return f"model.layers.{layer.group(1)}.{of_a_layer[layer.group(2)]}.{layer.group(3)}"
    raise UnsupportedModel(f"the GGUF tensor {name} is not one of its architecture's")


def _write_weights(
    path: Path, tensors: Mapping[str, PackedTensor], spec: ModelSpec, progress: bool
) -> None:
    """All tensors as bfloat16."""
    sizes = {name: 2 * int(np.prod(tensor.shape)) for name, tensor in tensors.items()}
    bar = tqdm(
        total=sum(sizes.values()),
        desc="converting to bf16",
        unit="B",
        unit_scale=True,
        disable=None if progress else True,
    )

    def pieces() -> Iterator[memoryview]:
        for name, tensor in tensors.items():
            for piece in _as_bf16(tensor, row_order(name, tensor, spec)):
                yield piece
                bar.update(piece.nbytes)

    entries = {name: Entry("BF16", t.shape, sizes[name]) for name, t in tensors.items()}
    with bar:
        write_tensors(path, entries, pieces(), {"format": "pt"})


def _as_bf16(tensor: PackedTensor, order: NDArray[np.int64] | slice) -> Iterator[memoryview]:
    """The tensor's rows in that order, some at a time."""
    total = tensor.shape[0]
    rows = np.arange(total, dtype=np.int64)[order]
    step = max(1, _CHUNK_VALUES // max(1, int(np.prod(tensor.shape[1:]))))
    for start in range(0, total, step):
        values = torch.from_numpy(tensor.unpack(rows[start : start + step]))
        yield values.to(torch.bfloat16).view(torch.int16).numpy().data


def _write_packed(folder: Path, tensors: Mapping[str, PackedTensor], spec: ModelSpec) -> None:
    """Beside them the matrices as the file packs them, if all layers are in 4 or 8 bits."""
    names = matrices(spec)
    sources = {name: tensors[_source(name, tensors, spec)] for name in names}
    kinds = {tensor.quantisation for name, tensor in sources.items() if name != HEAD}
    if not kinds <= {"Q4_0", "Q4_1", "Q8_0"} or not all(packable(*names[n]) for n in names):
        return
    weights = "int8" if kinds == {"Q8_0"} else "int4"
    bits: Mapping[str, MatrixBits] = {
        name: 4 if source.quantisation.startswith("Q4_") else 8 for name, source in sources.items()
    }
    each = (packed(_quantised(name, source, spec)) for name, source in sources.items())
    path = packed_path(folder, weights)
    write_checksum(path, write_packed(path, names, bits, each))


def _source(name: str, tensors: Mapping[str, PackedTensor], spec: ModelSpec) -> str:
    """The tensor that a matrix is, or is in."""
    if name in tensors:
        return name
    part = part_of(spec, name)
    return part[0] if part else "model.embed_tokens.weight"


def _rows(name: str, tensor: PackedTensor, spec: ModelSpec) -> NDArray[np.int64]:
    """Which rows of its source a matrix is, in the order in which the decoder takes them."""
    rows = np.arange(tensor.shape[0], dtype=np.int64)[row_order(name, tensor, spec)]
    part = part_of(spec, name)
    if part and len(rows) != matrices(spec)[name][0]:
        rows = rows[part[1]]
    order = half_layout(spec, name, len(rows))
    return rows if order is None else rows[order.numpy()]


def _quantised(name: str, tensor: PackedTensor, spec: ModelSpec) -> QuantisedMatrix:
    rows = _rows(name, tensor, spec)
    taken = from_gguf(tensor.quantisation, torch.from_numpy(np.array(tensor.data[rows])))
    # Only a head comes in other kinds: 8 bits lose least of it.
    return taken or quantise(torch.from_numpy(tensor.unpack()), 8)


def _tokenizer_config(file: GgufFile) -> dict[str, Any]:
    roles = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    tokens = {key: special_token(file, role) for role, key in roles.items()}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{key: token for key, token in tokens.items() if token is not None},
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    write_whole(path, f"{json.dumps(value, indent=2, ensure_ascii=False)}\n".encode())

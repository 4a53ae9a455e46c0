"""Gemma in GGUF: metadata of Gemma 2, 3, 3n and 4 as config.json states it, and tensors of 3n.

Of a Gemma 3n, llama.cpp's converter stores norms unchanged, and stacks the matrices of all residual
streams but the first in one tensor of three dimensions. It pads the table of each layer's
embeddings with zeros for image and audio tokens, which have those of token 0 in a Hugging Face
folder; no text contains these tokens.
"""

import re
from collections.abc import Mapping
from statistics import NormalDist
from typing import Any

from kvkeep.errors import BadModelFile, UnsupportedModel
from kvkeep.models.gguf.file import GgufFile, PackedTensor
from kvkeep.models.gguf.layers import local_layer_flags
from kvkeep.models.gguf.rope import linear_factor, shortest_decimal

# Layers of the largest model of each, which has another attention scale than the others.
_LARGEST = {"gemma2": 46, "gemma3": 62}


def gemma_config(file: GgufFile, family: str, head_dim: int) -> dict[str, Any]:
    """Return the config's activation, attention scale and soft caps of a Gemma 2, 3 or 4.

    GGUF states no attention scale: it follows from the size of the model.
    """
    if family == "gemma4":
        return _gemma4_config(file)
    scalar = head_dim
    if file.layer_count(family) == _LARGEST[family]:
        heads = file.uniform_count(f"{family}.attention.head_count")
        scalar = file.count(f"{family}.embedding_length") // heads
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    if family == "gemma3":
        caps = dict.fromkeys(caps, 0.0)
    stated = {
        key: shortest_decimal(file.number(f"{family}.{key}", default))
        for key, default in caps.items()
    }
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        **{key: value or None for key, value in stated.items()},
    }


def _gemma4_config(file: GgufFile) -> dict[str, Any]:
    layers = file.layer_count("gemma4")
    is_local = local_layer_flags(file, "gemma4.attention.sliding_window_pattern", layers)
    if is_local is None or all(is_local):
        raise BadModelFile(
            f"{file.path} does not say which of its layers are local; fetch it again"
        )
    global_layer = is_local.index(False)
    local_layer = is_local.index(True) if any(is_local) else global_layer
    kv_heads = file.counts_per_layer("gemma4.attention.head_count_kv", layers)
    widths = file.counts_per_layer("gemma4.feed_forward_length", layers)
    shared = file.non_negative("gemma4.attention.shared_kv_layers", 0)
    head_dim = file.count("gemma4.attention.key_length")
    bases = {"full": "rope.freq_base", "sliding": "rope.freq_base_swa"}
    theta = {
        kind: shortest_decimal(file.number(f"gemma4.{key}", 1e4)) for kind, key in bases.items()
    }
    rotated_pairs, factor = _rotated_pairs(file, head_dim), linear_factor(file, "gemma4")
    cap = file.number("gemma4.final_logit_softcapping", 30.0)  # llama.cpp's default
    return {
        "head_dim": file.count("gemma4.attention.key_length_swa", head_dim),
        "global_head_dim": head_dim,
        "num_key_value_heads": kv_heads[local_layer],
        "num_global_key_value_heads": kv_heads[global_layer],
        "attention_k_eq_v": f"blk.{global_layer}.attn_v.weight" not in file.tensors,
        "num_kv_shared_layers": shared,
        "intermediate_size": widths[0],
        "use_double_wide_mlp": bool(shared) and widths[-1] == 2 * widths[0],
        "hidden_size_per_layer_input": file.non_negative(
            "gemma4.embedding_length_per_layer_input", 0
        ),
        "vocab_size_per_layer_input": file.tensors["token_embd.weight"].shape[0],
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": shortest_decimal(cap) or None,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 2 * rotated_pairs / head_dim,
                "rope_theta": theta["full"],
                **({} if factor == 1 else {"factor": factor}),
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": theta["sliding"]},
        },
    }


def _rotated_pairs(file: GgufFile, head_dim: int) -> int:
    """Return how many pairs of a head are rotated: those whose frequency divisor is 1.

    A divisor of 1e20 or more stops rotation. Raises UnsupportedModel for other divisors.
    """
    if "rope_freqs.weight" not in file.tensors:
        return head_dim // 2
    divisors = file.tensors["rope_freqs.weight"].unpack().reshape(-1).tolist()
    count = divisors.count(1.0)
    if (
        divisors != sorted(divisors)
        or any(1.0 < divisor < 1e20 for divisor in divisors)
        or not count
    ):
        raise UnsupportedModel(
            f"rope_freqs.weight in {file.path} scales RoPE, which no published Gemma 4 does; use "
            "the model's safetensors folder"
        )
    return count


GEMMA3N_LAYER_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "altup_router": "altup.modality_router",
    "altup_router_norm": "altup.router_norm",
    "altup_predict_coef": "altup.prediction_coefs",
    "altup_correct_coef": "altup.correction_coefs",
    "altup_correct_scale.weight": "altup.correct_output_scale",
    "laurel_l": "laurel.linear_left",
    "laurel_r": "laurel.linear_right",
    "laurel_post_norm": "laurel.post_laurel_norm",
}
_STACKS = {"altup_proj": "altup_projections", "altup_unembd_proj": "altup_unembed_projections"}
_STACK = re.compile(rf"({'|'.join(_STACKS)})\.weight")
# The defaults of llama.cpp.
_LAYERS_WITH_CELLS, _SPARSE_LAYERS, _SPARSITY = 20, 10, 0.95
_EMBEDDING_TABLE = "per_layer_token_embd.weight"


def gemma3n_config(file: GgufFile) -> dict[str, Any]:
    """Return the config fields of a Gemma 3n. Raises BadModelFile for missing or wrong fields."""
    laurel = file.tensors.get("blk.0.laurel_l.weight")
    if laurel is None or _EMBEDDING_TABLE not in file.tensors:
        raise BadModelFile(
            f"{file.path} lacks blk.0.laurel_l.weight or {_EMBEDDING_TABLE}, which every Gemma 3n "
            "has; fetch it again"
        )
    return {
        "intermediate_size": _mlp_widths(file),
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": shortest_decimal(
            file.number("gemma3n.final_logit_softcapping", 30.0)  # llama.cpp's default
        ),
        "num_kv_shared_layers": file.non_negative(
            "gemma3n.attention.shared_kv_layers",
            max(0, file.layer_count("gemma3n") - _LAYERS_WITH_CELLS),
        ),
        "altup_num_inputs": file.count("gemma3n.altup.num_inputs", 4),
        "altup_active_idx": file.non_negative("gemma3n.altup.active_idx", 0),
        "laurel_rank": laurel.shape[0],
        "activation_sparsity_pattern": _sparsity(file),
        "hidden_size_per_layer_input": file.count("gemma3n.embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": file.tensors[_EMBEDDING_TABLE].shape[0],
    }


def split_streams(tensors: Mapping[str, PackedTensor]) -> dict[str, PackedTensor]:
    """Cut the stacked matrices of residual streams apart, without copying.

    They get the names of `tensor_shapes`; all other tensors keep their GGUF names.
    """
    split: dict[str, PackedTensor] = {}
    for name, tensor in tensors.items():
        stack = _STACK.fullmatch(name)
        if stack is None or len(tensor.shape) != 3:
            split[name] = tensor
            continue
        for index, data in enumerate(tensor.data):
            matrix = PackedTensor(tensor.name, tensor.quantisation, tensor.shape[1:], data)
            split[f"model.{_STACKS[stack.group(1)]}.{index}.weight"] = matrix
    return split


def _mlp_widths(file: GgufFile) -> int | list[int]:
    """Return the width of all MLPs, or a list with that of each layer."""
    key = "gemma3n.feed_forward_length"
    if not isinstance(file.required(key), list):
        return file.count(key)
    widths = file.integers(key)
    return widths[0] if widths and len(set(widths)) == 1 else widths


def _sparsity(file: GgufFile) -> list[float]:
    """Return each layer's share of zeroed gate values.

    The file states a threshold in standard deviations instead of a share, minus infinity for layers
    that are not sparse. Without it the first ten layers are sparse, as in llama.cpp.
    """
    key = "gemma3n.activation_sparsity_scale"
    if file.has(key):
        return [_share(deviations) for deviations in file.numbers(key)]
    layers = file.layer_count("gemma3n")
    return [_SPARSITY if layer < _SPARSE_LAYERS else 0.0 for layer in range(layers)]


def _share(deviations: float) -> float:
    """Return the share of a normal distribution below a threshold, as a short decimal."""
    share = NormalDist().cdf(deviations)
    for digits in range(1, 9):
        rounded = round(share, digits)
        if 0 < rounded < 1 and abs(NormalDist().inv_cdf(rounded) - deviations) < 1e-6:
            return rounded
    return share

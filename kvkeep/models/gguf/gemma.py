"""What a GGUF file says of Gemma 2, 3 and 4 alone, as `config.json` says it."""

from typing import Any

from kvkeep.errors import BadModelFile, UnsupportedModel
from kvkeep.models.gguf.file import GgufFile
from kvkeep.models.gguf.layers import layers_said
from kvkeep.models.gguf.rope import linear_factor, shortest

_LARGEST = {"gemma2": 46, "gemma3": 62}  # layers of the one whose attention is scaled otherwise


def gemma_config(file: GgufFile, family: str, head_dim: int) -> dict[str, Any]:
    """Gemma's activation, scale and caps. GGUF has no scale: it follows from the size."""
    if family == "gemma4":
        return _gemma4(file)
    scalar = head_dim
    if file.layers(family) == _LARGEST[family]:
        heads = file.same(f"{family}.attention.head_count")
        scalar = file.count(f"{family}.embedding_length") // heads
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    if family == "gemma3":
        caps = dict.fromkeys(caps, 0.0)
    said = {key: shortest(file.number(f"{family}.{key}", usual)) for key, usual in caps.items()}
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        **{key: value or None for key, value in said.items()},
    }


def _gemma4(file: GgufFile) -> dict[str, Any]:
    """Gemma 4's, which has other heads in layers that see everything."""
    layers = file.layers("gemma4")
    is_local = layers_said(file, "gemma4.attention.sliding_window_pattern", layers)
    if is_local is None or all(is_local):
        raise BadModelFile(
            f"{file.path} does not say which of its layers are local; fetch it again"
        )
    whole = is_local.index(False)
    near = is_local.index(True) if any(is_local) else whole
    kv_heads = file.of_each("gemma4.attention.head_count_kv", layers)
    widths = file.of_each("gemma4.feed_forward_length", layers)
    shared = file.whole("gemma4.attention.shared_kv_layers", 0)
    head_dim = file.count("gemma4.attention.key_length")
    bases = {"full": "rope.freq_base", "sliding": "rope.freq_base_swa"}
    theta = {kind: shortest(file.number(f"gemma4.{key}", 1e4)) for kind, key in bases.items()}
    rotated, factor = _rotated(file, head_dim), linear_factor(file, "gemma4")
    cap = file.number("gemma4.final_logit_softcapping", 30.0)  # llama.cpp's, where none is said
    return {
        "head_dim": file.count("gemma4.attention.key_length_swa", head_dim),
        "global_head_dim": head_dim,
        "num_key_value_heads": kv_heads[near],
        "num_global_key_value_heads": kv_heads[whole],
        "attention_k_eq_v": f"blk.{whole}.attn_v.weight" not in file.tensors,
        "num_kv_shared_layers": shared,
        "intermediate_size": widths[0],
        "use_double_wide_mlp": bool(shared) and widths[-1] == 2 * widths[0],
        "hidden_size_per_layer_input": file.whole("gemma4.embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": file.tensors["token_embd.weight"].shape[0],
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": shortest(cap) or None,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 2 * rotated / head_dim,
                "rope_theta": theta["full"],
                **({} if factor == 1 else {"factor": factor}),
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": theta["sliding"]},
        },
    }


def _rotated(file: GgufFile, head_dim: int) -> int:
    """Pairs that are rotated: the divisors of their frequencies are 1, of others out of measure."""
    if "rope_freqs.weight" not in file.tensors:
        return head_dim // 2
    divisors = file.tensors["rope_freqs.weight"].unpack().reshape(-1).tolist()
    count = divisors.count(1.0)
    if divisors != sorted(divisors) or any(1.0 < each < 1e20 for each in divisors) or not count:
        raise UnsupportedModel(
            f"rope_freqs.weight in {file.path} scales RoPE, which no published Gemma 4 does; use "
            "the model's safetensors folder"
        )
    return count

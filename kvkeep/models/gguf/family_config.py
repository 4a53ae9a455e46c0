"""Config fields that only some families have: experts, local layers, and Gemma's own."""

from statistics import NormalDist
from typing import Any

from kvkeep.errors import BadModelFile
from kvkeep.models.gguf.file import GgufFile
from kvkeep.models.gguf.nemotron_config import NEMOTRON_ARCHS
from kvkeep.models.gguf.rope import attention_factor, linear_factor, unscaled_longrope

# Architectures with experts, by the config field for their number.
_SHARED_EXPERT_ARCHS = ("qwen2moe", "qwen3next", "qwen35moe")
_LFM2_MOE = "lfm2moe"
_NUM_EXPERTS_ARCHS = (
    *(*_SHARED_EXPERT_ARCHS, "qwen3moe", "qwen3vlmoe", "olmoe", "gemma4", _LFM2_MOE),
)
_GRANITE4_H = "granitehybrid"
_NUM_LOCAL_EXPERTS_ARCHS = ("llama", "granitemoe", "gpt-oss", _GRANITE4_H)
_OPTIONAL_EXPERTS_ARCHS = ("llama", "gemma4", _GRANITE4_H)  # some models of these have no experts
# Renormalise expert weights by default.
_NORM_TOPK_ARCHS = ("qwen3moe", "qwen3vlmoe", "qwen3next", "qwen35moe", _LFM2_MOE)
# Some layers may have a plain MLP.
_SOME_DENSE_ARCHS = (*_SHARED_EXPERT_ARCHS, "qwen3moe", "qwen3vlmoe")
# Supported values of a router's settings, the default first.
_ROUTER_VALUES: dict[str, tuple[float, ...]] = {
    "expert_gating_func": (1,),  # LLAMA_EXPERT_GATING_FUNC_TYPE_SOFTMAX
    "expert_weights_scale": (0.0, 1.0),
    "expert_group_count": (0, 1),
    "expert_shared_count": (0, 1),
    "expert_shared_feed_forward_length": (0,),
}
# Those of a router that weights experts by the sigmoids of their scores.
_SIGMOID_VALUES: dict[str, tuple[float, ...]] = {"expert_gating_func": (2,)}
# Architectures with local layers, which see only a sliding window.
_LOCAL_ARCHS = ("gemma2", "gemma3", "cohere2", "exaone4", "olmo2", "gpt-oss", "gemma3n", "gemma4")
_DEFAULT_WINDOWS = {"gemma2": 4096, "gemma3n": 512}
_ALWAYS_LOCAL_ARCHS = ("cohere2", "gpt-oss", "gemma4")  # every model of these has local layers

# The largest Gemma 2 and 3 have another attention scale than the others.
_LARGEST_GEMMA_LAYERS = {"gemma2": 46, "gemma3": 62}
# Gemma 3n's defaults, as in llama.cpp.
_DEFAULT_LAYERS_WITH_KV, _DEFAULT_SPARSE_LAYERS, _DEFAULT_SPARSITY = 20, 10, 0.95
_SOFTCAP_KEY, _DEFAULT_SOFTCAP = "{arch}.final_logit_softcapping", 30.0  # as in llama.cpp
_PER_LAYER_TABLE = "per_layer_token_embd.weight"
_GELU_FIELDS: dict[str, Any] = {"hidden_activation": "gelu_pytorch_tanh"}


def experts_config(file: GgufFile) -> dict[str, Any]:
    """Return the fields of experts; empty without them. Raises UnsupportedModel, BadModelFile."""
    if file.arch in NEMOTRON_ARCHS:
        return {}  # part of `state_config`
    arch, num_experts = file.arch, file.non_negative_int("{arch}.expert_count", 0)
    if arch not in _NUM_EXPERTS_ARCHS + _NUM_LOCAL_EXPERTS_ARCHS:
        if num_experts:
            feature = f"is a mixture of experts with the architecture name {arch}"
            raise file.unsupported_error(feature)
        return {}
    if not num_experts and arch in _OPTIONAL_EXPERTS_ARCHS:
        return {"num_local_experts": 0} if arch == _GRANITE4_H else {}
    router_values = _ROUTER_VALUES | (_SIGMOID_VALUES if arch == _LFM2_MOE else {})
    for key, supported in router_values.items():
        value = file.number("{arch}." + key, supported[0])
        is_shared_width = key == "expert_shared_feed_forward_length"
        has_shared_width = is_shared_width and arch in (*_SHARED_EXPERT_ARCHS, _GRANITE4_H)
        if value not in supported and not has_shared_width:
            raise file.unsupported_error(f"is a mixture of experts with {key} {value!r}")
    count_field = "num_experts" if arch in _NUM_EXPERTS_ARCHS else "num_local_experts"
    per_token_field = "top_k_experts" if arch == "gemma4" else "num_experts_per_tok"
    config: dict[str, Any] = {
        count_field: file.positive_int("{arch}.expert_count"),
        per_token_field: file.uniform_int("{arch}.expert_used_count"),
    }
    if arch == _LFM2_MOE:
        config |= _lfm2_moe_config(file)
    if arch in ("gemma4", _LFM2_MOE) or arch in _SOME_DENSE_ARCHS:
        config["moe_intermediate_size"] = file.uniform_int("{arch}.expert_feed_forward_length")
    if arch == "gemma4":
        config["enable_moe_block"] = True
    elif arch in _NUM_EXPERTS_ARCHS:
        norm_by_default = arch in _NORM_TOPK_ARCHS
        config["norm_topk_prob"] = file.boolean("{arch}.expert_weights_norm", norm_by_default)
    if arch in _SOME_DENSE_ARCHS:
        layers, tensors = range(file.layer_count()), file.tensors
        config["mlp_only_layers"] = [i for i in layers if f"blk.{i}.ffn_gate.weight" in tensors]
    if arch in _SHARED_EXPERT_ARCHS:
        shared_width = file.positive_int("{arch}.expert_shared_feed_forward_length")
        config["shared_expert_intermediate_size"] = shared_width
    if arch == "qwen2moe":
        config["qkv_bias"] = "blk.0.attn_q.bias" in file.tensors
    return config


def _lfm2_moe_config(file: GgufFile) -> dict[str, Any]:
    num_dense = file.non_negative_int("{arch}.leading_dense_block_count", 0)
    return {
        "num_dense_layers": num_dense,
        "use_expert_bias": f"blk.{num_dense}.exp_probs_b.bias" in file.tensors,
    }


def layers_config(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    """Return the sliding window and layer types; empty for families without local layers.

    config: the fields of all families. Without `layer_types` in the result, the defaults of the
    model's class apply. Raises UnsupportedModel, BadModelFile.
    """
    arch, num_layers = file.arch, config["num_hidden_layers"]
    if arch not in _LOCAL_ARCHS or (arch == "olmo2" and not is_olmo3(file)):
        return {}
    default_window = None if arch in _ALWAYS_LOCAL_ARCHS else _DEFAULT_WINDOWS.get(arch, 0)
    window = file.non_negative_int("{arch}.attention.sliding_window", default_window)
    if not window:
        return {"sliding_window": None, "layer_types": ["full_attention"] * num_layers}
    fields: dict[str, Any] = {"sliding_window": window}
    if (local_flags := _local_layer_flags(file, num_layers)) is not None:
        kinds = ("full_attention", "sliding_attention")
        fields["layer_types"] = [kinds[is_local] for is_local in local_flags]
    return fields | _local_rope_fields(file, config)


def is_olmo3(file: GgufFile) -> bool:
    """Whether a file with the architecture olmo2 is an OLMo 3, which has local layers."""
    return file.non_negative_int("olmo2.attention.sliding_window", 0) > 0


def _local_layer_flags(file: GgufFile, num_layers: int) -> list[bool] | None:
    """Return for each layer whether it is local; None if the file does not state it.

    The file states flags, or a period: every period-th layer is global.
    """
    key = "{arch}.attention.sliding_window_pattern"
    if not file.has(key):
        return None
    pattern = file.value(key)
    if type(pattern) is int and pattern > 0:
        return [(i + 1) % pattern > 0 for i in range(num_layers)]
    if (
        not isinstance(pattern, list)
        or len(pattern) != num_layers
        or any(flag not in (0, 1) for flag in pattern)
    ):
        raise file.invalid_error(key, f"true or false for each of {num_layers} layers")
    return [bool(flag) for flag in pattern]


def _local_rope_fields(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    """Return the RoPE fields of local layers that differ from those of global layers."""
    key, arch = "{arch}.rope.freq_base_swa", file.arch
    if arch == "gemma4":
        return {}  # part of `gemma_config`
    if arch in ("gemma3", "gemma3n"):
        base = file.rounded_number(key, 10_000.0)
        factor = attention_factor(file)
        if factor == 1:
            return {"rope_local_base_freq": base}
        context_length = config["max_position_embeddings"]
        unscaled = unscaled_longrope(config["head_dim"], factor, context_length)
        return {
            "rope_parameters": {
                "full_attention": config["rope_scaling"] | {"rope_theta": config["rope_theta"]},
                "sliding_attention": unscaled | {"rope_theta": base},
            }
        }
    global_base = file.number("{arch}.rope.freq_base", 10_000.0)
    if file.number(key, global_base) != global_base:
        feature = "has another RoPE base for its local layers (rope.freq_base_swa)"
        raise file.unsupported_error(feature)
    return {}


def gemma_config(file: GgufFile) -> dict[str, Any]:
    """Return the fields of a Gemma; empty for others. Raises UnsupportedModel, BadModelFile."""
    match file.arch:
        case "gemma2" | "gemma3":
            return _gemma2_config(file)
        case "gemma3n":
            return _gemma3n_config(file)
        case "gemma4":
            return _gemma4_config(file)
    return {}


def _gemma2_config(file: GgufFile) -> dict[str, Any]:
    """Return the fields of a Gemma 2 or 3. Its size decides the attention scale."""
    hidden_size = file.positive_int("{arch}.embedding_length")
    scalar = hidden_size // file.uniform_int("{arch}.attention.head_count")
    if file.layer_count() != _LARGEST_GEMMA_LAYERS[file.arch]:
        scalar = file.positive_int("{arch}.attention.key_length", max(1, scalar))
    fields = {**_GELU_FIELDS, "query_pre_attn_scalar": scalar}
    for field, default in (("attn_logit_softcapping", 50.0), ("final_logit_softcapping", 30.0)):
        default = default if file.arch == "gemma2" else 0.0
        fields[field] = file.rounded_number("{arch}." + field, default) or None
    return fields


def _gemma3n_config(file: GgufFile) -> dict[str, Any]:
    laurel_left = file.tensors.get("blk.0.laurel_l.weight")
    if laurel_left is None or _PER_LAYER_TABLE not in file.tensors:
        raise BadModelFile(
            f"{file.path} lacks blk.0.laurel_l.weight or {_PER_LAYER_TABLE}, which every Gemma 3n "
            "has; fetch it again"
        )
    num_layers, widths_key = file.layer_count(), "{arch}.feed_forward_length"
    is_list = isinstance(file.value(widths_key), list)
    widths = file.integers(widths_key) if is_list else [file.positive_int(widths_key)]
    return {
        **_GELU_FIELDS,
        "intermediate_size": widths[0] if len(set(widths)) == 1 else widths,
        "final_logit_softcapping": file.rounded_number(_SOFTCAP_KEY, _DEFAULT_SOFTCAP),
        "num_kv_shared_layers": file.non_negative_int(
            "{arch}.attention.shared_kv_layers", max(0, num_layers - _DEFAULT_LAYERS_WITH_KV)
        ),
        "altup_num_inputs": file.positive_int("{arch}.altup.num_inputs", 4),
        "altup_active_idx": file.non_negative_int("{arch}.altup.active_idx", 0),
        "laurel_rank": laurel_left.shape[0],
        "activation_sparsity_pattern": _sparsity_per_layer(file, num_layers),
        "hidden_size_per_layer_input": file.positive_int("{arch}.embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": file.tensors[_PER_LAYER_TABLE].shape[0],
    }


def _sparsity_per_layer(file: GgufFile, num_layers: int) -> list[float]:
    """Return each layer's share of zeroed gate values.

    The file states thresholds in standard deviations, minus infinity for layers that are not
    sparse. Without them the first ten layers are sparse, as in llama.cpp.
    """
    key = "{arch}.activation_sparsity_scale"
    if file.has(key):
        return [_normal_share_below(threshold) for threshold in file.numbers(key)]
    return [_DEFAULT_SPARSITY if i < _DEFAULT_SPARSE_LAYERS else 0.0 for i in range(num_layers)]


def _normal_share_below(threshold: float) -> float:
    """Return the share of a standard normal distribution below a threshold: 0.95 for 1.64485."""
    share = NormalDist().cdf(threshold)
    for digits in range(1, 9):
        short_share = round(share, digits)
        if 0 < short_share < 1 and abs(NormalDist().inv_cdf(short_share) - threshold) < 1e-6:
            return short_share
    return share


def _gemma4_config(file: GgufFile) -> dict[str, Any]:
    num_layers = file.layer_count()
    local_flags = _local_layer_flags(file, num_layers)
    if local_flags is None or all(local_flags):
        raise BadModelFile(
            f"{file.path} does not say which of its layers are local; fetch it again"
        )
    first_global = local_flags.index(False)
    first_local = local_flags.index(True) if any(local_flags) else first_global
    kv_heads = file.ints_per_layer("{arch}.attention.head_count_kv", num_layers)
    mlp_widths = file.ints_per_layer("{arch}.feed_forward_length", num_layers)
    shared_kv_layers = file.non_negative_int("{arch}.attention.shared_kv_layers", 0)
    global_head_dim = file.positive_int("{arch}.attention.key_length")
    return {
        **_GELU_FIELDS,
        "head_dim": file.positive_int("{arch}.attention.key_length_swa", global_head_dim),
        "global_head_dim": global_head_dim,
        "num_key_value_heads": kv_heads[first_local],
        "num_global_key_value_heads": kv_heads[first_global],
        "attention_k_eq_v": f"blk.{first_global}.attn_v.weight" not in file.tensors,
        "num_kv_shared_layers": shared_kv_layers,
        "intermediate_size": mlp_widths[0],
        "use_double_wide_mlp": bool(shared_kv_layers) and mlp_widths[-1] == 2 * mlp_widths[0],
        "hidden_size_per_layer_input": file.non_negative_int(
            "{arch}.embedding_length_per_layer_input", 0
        ),
        "vocab_size_per_layer_input": file.tensors["token_embd.weight"].shape[0],
        "final_logit_softcapping": file.rounded_number(_SOFTCAP_KEY, _DEFAULT_SOFTCAP) or None,
        "rope_parameters": _gemma4_rope(file, global_head_dim),
    }


def _gemma4_rope(file: GgufFile, global_head_dim: int) -> dict[str, Any]:
    """Return RoPE settings by layer type, from a table of frequency divisors of global layers.

    Pairs with a divisor of 1e20 or more do not rotate; the others must have 1.
    """
    rotated_pairs, factor = global_head_dim // 2, linear_factor(file)
    if "rope_freqs.weight" in file.tensors:
        divisors = file.tensors["rope_freqs.weight"].unpack().reshape(-1).tolist()
        rotated_pairs = divisors.count(1.0)
        is_scaled = any(1.0 < divisor < 1e20 for divisor in divisors)
        if is_scaled or not rotated_pairs or divisors != sorted(divisors):
            raise file.unsupported_error("is a Gemma 4 with scaled RoPE (rope_freqs.weight)")
    return {
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 2 * rotated_pairs / global_head_dim,
            "rope_theta": file.rounded_number("{arch}.rope.freq_base", 1e4),
            **({} if factor == 1 else {"factor": factor}),
        },
        "sliding_attention": {
            "rope_type": "default",
            "rope_theta": file.rounded_number("{arch}.rope.freq_base_swa", 1e4),
        },
    }

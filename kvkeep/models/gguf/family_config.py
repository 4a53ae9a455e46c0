"""Config fields that only some families have: experts, local layers, and Gemma's own."""

from statistics import NormalDist
from typing import Any

from kvkeep.errors import BadModelFile
from kvkeep.models.gguf.file import GgufFile
from kvkeep.models.gguf.rope import attention_factor, linear_factor, unscaled_longrope

# Families with experts, by the config field for their number.
_NUM_EXPERTS_FAMILIES = ("qwen2moe", "qwen3moe", "qwen3vlmoe", "olmoe", "gemma4")
_NUM_LOCAL_EXPERTS_FAMILIES = ("llama", "granitemoe", "gpt-oss")
_OPTIONAL_EXPERTS_FAMILIES = ("llama", "gemma4")
_NORM_TOPK_FAMILIES = ("qwen3moe", "qwen3vlmoe")  # renormalise expert weights by default
_SOME_DENSE_FAMILIES = ("qwen2moe", "qwen3moe", "qwen3vlmoe")
# Supported values of a router's settings, the default first.
_ROUTER_VALUES: dict[str, tuple[float, ...]] = {
    "expert_gating_func": (1,),  # LLAMA_EXPERT_GATING_FUNC_TYPE_SOFTMAX
    "expert_weights_scale": (0.0, 1.0),
    "expert_group_count": (0, 1),
    "expert_shared_count": (0, 1),
    "expert_shared_feed_forward_length": (0,),
}

_WITH_LOCAL = ("gemma2", "gemma3", "cohere2", "exaone4", "olmo2", "gpt-oss", "gemma3n", "gemma4")
_DEFAULT_WINDOWS = {"gemma2": 4096, "gemma3n": 512}
_ALWAYS_LOCAL_FAMILIES = ("cohere2", "gpt-oss", "gemma4")  # every model of these has local layers

# The largest Gemma 2 and 3 have another attention scale than the others.
_LARGEST_GEMMA_LAYERS = {"gemma2": 46, "gemma3": 62}
# Gemma 3n's defaults, as in llama.cpp.
_LAYERS_WITH_CELLS, _SPARSE_LAYERS, _SPARSITY = 20, 10, 0.95
_SOFTCAP_KEY, _DEFAULT_SOFTCAP = "{arch}.final_logit_softcapping", 30.0  # as in llama.cpp
_LAYER_EMBEDDING = "per_layer_token_embd.weight"
_GELU_FIELD = {"hidden_activation": "gelu_pytorch_tanh"}


def experts_config(file: GgufFile) -> dict[str, Any]:
    """Return the config fields of experts; empty without experts.

    Raises UnsupportedModel, and BadModelFile for missing fields.
    """
    family, num_experts = file.architecture, file.non_negative("{arch}.expert_count", 0)
    if family not in _NUM_EXPERTS_FAMILIES + _NUM_LOCAL_EXPERTS_FAMILIES:
        if num_experts:
            raise file.unsupported(f"is a mixture of experts with the architecture name {family}")
        return {}
    if not num_experts and family in _OPTIONAL_EXPERTS_FAMILIES:
        return {}
    for key, supported in _ROUTER_VALUES.items():
        value = file.number("{arch}." + key, supported[0])
        has_shared_expert = family == "qwen2moe" and key == "expert_shared_feed_forward_length"
        if value not in supported and not has_shared_expert:
            raise file.unsupported(f"is a mixture of experts with {key} {value!r}")
    count_field = "num_experts" if family in _NUM_EXPERTS_FAMILIES else "num_local_experts"
    per_token_field = "top_k_experts" if family == "gemma4" else "num_experts_per_tok"
    config: dict[str, Any] = {
        count_field: file.count("{arch}.expert_count"),
        per_token_field: file.uniform_count("{arch}.expert_used_count"),
    }
    if family == "gemma4" or family in _SOME_DENSE_FAMILIES:
        config["moe_intermediate_size"] = file.uniform_count("{arch}.expert_feed_forward_length")
    if family == "gemma4":
        config["enable_moe_block"] = True
    elif family in _NUM_EXPERTS_FAMILIES:
        norm_by_default = family in _NORM_TOPK_FAMILIES
        config["norm_topk_prob"] = file.flag("{arch}.expert_weights_norm", norm_by_default)
    if family in _SOME_DENSE_FAMILIES:
        layers, tensors = range(file.layer_count()), file.tensors
        config["mlp_only_layers"] = [i for i in layers if f"blk.{i}.ffn_gate.weight" in tensors]
    if family == "qwen2moe":
        width = file.count("{arch}.expert_shared_feed_forward_length")
        config["shared_expert_intermediate_size"] = width
        config["qkv_bias"] = "blk.0.attn_q.bias" in file.tensors
    return config


def layers_config(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    """Return the sliding window and layer types; empty for families without local layers.

    config: the fields of all families. Without `layer_types` in the result, the defaults of the
    model's class apply.

    Raises UnsupportedModel, BadModelFile.
    """
    family, layers = file.architecture, config["num_hidden_layers"]
    if family not in _WITH_LOCAL or (family == "olmo2" and not is_olmo3(file)):
        return {}
    default_window = None if family in _ALWAYS_LOCAL_FAMILIES else _DEFAULT_WINDOWS.get(family, 0)
    window = file.non_negative("{arch}.attention.sliding_window", default_window)
    if not window:
        return {"sliding_window": None, "layer_types": ["full_attention"] * layers}
    fields: dict[str, Any] = {"sliding_window": window}
    if (local_flags := _local_layer_flags(file, layers)) is not None:
        types = ("full_attention", "sliding_attention")
        fields["layer_types"] = [types[local] for local in local_flags]
    return fields | _local_rope(file, config)


def is_olmo3(file: GgufFile) -> bool:
    """Whether a file of the family olmo2 is an OLMo 3, which has local layers."""
    return file.non_negative("olmo2.attention.sliding_window", 0) > 0


def _local_layer_flags(file: GgufFile, layers: int) -> list[bool] | None:
    """Return for each layer whether it is local; None if the file does not state it.

    The file states flags, or a period: every period-th layer is global.
    """
    key = "{arch}.attention.sliding_window_pattern"
    if not file.has(key):
        return None
    pattern = file.required(key)
    if type(pattern) is int and pattern > 0:
        return [(layer + 1) % pattern > 0 for layer in range(layers)]
    if (
        not isinstance(pattern, list)
        or len(pattern) != layers
        or any(flag not in (0, 1) for flag in pattern)
    ):
        raise file.invalid(key, f"true or false for each of {layers} layers")
    return [bool(flag) for flag in pattern]


def _local_rope(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    """Return the RoPE fields of local layers that differ from those of global layers."""
    key, family = "{arch}.rope.freq_base_swa", file.architecture
    if family == "gemma4":
        return {}  # part of `gemma_config`
    if family in ("gemma3", "gemma3n"):
        base = file.decimal(key, 10_000.0)
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
        raise file.unsupported("has another RoPE base for its local layers (rope.freq_base_swa)")
    return {}


def gemma_config(file: GgufFile) -> dict[str, Any]:
    """Return the config fields of a Gemma; empty for other families.

    Raises UnsupportedModel, BadModelFile.
    """
    configs = {
        "gemma2": _gemma2_config,
        "gemma3": _gemma2_config,
        "gemma3n": _gemma3n_config,
        "gemma4": _gemma4_config,
    }
    return configs[file.architecture](file) if file.architecture in configs else {}


def _gemma2_config(file: GgufFile) -> dict[str, Any]:
    """Return the fields of a Gemma 2 or 3. Its size decides the attention scale."""
    family = file.architecture
    hidden_size = file.count("{arch}.embedding_length")
    query_scalar = hidden_size // file.uniform_count("{arch}.attention.head_count")
    if file.layer_count() != _LARGEST_GEMMA_LAYERS[family]:
        query_scalar = file.count("{arch}.attention.key_length", max(1, query_scalar))
    defaults = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    if family == "gemma3":
        defaults = dict.fromkeys(defaults, 0.0)
    softcaps = {key: file.decimal("{arch}." + key, cap) or None for key, cap in defaults.items()}
    return {**_GELU_FIELD, "query_pre_attn_scalar": query_scalar, **softcaps}


def _gemma3n_config(file: GgufFile) -> dict[str, Any]:
    laurel = file.tensors.get("blk.0.laurel_l.weight")
    if laurel is None or _LAYER_EMBEDDING not in file.tensors:
        raise BadModelFile(
            f"{file.path} lacks blk.0.laurel_l.weight or {_LAYER_EMBEDDING}, which every Gemma 3n "
            "has; fetch it again"
        )
    layers, widths_key = file.layer_count(), "{arch}.feed_forward_length"
    is_list = isinstance(file.required(widths_key), list)
    widths = file.integers(widths_key) if is_list else [file.count(widths_key)]
    return {
        **_GELU_FIELD,
        "intermediate_size": widths[0] if len(set(widths)) == 1 else widths,
        "final_logit_softcapping": file.decimal(_SOFTCAP_KEY, _DEFAULT_SOFTCAP),
        "num_kv_shared_layers": file.non_negative(
            "{arch}.attention.shared_kv_layers", max(0, layers - _LAYERS_WITH_CELLS)
        ),
        "altup_num_inputs": file.count("{arch}.altup.num_inputs", 4),
        "altup_active_idx": file.non_negative("{arch}.altup.active_idx", 0),
        "laurel_rank": laurel.shape[0],
        "activation_sparsity_pattern": _sparsity_per_layer(file, layers),
        "hidden_size_per_layer_input": file.count("{arch}.embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": file.tensors[_LAYER_EMBEDDING].shape[0],
    }


def _sparsity_per_layer(file: GgufFile, layers: int) -> list[float]:
    """Return each layer's share of zeroed gate values.

    The file states thresholds in standard deviations, minus infinity for layers that are not
    sparse. Without them the first ten layers are sparse, as in llama.cpp.
    """
    key = "{arch}.activation_sparsity_scale"
    if file.has(key):
        return [_share_below(threshold) for threshold in file.numbers(key)]
    return [_SPARSITY if layer < _SPARSE_LAYERS else 0.0 for layer in range(layers)]


def _share_below(threshold: float) -> float:
    """Return the share of a standard normal distribution, as a short decimal."""
    share = NormalDist().cdf(threshold)
    for digits in range(1, 9):
        short_share = round(share, digits)
        if 0 < short_share < 1 and abs(NormalDist().inv_cdf(short_share) - threshold) < 1e-6:
            return short_share
    return share


def _gemma4_config(file: GgufFile) -> dict[str, Any]:
    layers = file.layer_count()
    local_flags = _local_layer_flags(file, layers)
    if local_flags is None or all(local_flags):
        raise BadModelFile(
            f"{file.path} does not say which of its layers are local; fetch it again"
        )
    global_layer = local_flags.index(False)
    local_layer = local_flags.index(True) if any(local_flags) else global_layer
    kv_heads = file.counts_per_layer("{arch}.attention.head_count_kv", layers)
    widths = file.counts_per_layer("{arch}.feed_forward_length", layers)
    shared_kv_layers = file.non_negative("{arch}.attention.shared_kv_layers", 0)
    head_dim = file.count("{arch}.attention.key_length")
    return {
        **_GELU_FIELD,
        "head_dim": file.count("{arch}.attention.key_length_swa", head_dim),
        "global_head_dim": head_dim,
        "num_key_value_heads": kv_heads[local_layer],
        "num_global_key_value_heads": kv_heads[global_layer],
        "attention_k_eq_v": f"blk.{global_layer}.attn_v.weight" not in file.tensors,
        "num_kv_shared_layers": shared_kv_layers,
        "intermediate_size": widths[0],
        "use_double_wide_mlp": bool(shared_kv_layers) and widths[-1] == 2 * widths[0],
        "hidden_size_per_layer_input": file.non_negative(
            "{arch}.embedding_length_per_layer_input", 0
        ),
        "vocab_size_per_layer_input": file.tensors["token_embd.weight"].shape[0],
        "final_logit_softcapping": file.decimal(_SOFTCAP_KEY, _DEFAULT_SOFTCAP) or None,
        "rope_parameters": _gemma4_rope(file, head_dim),
    }


def _gemma4_rope(file: GgufFile, head_dim: int) -> dict[str, Any]:
    """Return RoPE settings by layer type. Pairs with a divisor of 1e20 or more do not rotate."""
    rotated_pairs, factor = head_dim // 2, linear_factor(file)
    if "rope_freqs.weight" in file.tensors:
        divisors = file.tensors["rope_freqs.weight"].unpack().reshape(-1).tolist()
        rotated_pairs = divisors.count(1.0)
        is_scaled = any(1.0 < divisor < 1e20 for divisor in divisors)
        if is_scaled or not rotated_pairs or divisors != sorted(divisors):
            raise file.unsupported("is a Gemma 4 with scaled RoPE (rope_freqs.weight)")
    return {
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 2 * rotated_pairs / head_dim,
            "rope_theta": file.decimal("{arch}.rope.freq_base", 1e4),
            **({} if factor == 1 else {"factor": factor}),
        },
        "sliding_attention": {
            "rope_type": "default",
            "rope_theta": file.decimal("{arch}.rope.freq_base_swa", 1e4),
        },
    }

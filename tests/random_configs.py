"""Random small configs of every family, as arguments of transformers' config classes."""

from dataclasses import fields
from functools import cache
from math import gcd
from random import Random
from typing import Any

import transformers

LOCAL, GLOBAL = "sliding_attention", "full_attention"
SEPARATE_LOCAL_ROPE = ("Olmo3", "Gemma3Text", "Gemma3nText", "Gemma4Text")
MAMBAS = ("GraniteMoeHybrid", "Bamba")
DELTA_NETS = ("Qwen3_5Text", "Qwen3_5MoeText", "Qwen3Next")
PARTIAL_ROTARY = ("Phi3", "Bamba", "Glm", "Glm4", *DELTA_NETS)
FIXED_HEADS = ("Cohere2", "Olmoe", "Qwen2_5_VLText")  # as wide as the hidden size says
MULTIPLIERS = (
    "embedding_multiplier",
    "residual_multiplier",
    "logits_scaling",
    "attention_multiplier",
    "logit_scale",
)
FLAGS = ("attention_bias", "mlp_bias", "qkv_bias", "tie_word_embeddings", "norm_topk_prob")
FLAGS += ("use_double_wide_mlp", "attention_k_eq_v")


@cache
def text_class(architecture: str) -> type[transformers.PreTrainedConfig]:
    """Return the config class of an architecture's language model."""
    return type(getattr(transformers, architecture).config_class().get_text_config())


def family_name(architecture: str) -> str:
    """Return the name of that class without "Config"."""
    return text_class(architecture).__name__.removesuffix("Config")


@cache
def class_defaults(architecture: str) -> dict[str, Any]:
    """Return the default of each field of that class."""
    return {field.name: field.default for field in fields(text_class(architecture))}


def random_config(architecture: str, random: Random) -> dict[str, Any]:
    """Draw the fields of a language model's config, without about 30% of the optional ones."""
    family, class_fields = family_name(architecture), class_defaults(architecture)
    layers, heads = random.randint(2, 5), random.choice([1, 2, 3, 4, 6, 8])
    head_dim = random.choice([4, 8, 16] if family.startswith("Glm") else [4, 6, 8, 10, 12, 16, 24])
    if family == "Bamba":  # of which half is rotated
        head_dim = random.choice([4, 8, 16])
    if family in DELTA_NETS:  # of which a quarter is rotated
        head_dim = random.choice([8, 16, 24])
    values: dict[str, Any] = {
        "vocab_size": random.randint(64, 128),
        "hidden_size": heads * head_dim,
        "intermediate_size": random.randint(8, 96),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": random.choice([n for n in range(1, heads + 1) if heads % n == 0]),
        "max_position_embeddings": random.choice([64, 100, 512, 4096]),
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if class_fields.get("head_dim") is not None or (
        family not in FIXED_HEADS and random.random() < 0.4
    ):
        values["head_dim"] = head_dim
        if random.random() < 0.5 and family not in FIXED_HEADS and family != "Phi3":
            values["hidden_size"] = heads * random.randint(2, 24)
    for name in ("rms_norm_eps", "layer_norm_eps", "norm_eps"):
        if name in class_fields and random.random() < 0.7:
            values[name] = random.choice([1e-6, 1e-5, 1e-3, 0.1])
    for name in FLAGS:
        if name in class_fields and random.random() < 0.7:
            values[name] = random.random() < 0.5
    for name in MULTIPLIERS:
        if name in class_fields and random.random() < 0.7:
            values[name] = random.uniform(0.1, 4)
    values |= _layer_kinds(family, layers, random) | _experts(family, class_fields, layers, random)
    values |= _gemma(family, values, random) | _states(family, layers, values, random)
    width = values.get("head_dim") or values["hidden_size"] // heads
    values |= _rope(family, values, width, random)
    return values | _unsupported_field(class_fields, values, random)


def _unsupported_field(
    class_fields: dict[str, Any], values: dict[str, Any], random: Random
) -> dict[str, Any]:
    """Return, in 4% of the draws, a field with a value that kvkeep does not support."""
    total = {
        "use_qk_norm": True,
        "clip_qkv": 8.0,
        "swiglu_limit": 5.0,
        "hidden_act": "relu",
        "hidden_activation": "relu",
    }
    result = {name: value for name, value in total.items() if name in class_fields}
    if values.get("sliding_window") and "sliding_window_pattern" not in values:
        result["sliding_window"] = 0
    if not result or random.random() < 0.96:
        return {}
    name = random.choice(sorted(result))
    return {name: result[name]}


def _layer_kinds(family: str, layers: int, random: Random) -> dict[str, Any]:
    """Draw which layers are local, their window, and which layers have no RoPE."""
    window = random.choice([1, 2, 3, 5, 9, 16, 30])
    if family in ("Mistral", "Ministral3", "Mixtral", "Phi3"):
        return {"sliding_window": random.choice([None, None, window + 8])}
    if family in ("Qwen2", "Qwen3", "Qwen2_5_VLText", "Qwen2Moe", "Qwen3Moe"):
        return {
            "use_sliding_window": random.random() < 0.4,
            "sliding_window": window + 8,
            "max_window_layers": random.randint(0, layers),
        }
    result: dict[str, Any] = {}
    kinds = [random.choice([LOCAL, LOCAL, GLOBAL]) for _ in range(layers)]
    kinds[-1 if family == "Gemma4Text" else random.randrange(layers)] = GLOBAL
    if family == "SmolLM3":
        if random.random() < 0.5:
            result["no_rope_layers"] = [random.randint(0, 1) for _ in range(layers)]
        else:
            result["no_rope_layer_interval"] = random.randint(2, layers)
        if random.random() < 0.5:
            return result
        result["use_sliding_window"] = random.random() < 0.5
    elif family not in ("Exaone4", "Cohere2", "GptOss", "Gemma2", *SEPARATE_LOCAL_ROPE):
        return {}
    result["sliding_window"] = window
    if family == "Exaone4" and random.random() < 0.2:
        return {"sliding_window": None, "layer_types": [GLOBAL] * layers}
    if family in ("Exaone4", "Cohere2", "Gemma3Text") and random.random() < 0.3:
        return result | {"sliding_window_pattern": random.randint(1, layers)}
    if family in ("GptOss", "Gemma2", "Gemma4Text") and random.random() < 0.3:
        return result
    return result | {"layer_types": kinds}


def _experts(
    family: str, class_fields: dict[str, Any], layers: int, random: Random
) -> dict[str, Any]:
    if family == "NemotronH":
        return {}
    if family == "GraniteMoeHybrid":
        return {
            "num_local_experts": random.choice([0, 0, random.randint(2, 6)]),
            "num_experts_per_tok": random.randint(1, 2),
            "shared_intermediate_size": random.randint(8, 96),
            "position_embedding_type": random.choice([None, "rope"]),
        }
    if "num_experts_per_tok" not in class_fields:
        return {}
    total = random.randint(1, 7)
    name = "num_local_experts" if "num_local_experts" in class_fields else "num_experts"
    result: dict[str, Any] = {name: total, "num_experts_per_tok": random.randint(1, total)}
    for width in ("moe_intermediate_size", "shared_expert_intermediate_size"):
        if width in class_fields:
            result[width] = random.randint(4, 40)
    if "decoder_sparse_step" in class_fields:
        result["decoder_sparse_step"] = random.choice([1, 1, 2])
        result["mlp_only_layers"] = random.choice([[], [0], [random.randrange(layers)]])
    return result


def _states(family: str, layers: int, values: dict[str, Any], random: Random) -> dict[str, Any]:
    """Draw which layers keep a state instead of cells, and the sizes of the states."""
    if family == "FalconH1":
        return _falcon_h1(values, random)
    if family == "NemotronH":
        return _nemotron_h(layers, random)
    if family not in ("Lfm2", "Lfm2Moe", *MAMBAS, *DELTA_NETS):
        return {}
    state_kind = "conv" if family.startswith("Lfm2") else "linear_attention"
    attending = {layer for layer in range(layers) if random.random() < 0.4}
    attending |= {random.randrange(layers)}
    result: dict[str, Any] = {
        "layer_types": [GLOBAL if layer in attending else state_kind for layer in range(layers)]
    }
    if family in MAMBAS:
        return _mamba(family, result["layer_types"], values, random)
    if family in DELTA_NETS:
        key_heads = random.randint(1, 3)
        return result | {
            "linear_num_key_heads": key_heads,
            "linear_num_value_heads": key_heads * random.randint(1, 3),
            "linear_key_head_dim": random.choice([3, 8, 12]),
            "linear_value_head_dim": random.choice([5, 8, 16]),
            "linear_conv_kernel_dim": random.randint(2, 5),
        }
    if random.random() < 0.3 and family == "Lfm2":
        result = {"full_attn_idxs": sorted(attending)}
    result["conv_L_cache"] = random.randint(2, 6)
    result["conv_bias"] = random.random() < 0.5
    if family == "Lfm2Moe":
        result["num_dense_layers"] = random.randint(0, layers)
        result["use_expert_bias"] = random.random() < 0.5
        result["routed_scaling_factor"] = random.choice([1.0, 2.5])
    elif random.random() < 0.7:
        result["block_auto_adjust_ff_dim"] = random.random() < 0.5
        result["block_multiple_of"] = random.choice([1, 8, 32])
        result["block_ffn_dim_multiplier"] = random.choice([1.0, 1.3, 0.7])
    return result


def _mamba(family: str, kinds: list[str], values: dict[str, Any], random: Random) -> dict[str, Any]:
    groups = random.choice([n for n in (1, 2, 3) if 2 * values["hidden_size"] % n == 0])
    result: dict[str, Any] = {"layer_types": kinds}
    if family == "Bamba":
        attending = [layer for layer, kind in enumerate(kinds) if kind == GLOBAL]
        result = {"attn_layer_indices": attending}
    return result | {
        "mamba_n_heads": groups,
        "mamba_n_groups": random.choice([1, groups]),
        "mamba_d_state": random.choice([3, 8, 12]),
        "mamba_d_conv": random.randint(2, 5),
        "mamba_conv_bias": random.random() < 0.5,
        "mamba_proj_bias": random.random() < 0.5,
    }


def _falcon_h1(values: dict[str, Any], random: Random) -> dict[str, Any]:
    names = ("lm_head", "embedding", "key", "attention_in", "attention_out", "ssm_in", "ssm_out")
    result: dict[str, Any] = {
        f"{name}_multiplier": random.uniform(0.3, 3) for name in names if random.random() < 0.7
    }
    for name, count in (("mlp", 2), ("ssm", 5)):
        if random.random() < 0.7:
            result[f"{name}_multipliers"] = [random.uniform(0.3, 3) for _ in range(count)]
    heads, head_dim = random.randint(1, 4), random.choice([3, 8, 12])
    return result | {
        "mamba_d_ssm": heads * head_dim,
        "mamba_n_heads": heads,
        "mamba_d_head": head_dim,
        "mamba_n_groups": random.choice([1, heads]),
        "mamba_d_state": random.choice([3, 8, 12]),
        "mamba_d_conv": random.randint(2, 5),
        "mamba_conv_bias": random.random() < 0.5,
        "mamba_rms_norm": random.random() < 0.5,
        "mamba_norm_before_gate": random.random() < 0.5,
    }


def _nemotron_h(layers: int, random: Random) -> dict[str, Any]:
    groups, experts = random.randint(1, 3), random.randint(2, 6)
    kinds = [random.choice(["linear_attention", "mlp", "moe", GLOBAL]) for _ in range(layers)]
    kinds[random.randrange(layers)] = GLOBAL
    return {
        "num_hidden_layers": None,
        "layers_block_type": kinds,
        "tie_word_embeddings": False,  # which transformers ignores
        "mlp_bias": "moe" not in kinds and random.random() < 0.5,
        "use_bias": random.random() < 0.5,
        "use_conv_bias": random.random() < 0.5,
        "mamba_num_heads": groups * random.randint(1, 2),
        "mamba_head_dim": random.choice([3, 8, 12]),
        "n_groups": groups,
        "ssm_state_size": random.choice([3, 8, 12]),
        "conv_kernel": random.randint(2, 5),
        "n_routed_experts": experts,
        "num_experts_per_tok": random.randint(1, 2),
        "moe_intermediate_size": random.randint(4, 40),
        "moe_shared_expert_intermediate_size": random.randint(4, 40),
        "moe_latent_size": random.choice([None, 12]),
        "routed_scaling_factor": random.choice([1.0, 2.5]),
    }


def _gemma(family: str, values: dict[str, Any], random: Random) -> dict[str, Any]:
    """Draw the fields that only Gemma has."""
    if not family.startswith("Gemma"):
        return {}
    layers, result = values["num_hidden_layers"], dict[str, Any]()
    if random.random() < 0.6:
        default = 8.0 if family == "Gemma3nText" else None  # where it may not be null
        result["final_logit_softcapping"] = random.choice([default, 2.0, 30.0])
    if family in ("Gemma2", "Gemma3Text"):
        result["query_pre_attn_scalar"] = random.choice([1, 4, 16, 24, 256])
    if family == "Gemma2" and random.random() < 0.7:
        result["attn_logit_softcapping"] = random.choice([None, 1.5, 50.0])
    if family not in ("Gemma3nText", "Gemma4Text"):
        return result
    kinds = values.get("layer_types") or []
    shareable = [
        n for n in range(1, layers) if LOCAL in kinds and set(kinds[-n:]) <= set(kinds[:-n])
    ]
    shared = random.choice([0, *shareable])
    if family == "Gemma4Text" and set(kinds[: layers - shared]) != set(kinds):
        shared = 0
    result |= {"num_kv_shared_layers": shared, "vocab_size_per_layer_input": values["vocab_size"]}
    if family == "Gemma3nText":
        inputs = random.randint(1, 4)
        widths = [random.randint(8, 96) for _ in range(layers)]
        return result | {
            "vocab_size_per_layer_input": random.randint(40, values["vocab_size"]),
            "hidden_size_per_layer_input": random.randint(2, 12),
            "altup_num_inputs": inputs,
            "altup_active_idx": random.randrange(inputs),
            "laurel_rank": random.randint(1, 8),
            "intermediate_size": random.choice([widths, widths[0]]),
            "activation_sparsity_pattern": [random.choice([0.0, 0.5, 0.95]) for _ in range(layers)],
        }
    result["hidden_size_per_layer_input"] = random.choice([0, 4, 7] if shared == 0 else [4, 7])
    result["global_head_dim"] = random.choice([values["head_dim"], 8, 16])
    if values.get("attention_k_eq_v") and random.random() < 0.7:
        heads = values["num_attention_heads"]
        result["num_global_key_value_heads"] = gcd(heads, random.randint(1, heads))
    if random.random() < 0.3:
        total = random.randint(1, 7)
        result |= {"enable_moe_block": True, "num_experts": total}
        result |= {"top_k_experts": random.randint(1, total)}
        result["moe_intermediate_size"] = random.randint(4, 40)
    return result


def _rope(family: str, values: dict[str, Any], width: int, random: Random) -> dict[str, Any]:
    if family == "NemotronH" or (random.random() < 0.2 and family != "Qwen2_5_VLText"):
        return {}
    if family not in SEPARATE_LOCAL_ROPE:
        return _rope_settings(family, values, width, random)
    local_rope = _rope_settings(family, values, width, random)["rope_parameters"]
    if family == "Gemma4Text":
        width = values["global_head_dim"]
        share = random.choice([0.25, 0.5, 1.0])
        global_rope = {
            "rope_type": "proportional",
            "partial_rotary_factor": share,
            "rope_theta": 5e3,
        }
        if random.random() < 0.3:
            global_rope["factor"] = 2.0
    if family != "Gemma4Text" or random.random() < 0.5:
        global_rope = _rope_settings(family, values, width, random)["rope_parameters"]
    return {"rope_parameters": {GLOBAL: global_rope, LOCAL: local_rope}}


def _rope_settings(
    family: str, values: dict[str, Any], width: int, random: Random
) -> dict[str, Any]:
    """Draw the RoPE settings of one kind of layers, and for Phi-3 a config field beside them."""
    kinds = ["default", "linear", "llama3", "yarn", "longrope"]
    kind = random.choice(["default", "longrope"] if family == "Phi3" else kinds)
    if family == "Ministral3" and kind != "longrope":
        kind = "yarn"
    if family == "Mixtral" and "head_dim" not in values and kind in ("yarn", "longrope"):
        kind = "linear"  # these would multiply null
    if family == "Gemma4Text" and kind == "longrope":  # which transformers does not run there
        kind = "yarn"
    settings: dict[str, Any] = {"rope_type": kind, "rope_theta": random.choice([50.0, 1e4, 1e6])}
    pairs, config_fields = width // 2, dict[str, Any]()
    if family in PARTIAL_ROTARY and random.random() < 0.7:
        share = random.choice(
            [p for p in (0.25, 0.5, 0.75, 1.0) if int(width * p) % 2 == 0 < int(width * p)]
        )
        settings["partial_rotary_factor"] = share
        pairs = int(width * share) // 2
    elif family in ("Glm", "Glm4") or family == "Bamba":
        pairs = width // 4
    elif family in DELTA_NETS:
        pairs = int(width * 0.25) // 2
    original = random.choice([40, 64, values["max_position_embeddings"]])
    if kind == "linear":
        settings["factor"] = random.choice([1.0, 2.5, 8.0])
    if kind == "llama3":
        low = random.choice([1.0, 2.0])
        settings |= {"factor": 4.0, "low_freq_factor": low, "high_freq_factor": 4 * low}
    if kind == "yarn":
        settings |= _yarn(family, random)
    if kind == "longrope":
        settings["short_factor"] = [random.uniform(1, 3) for _ in range(pairs)]
        settings["long_factor"] = [random.uniform(3, 9) for _ in range(pairs)]
        settings |= random.choice([{}, {"factor": 4.0}, {"attention_factor": 1.3}])
    if kind == "longrope" and family == "Phi3":
        config_fields = {"original_max_position_embeddings": original}
    elif kind in ("llama3", "yarn", "longrope") and (
        random.random() < 0.8 or family in ("Gemma4Text", "Ministral3")
    ):
        settings["original_max_position_embeddings"] = original
    if family == "Ministral3":
        settings["llama_4_scaling_beta"] = 0.1
    if family == "Qwen2_5_VLText":
        settings["mrope_section"] = [pairs, 0, 0]
    return {"rope_parameters": settings, **config_fields}


def _yarn(family: str, random: Random) -> dict[str, Any]:
    """Draw yarn settings. With two tables, transformers does not find `truncate`."""
    result: dict[str, Any] = {"factor": random.choice([1.0, 2.0, 8.0])}
    result |= random.choice([{}, {"beta_fast": 16.0, "beta_slow": 2.0}])
    factors = [
        {},
        {"attention_factor": 1.4},
        {"mscale": 0.7},
        {"mscale": 1.0, "mscale_all_dim": 0.5},
    ]
    result |= random.choice(factors)
    if family not in SEPARATE_LOCAL_ROPE and random.random() < 0.3:
        result["truncate"] = False
    return result

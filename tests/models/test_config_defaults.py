"""A field that config.json leaves out has the default of transformers' config class."""

import json
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import transformers
from models.family_configs import FALCON_H1_MULTIPLIERS

from kvkeep.errors import BadModelFile, UnsupportedModel
from kvkeep.models.spec.config import spec_from_config
from kvkeep.models.spec.families import FAMILIES
from kvkeep.models.spec.model_spec import ModelSpec

CONFIG = Path("config.json")
LOCAL, WHOLE = "sliding_attention", "full_attention"
# No value here is the default of a class, and all defaults can stand beside these sizes.
UNUSUAL: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 512,
    "intermediate_size": 160,
    "num_hidden_layers": 7,
    "num_attention_heads": 64,
    "num_key_value_heads": 16,
    "max_position_embeddings": 512,
    "original_max_position_embeddings": 256,
    "bos_token_id": 3,
    "eos_token_id": 4,
    "pad_token_id": 0,
    "rms_norm_eps": 3e-4,
    "layer_norm_eps": 3e-4,
    "head_dim": 16,
    "sliding_window": 20,
    "use_sliding_window": True,
    "max_window_layers": 2,
    "attention_bias": True,
    "mlp_bias": True,
    "qkv_bias": False,
    "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 777.0},
    "num_experts": 7,
    "num_local_experts": 7,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 56,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
    "decoder_sparse_step": 2,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.3,
    "logits_scaling": 4.0,
    "attention_multiplier": 0.2,
    "logit_scale": 0.3,
    "query_pre_attn_scalar": 24,
    "final_logit_softcapping": 7.0,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 320,
    "altup_num_inputs": 3,
    "altup_active_idx": 1,
    "laurel_rank": 5,
    "activation_sparsity_pattern": [0.5] * 7,
    "no_rope_layer_interval": 2,
    "use_double_wide_mlp": True,
    "layer_types": [LOCAL, WHOLE, LOCAL, LOCAL, WHOLE, LOCAL, WHOLE],
}
TWO_ROPES = {
    "rope_parameters": {
        WHOLE: {"rope_type": "linear", "factor": 3.0, "rope_theta": 777.0},
        LOCAL: {"rope_type": "default", "rope_theta": 99.0},
    }
}
PART = {"rope_type": "default", "rope_theta": 777.0, "partial_rotary_factor": 0.25}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.5] * 3, "long_factor": [3.0] * 3}
DELTA_NET: dict[str, Any] = {
    "layer_types": ["linear_attention", WHOLE, *["linear_attention"] * 3, WHOLE, WHOLE],
    "rope_parameters": PART | {"partial_rotary_factor": 0.5},
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 64,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "linear_conv_kernel_dim": 3,
}
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 24,
    "mamba_d_head": 96,
    "mamba_d_conv": 3,
    "mamba_expand": 3,
    "mamba_conv_bias": False,
    "mamba_proj_bias": True,
}
OF_A_FAMILY: dict[str, dict[str, Any]] = {
    "Exaone4": {"sliding_window_pattern": 3},
    "Gemma2": {"attn_logit_softcapping": 5.0},
    "Gemma3Text": TWO_ROPES,
    "Gemma3nText": TWO_ROPES | {"intermediate_size": [160] * 7},
    "Gemma4Text": TWO_ROPES | {"global_head_dim": 24},
    "Glm": {"rope_parameters": PART},
    "Glm4": {"rope_parameters": PART},
    "GraniteMoeHybrid": MAMBA
    | {
        "layer_types": ["linear_attention", WHOLE, *["linear_attention"] * 3, WHOLE, WHOLE],
        "num_local_experts": 5,
        "shared_intermediate_size": 160,
        "position_embedding_type": "rope",
    },
    "Bamba": MAMBA | {"attn_layer_indices": [1, 3], "rope_parameters": PART},
    "FalconH1": MAMBA
    | {
        "mamba_d_ssm": 1536,
        "projectors_bias": True,
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": False,
        **FALCON_H1_MULTIPLIERS,
    },
    "NemotronH": {
        "num_hidden_layers": None,
        "layers_block_type": ["linear_attention", "mlp", "moe", WHOLE, "linear_attention"],
        "n_routed_experts": 7,
        "moe_shared_expert_intermediate_size": 56,
        "moe_latent_size": 24,
        "routed_scaling_factor": 1.5,
        "norm_topk_prob": False,
        "layer_norm_epsilon": 3e-4,
        "mlp_bias": False,
        "mamba_num_heads": 6,
        "mamba_head_dim": 24,
        "n_groups": 2,
        "ssm_state_size": 40,
        "conv_kernel": 3,
        "use_bias": True,
        "use_conv_bias": False,
    },
    "Lfm2Moe": {
        "layer_types": ["conv", "conv", WHOLE, "conv", WHOLE, "conv", "conv"],
        "norm_eps": 3e-4,
        "conv_L_cache": 5,
        "conv_bias": True,
        "num_dense_layers": 3,
        "use_expert_bias": False,
        "routed_scaling_factor": 1.5,
        "norm_topk_prob": False,
    },
    "Lfm2": {
        "layer_types": ["conv", "conv", WHOLE, "conv", WHOLE, "conv", "conv"],
        "norm_eps": 3e-4,
        "conv_L_cache": 5,
        "conv_bias": True,
        "intermediate_size": 1000,
        "block_multiple_of": 100,
        "block_ffn_dim_multiplier": 1.3,
    },
    "Qwen3_5MoeText": DELTA_NET,
    "Qwen3Next": DELTA_NET,
    "Qwen3_5Text": DELTA_NET,
    "Olmo3": TWO_ROPES,
    "Phi3": {
        "rope_parameters": {"rope_theta": 777.0, "partial_rotary_factor": 0.75} | LONGROPE,
    },
}
SIZES = {
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "shared_intermediate_size",
    "num_hidden_layers",
    "layers_block_type",
    "num_attention_heads",
    "max_position_embeddings",
    "num_experts",
    "num_local_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "moe_shared_expert_intermediate_size",
}
# A class has the token ids of the tokenizer that it was first written for.
TOKENS = ("bos_token_id", "eos_token_id")


def text_class(architecture: str) -> type[transformers.PreTrainedConfig]:
    return type(getattr(transformers, architecture).config_class().get_text_config())


def explicit_config(architecture: str) -> dict[str, Any]:
    """Return a config as transformers writes it, with every field of the class."""
    whole, text = getattr(transformers, architecture).config_class, text_class(architecture)
    class_fields = {field.name: field.default for field in fields(text)}
    values = {name: value for name, value in UNUSUAL.items() if name in class_fields}
    if "tie_word_embeddings" in values:
        values["tie_word_embeddings"] = not values["tie_word_embeddings"]
    values |= OF_A_FAMILY.get(text.__name__.removesuffix("Config"), {})
    if whole is text:
        config = whole(**values)
    else:
        kind = {"model_type": text.model_type}
        config = whole(text_config=values | kind, tie_word_embeddings=True)
    return as_json(config, architecture)


def as_json(config: transformers.PreTrainedConfig, architecture: str) -> dict[str, Any]:
    written: dict[str, Any] = json.loads(json.dumps(config.to_dict(), default=str))
    return written | {"architectures": [architecture]}


def with_rope_of_transformers_4(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config with RoPE as transformers 4 wrote it."""
    if "text_config" in config:
        return config | {"text_config": with_rope_of_transformers_4(config["text_config"])}
    if "rope_parameters" not in config:
        return config
    older = dict(config)
    rope = older.pop("rope_parameters")
    rope, near = rope.get(WHOLE, rope), rope.get(LOCAL)
    older["rope_theta"] = rope["rope_theta"]
    if config["model_type"] == "olmo3":  # transformers 5 reads another base for whole layers alone
        older["rope_theta"] = 5e5
    elif near is not None:
        older["rope_local_base_freq"] = near["rope_theta"]
    return older | {"rope_scaling": {k: v for k, v in rope.items() if k != "rope_theta"}}


def configs_without_a_field(config: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every config without one field or one RoPE setting, with the name of that field."""
    for name in config:
        if name not in ("architectures", "model_type", "text_config"):
            yield name, {key: value for key, value in config.items() if key != name}
            if name in ("rope_parameters", "rope_scaling"):
                yield name, config | {name: None}
    if isinstance(config.get("text_config"), dict):
        for name, text in configs_without_a_field(config["text_config"]):
            yield name, config | {"text_config": text}
    for settings in ("rope_parameters", "rope_scaling"):
        if isinstance(config.get(settings), dict):
            for name, rope in configs_without_a_field(config[settings]):
                yield name, config | {settings: rope}


def spec_of(config: dict[str, Any]) -> ModelSpec | str:
    """Return kvkeep's spec of a config, or the reason for its refusal."""
    try:
        return spec_from_config(json.loads(json.dumps(config)), {}, CONFIG)
    except (BadModelFile, UnsupportedModel) as error:
        return str(error)


def with_class_defaults(config: dict[str, Any], architecture: str) -> dict[str, Any] | None:
    """Return the config with the defaults of its class; None if transformers refuses it."""
    read = getattr(transformers, architecture).config_class.from_dict
    try:
        return as_json(read(json.loads(json.dumps(config))), architecture)
    except Exception:  # of many kinds
        return None


@pytest.mark.parametrize("style", [5, 4])
@pytest.mark.parametrize("architecture", FAMILIES)
def test_missing_field_takes_the_default_of_transformers(architecture: str, style: int) -> None:
    config = explicit_config(architecture)
    if style == 4 and "Gemma4" not in architecture:  # which transformers 4 did not have
        config = with_rope_of_transformers_4(config)
    assert isinstance(spec_of(config), ModelSpec)
    compared = set()
    for name, less in configs_without_a_field(config):
        complete = with_class_defaults(less, architecture)
        if complete is None or name in TOKENS:
            continue
        if name == "tie_word_embeddings" and "text_config" in config:
            continue  # whichever is said nowhere, weights without a head of their own are refused
        spec, expected = spec_of(less), spec_of(complete)
        if name in SIZES and isinstance(spec, str):
            assert "lacks the field" in spec or spec == expected
        else:
            assert spec == expected, name
            compared.add(name)
    assert len(compared) > 5


def test_multimodal_ministral_3_takes_the_defaults_of_its_text_config() -> None:
    sizes = {name: UNUSUAL[name] for name in SIZES & UNUSUAL.keys()}
    alone = spec_of(sizes | {"architectures": ["Ministral3ForCausalLM"]})
    text = sizes | {"model_type": "ministral3"}
    seeing = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": text}
    assert isinstance(alone, ModelSpec)
    assert spec_of(seeing) == replace(alone, architecture="Mistral3ForConditionalGeneration")
    assert (alone.rope.kind, alone.norm_eps) == ("yarn", 1e-5)


def test_rope_scaling_overrides_rope_parameters() -> None:
    """As users add it to a file of transformers 5, and as transformers reads it."""
    config = explicit_config("Qwen3ForCausalLM")
    config["rope_scaling"] = {"rope_type": "yarn", "factor": 4.0}
    spec = spec_of(config)
    assert isinstance(spec, ModelSpec)
    assert spec.rope.kind == "yarn"
    assert spec == spec_of(with_class_defaults(config, "Qwen3ForCausalLM") or {})

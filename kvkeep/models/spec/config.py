"""Reading a Hugging Face `config.json`, of transformers 4 or 5, into a `ModelSpec`."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvkeep.errors import BadModelFile
from kvkeep.models.spec.config_fields import LARGEST, positive_float, positive_int, read_json
from kvkeep.models.spec.config_gemma import (
    gemma3n_fields,
    gemma4_fields,
    merge_widths,
    split_head_sizes,
)
from kvkeep.models.spec.config_layers import expert_fields, layer_kind_fields, model_window
from kvkeep.models.spec.families import FAMILIES
from kvkeep.models.spec.family import Family
from kvkeep.models.spec.model_spec import ModelSpec
from kvkeep.models.spec.rope import rope_and_trained_length, split_rope_settings
from kvkeep.models.spec.unsupported import (
    ACTIVATIONS,
    GRANITE_HYBRID,
    refuse_unsupported_fields,
    require_dense_granite,
    unsupported_architecture,
)

_MISTRAL3 = "Mistral3ForConditionalGeneration"
# Fields that a Family and a ModelSpec have in common.
_FAMILY_FIELDS = (
    "qk_norm",
    "qk_norm_whole",
    "norms_before",
    "norms_after",
    "centred_norms",
    "parallel",
    "unit_norms",
    "sinks",
)
_WIDEST_HEAD = 1 << 16


def read_spec(folder: Path) -> ModelSpec:
    """Read the specification of the model in a folder.

    Raises BadModelFile if config.json is missing, empty, not JSON or lacks a field, and
    UnsupportedModel if kvkeep does not run the model.
    """
    path = folder / "config.json"
    if not path.exists():
        raise BadModelFile(
            f"{folder} has no config.json; give the folder of a model in Hugging Face layout "
            "(config.json, model.safetensors, tokenizer.json), or a .gguf file"
        )
    generation = folder / "generation_config.json"
    return spec_from_config(
        read_json(path), read_json(generation) if generation.exists() else {}, path
    )


def spec_from_config(
    config: Mapping[str, Any], generation: Mapping[str, Any], path: Path
) -> ModelSpec:
    """Build the specification from the contents of the two JSON files.

    path: of config.json, for messages.

    Raises BadModelFile and UnsupportedModel as `read_spec` does.
    """
    architecture = _architecture(config, path)
    family = _family(config, architecture)
    config = {**family.defaults, **(_text_config(config) if family.multimodal else config)}
    refuse_unsupported_fields(config, architecture)
    config = merge_widths(config, path) if family.gemma3n else config
    config, local_fields = split_head_sizes(config, path) if family.gemma4 else (config, {})
    heads = positive_int(config, "num_attention_heads", path)
    hidden_size = positive_int(config, "hidden_size", path)
    layers = positive_int(config, "num_hidden_layers", path)
    kv_heads = positive_int(config, "num_key_value_heads", path, default=heads)
    for count in (kv_heads, local_fields.get("local_kv_heads", kv_heads)):
        if heads % count:
            raise BadModelFile(
                f"{path}: num_attention_heads ({heads}) must be a multiple of num_key_value_heads "
                f"({count}); fetch the model again"
            )
    head_dim = positive_int(config, "head_dim", path, default=hidden_size // heads)
    local_head_dim = local_fields.get("local_head_dim", head_dim)
    for size in (head_dim, local_head_dim):
        if size > _WIDEST_HEAD or size % 2:
            raise BadModelFile(f"{path}: heads of {size} dimensions; fetch the model again")
    config, local_config = split_rope_settings(config, family)
    rope, trained = rope_and_trained_length(config, family, head_dim, path)
    local_rope = rope
    if local_config:
        local_rope, _ = rope_and_trained_length(local_config, family, local_head_dim, path)
    layer_fields = layer_kind_fields(config, family, layers, path)
    if family.gemma4:
        local_layers = layer_fields["local_layers"]
        layer_fields |= local_fields | gemma4_fields(config, layers, local_layers, path)
    if family.gemma3n:
        layer_fields |= gemma3n_fields(config, layers, layer_fields["local_layers"], path)
    return ModelSpec(
        architecture=architecture,
        vocab_size=positive_int(config, "vocab_size", path),
        hidden_size=hidden_size,
        intermediate_size=positive_int(config, _mlp_width_field(architecture), path),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=positive_float(config, family.norm_eps_field, path, default=1e-6),
        max_positions=min(trained, model_window(config, family, layers, path) or trained),
        rope=rope,
        local_rope=None if local_rope == rope else local_rope,
        tied_head=bool(config.get("tie_word_embeddings")),
        **_biases(config, family),
        bos_token_id=next(iter(_token_ids(config, generation, "bos_token_id", path)), None),
        eos_token_ids=_token_ids(config, generation, "eos_token_id", path),
        **{name: getattr(family, name) for name in _FAMILY_FIELDS},
        **_multipliers(config, family, path),
        activation=ACTIVATIONS[config.get(family.activation_field, "silu")],
        **layer_fields,
        **expert_fields(config, family, layers, path),
    )


def _architecture(config: Mapping[str, Any], path: Path) -> str:
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        raise BadModelFile(
            f"{path} does not say which architecture the model is (field architectures); "
            f"supported: {', '.join(FAMILIES)}"
        )
    name = architectures[0]
    if not isinstance(name, str) or name not in FAMILIES:
        raise unsupported_architecture(name)
    if name == GRANITE_HYBRID:
        require_dense_granite(config)
    if name == _MISTRAL3 and _text_model_type(config) == "mistral4":
        raise unsupported_architecture("Mistral4ForCausalLM")
    return str(name)


def _family(config: Mapping[str, Any], architecture: str) -> Family:
    if architecture == _MISTRAL3 and _text_model_type(config) == "ministral3":
        return replace(FAMILIES["Ministral3ForCausalLM"], multimodal=True)
    return FAMILIES[architecture]


def _text_model_type(config: Mapping[str, Any]) -> object:
    """Return the model_type of a multimodal model's language model; None if there is none."""
    text_config = config.get("text_config")
    return text_config.get("model_type") if isinstance(text_config, dict) else None


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config of a multimodal model's language model."""
    text_config = config.get("text_config")
    if not isinstance(text_config, dict):
        return config
    tied = config.get("tie_word_embeddings")
    return {**config, **text_config, **({} if tied is None else {"tie_word_embeddings": tied})}


def _mlp_width_field(architecture: str) -> str:
    return "shared_intermediate_size" if architecture == GRANITE_HYBRID else "intermediate_size"


def _biases(config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    stated, rule = bool(config.get("attention_bias")), family.attention_bias
    if rule == "qkv_bias":
        qkv_bias = config.get("qkv_bias")
        return {
            "qkv_bias": qkv_bias is None or bool(qkv_bias),
            "output_bias": False,
            "mlp_bias": False,
        }
    return {
        "qkv_bias": rule == "qkv" or (stated and rule != "none"),
        "output_bias": stated and rule == "attention_bias",
        "mlp_bias": family.mlp_bias and bool(config.get("mlp_bias", False)),
    }


def _multipliers(config: Mapping[str, Any], family: Family, path: Path) -> dict[str, Any]:
    if family.cohere_logit_scale:
        return {"logits_multiplier": positive_float(config, "logit_scale", path, default=0.0625)}
    if family.gemma_scales:
        return _gemma_scales(config, family, path)
    if not family.granite_multipliers:
        return {}
    return {
        "embedding_multiplier": positive_float(config, "embedding_multiplier", path, default=1.0),
        "residual_multiplier": positive_float(config, "residual_multiplier", path, default=1.0),
        "logits_multiplier": 1 / positive_float(config, "logits_scaling", path, default=1.0),
        "attention_multiplier": positive_float(config, "attention_multiplier", path, default=1.0),
    }


def _gemma_scales(config: Mapping[str, Any], family: Family, path: Path) -> dict[str, Any]:
    caps = {"attention_softcap": "attn_logit_softcapping"}
    if not family.no_logits_softcap:
        caps["logits_softcap"] = "final_logit_softcapping"
    hidden_size = positive_int(config, "hidden_size", path)
    scalar = positive_float(config, "query_pre_attn_scalar", path, default=256)
    return {
        "embedding_multiplier": math.sqrt(hidden_size),
        "embedding_multiplier_rounded": True,
        "attention_multiplier": scalar**-0.5,
        **{name: positive_float(config, key, path, default=0.0) for name, key in caps.items()},
    }


def _token_ids(
    config: Mapping[str, Any], generation: Mapping[str, Any], key: str, path: Path
) -> tuple[int, ...]:
    """Return the ids in a field of generation_config.json, or else of config.json."""
    value = generation.get(key)
    if value is None:
        value = config.get(key)
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(type(index) is int and 0 <= index <= LARGEST for index in ids):
        raise BadModelFile(f"{path}: {key} must be a number or a list of them, found {value!r}")
    return tuple(ids)

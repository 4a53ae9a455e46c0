"""Reading a Hugging Face `config.json`, of transformers 4 or 5, into a `ModelSpec`."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvkeep.errors import BadModelFile
from kvkeep.models.spec import unsupported
from kvkeep.models.spec.config_fields import ConfigFields, is_valid_integer, read_json
from kvkeep.models.spec.config_gemma import gemma3n_fields, gemma4_fields
from kvkeep.models.spec.config_layers import expert_fields, layer_type_fields, model_window
from kvkeep.models.spec.config_mamba import nemotron_h_config
from kvkeep.models.spec.config_states import state_fields
from kvkeep.models.spec.families import FAMILIES
from kvkeep.models.spec.family import Family
from kvkeep.models.spec.model_spec import ModelSpec
from kvkeep.models.spec.rope import rope_fields

_MISTRAL3 = "Mistral3ForConditionalGeneration"
_MAX_HEAD_DIM = 1 << 16


def read_spec(folder: Path) -> ModelSpec:
    """Read the specification of the model in a folder. Raises BadModelFile, UnsupportedModel."""
    config_path, generation_path = folder / "config.json", folder / "generation_config.json"
    if not config_path.exists():
        raise BadModelFile(
            f"{folder} has no config.json; pass the folder of a model in Hugging Face layout "
            "(config.json, model.safetensors, tokenizer.json), or a .gguf file"
        )
    generation_config = read_json(generation_path) if generation_path.exists() else {}
    return spec_from_config(read_json(config_path), generation_config, config_path)


def spec_from_config(
    values: Mapping[str, Any], generation_config: Mapping[str, Any], path: Path
) -> ModelSpec:
    """Build the specification from the contents of config.json and generation_config.json.

    path: of config.json, for messages.
    """
    architecture, family = _architecture_and_family(values, path)
    config = _config_of_family(values, family, path)
    unsupported.check_fields(config, architecture)
    fields = layer_type_fields(config, family) | expert_fields(config, family)
    fields |= state_fields(config, family)
    if family.is_gemma4:
        config, own_fields = gemma4_fields(config, fields["local_layers"])
        fields |= own_fields
    fields |= _head_fields(config, fields)
    head_dim, local_head_dim = fields["head_dim"], fields.get("local_head_dim", fields["head_dim"])
    rope_specs, trained_length = rope_fields(config, family, head_dim, local_head_dim)
    fields |= rope_specs
    if family.is_gemma3n:
        fields |= gemma3n_fields(config, fields["local_layers"])
    elif "intermediate_size" not in fields:
        fields["intermediate_size"] = config.positive_int(family.mlp_width_field)
    return ModelSpec(
        architecture=architecture,
        vocab_size=config.positive_int("vocab_size"),
        hidden_size=config.positive_int("hidden_size"),
        layers=config.num_layers,
        norm_eps=config.positive_float(family.norm_eps_field, default=1e-6),
        max_positions=min(trained_length, model_window(config, family) or trained_length),
        tied_head=bool(config.get("tie_word_embeddings")),
        bos_token_id=next(iter(_token_ids(config, generation_config, "bos_token_id")), None),
        eos_token_ids=_token_ids(config, generation_config, "eos_token_id"),
        activation=unsupported.activations(family)[config.get(family.activation_field, "silu")],
        **{"qk_norm": False, **family.spec_fields},
        **_bias_fields(config, family),
        **_multiplier_fields(config, family),
        **fields,
    )


def _architecture_and_family(values: Mapping[str, Any], path: Path) -> tuple[str, Family]:
    """Return the architecture that a config names, and its family. Raises UnsupportedModel."""
    architectures = values.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        raise BadModelFile(
            f"{path} does not name the model's architecture (field architectures); supported: "
            f"{', '.join(FAMILIES)}"
        )
    architecture = architectures[0]
    if not isinstance(architecture, str) or architecture not in FAMILIES:
        raise unsupported.architecture_error(architecture)
    if architecture == _MISTRAL3:  # its language model may be of another architecture
        text_config = values.get("text_config")
        model_type = text_config.get("model_type") if isinstance(text_config, dict) else None
        if model_type == "mistral4":
            raise unsupported.architecture_error("Mistral4ForCausalLM")
        if model_type == "ministral3":
            return architecture, replace(FAMILIES["Ministral3ForCausalLM"], multimodal=True)
    return architecture, FAMILIES[architecture]


def _config_of_family(values: Mapping[str, Any], family: Family, path: Path) -> ConfigFields:
    """Return a config's fields under the names of all families, with the family's defaults."""
    values = _language_model_config(values) if family.multimodal else values
    renamed = {
        field: values[alias]
        for alias, field in family.field_aliases.items()
        if values.get(alias) is not None
    }
    config = ConfigFields({**family.defaults, **values, **renamed}, path)
    return nemotron_h_config(config) if family.state_rule == "nemotron_h" else config


def _language_model_config(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config of a multimodal model's language model, which is in `text_config`."""
    text_config = values.get("text_config")
    if not isinstance(text_config, dict):
        return values
    tied = values.get("tie_word_embeddings")
    return {**values, **text_config, **({} if tied is None else {"tie_word_embeddings": tied})}


def _head_fields(config: ConfigFields, local_fields: Mapping[str, Any]) -> dict[str, int]:
    """Return heads, kv_heads and head_dim. local_fields: those of local layers, to be checked."""
    heads = config.positive_int("num_attention_heads")
    kv_heads = config.positive_int("num_key_value_heads", default=heads)
    default_head_dim = config.positive_int("hidden_size") // heads
    head_dim = config.positive_int("head_dim", default=default_head_dim)
    for count in (kv_heads, local_fields.get("local_kv_heads", kv_heads)):
        if heads % count:
            raise BadModelFile(
                f"{config.path}: num_attention_heads ({heads}) must be a multiple of "
                f"num_key_value_heads ({count}); fetch the model again"
            )
    for width in (head_dim, local_fields.get("local_head_dim", head_dim)):
        if width > _MAX_HEAD_DIM or width % 2:
            raise BadModelFile(f"{config.path}: heads of {width} dimensions; fetch the model again")
    return {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}


def _bias_fields(config: ConfigFields, family: Family) -> dict[str, Any]:
    """Return which projections have biases, by the family's `BiasRule`."""
    has_bias, rule = bool(config.get("attention_bias")), family.bias_rule
    qkv_bias = rule == "qkv" or (has_bias and rule in ("attention_bias", "attention_bias of qkv"))
    if rule == "qkv_bias":
        qkv_bias = config.get("qkv_bias") is None or bool(config.get("qkv_bias"))
    return {
        "qkv_bias": qkv_bias,
        "output_bias": has_bias and rule == "attention_bias",
        "mlp_bias": family.mlp_bias and bool(config.get("mlp_bias")),
    }


def _multiplier_fields(config: ConfigFields, family: Family) -> dict[str, Any]:
    """Return the multipliers and softcaps of a ModelSpec that are not its defaults."""
    if family.cohere_logit_scale:
        return {"logits_multiplier": config.positive_float("logit_scale", default=0.0625)}
    if family.granite_multipliers:
        names = ("embedding_multiplier", "residual_multiplier", "attention_multiplier")
        return {
            **{name: config.positive_float(name, default=1.0) for name in names},
            "logits_multiplier": 1 / config.positive_float("logits_scaling", default=1.0),
        }
    if not family.gemma_scales:
        return {}
    fields = {
        "embedding_multiplier": math.sqrt(config.positive_int("hidden_size")),
        "attention_multiplier": 1.0,
    }
    # The forward of Gemma 3n and 4 ignores these fields, which published files of Gemma 3n state.
    if not (family.is_gemma3n or family.is_gemma4):
        scalar = config.positive_float("query_pre_attn_scalar", default=256)
        fields["attention_multiplier"] = scalar**-0.5
        softcap = config.positive_float("attn_logit_softcapping", default=0.0)
        fields["attention_softcap"] = softcap
    if not family.no_logits_softcap:
        fields["logits_softcap"] = config.positive_float("final_logit_softcapping", default=0.0)
    return fields


def _token_ids(config: ConfigFields, generation: Mapping[str, Any], field: str) -> tuple[int, ...]:
    """Return the ids in a field of generation_config.json, or else of config.json."""
    value = generation.get(field)
    if value is None:
        value = config.get(field)
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(is_valid_integer(token_id, minimum=0) for token_id in ids):
        raise BadModelFile(
            f"{config.path}: {field} must be a number or a list of them, found {value!r}"
        )
    return tuple(ids)

"""A Hugging Face `config.json`, of transformers 4 or 5, read into a `ModelSpec`."""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvkeep.errors import BadModelFile, UnsupportedModel
from kvkeep.models.spec.config_experts import experts
from kvkeep.models.spec.config_gemma3n import gemma3n_fields, one_width
from kvkeep.models.spec.config_gemma4 import gemma4_fields, heads_apart
from kvkeep.models.spec.config_layers import unlike_layers
from kvkeep.models.spec.config_numbers import LARGEST, count, positive
from kvkeep.models.spec.families import FAMILIES
from kvkeep.models.spec.family import Family
from kvkeep.models.spec.model_spec import Activation, ModelSpec
from kvkeep.models.spec.positions import positions, ropes_apart, sliding_window
from kvkeep.models.spec.unsupported import why_not
from kvkeep.storage.files.text import ENCODING

_HYBRID = "GraniteMoeHybridForCausalLM"
_GEMMA3 = ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration")
_GPT_OSS = "GptOssForCausalLM"
_MISTRAL3 = "Mistral3ForConditionalGeneration"

_AS_IN_FAMILY = (
    "qk_norm",
    "qk_norm_whole",
    "norms_before",
    "norms_after",
    "centred_norms",
    "parallel",
    "unit_norms",
    "sinks",
)
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_WIDEST_HEAD = 1 << 16


def read_spec(folder: Path) -> ModelSpec:
    """What the model in a folder is.

    Raises BadModelFile if config.json is missing, empty, not JSON or lacks a field, and
    UnsupportedModel if the model is outside what kvkeep runs.
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
    """As `read_spec`, from what the two JSON files hold. path: where from, for messages."""
    architecture = _architecture(config, path)
    family = _family(config, architecture)
    config = {**family.usual, **(_text_part(config) if family.text_part else config)}
    _refuse_unsupported(config, architecture)
    config = one_width(config, path) if family.gemma3n else config
    config, local_heads = heads_apart(config, path) if family.gemma4 else (config, {})
    heads = count(config, "num_attention_heads", path)
    hidden_size = count(config, "hidden_size", path)
    layers = count(config, "num_hidden_layers", path)
    kv_heads = count(config, "num_key_value_heads", path, default=heads)
    for each in (kv_heads, local_heads.get("local_kv_heads", kv_heads)):
        if heads % each:
            raise BadModelFile(
                f"{path}: num_attention_heads ({heads}) must be a multiple of num_key_value_heads "
                f"({each}); fetch the model again"
            )
    head_dim = count(config, "head_dim", path, default=hidden_size // heads)
    local_head_dim = local_heads.get("local_head_dim", head_dim)
    for each in (head_dim, local_head_dim):
        if each > _WIDEST_HEAD or each % 2:
            raise BadModelFile(f"{path}: heads of {each} dimensions; fetch the model again")
    config, local = ropes_apart(config, family)
    rope, trained = positions(config, family, head_dim, path)
    local_rope = positions(local, family, local_head_dim, path)[0] if local else rope
    unlike = unlike_layers(config, family, layers, path)
    if family.gemma4:
        unlike |= local_heads | gemma4_fields(config, layers, unlike["local_layers"], path)
    if family.gemma3n:
        unlike |= gemma3n_fields(config, layers, unlike["local_layers"], path)
    return ModelSpec(
        architecture=architecture,
        vocab_size=count(config, "vocab_size", path),
        hidden_size=hidden_size,
        intermediate_size=count(config, _width(architecture), path),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=positive(config, family.norm_eps, path, default=1e-6),
        max_positions=min(trained, sliding_window(config, family, layers, path) or trained),
        rope=rope,
        local_rope=None if local_rope == rope else local_rope,
        tied_head=bool(config.get("tie_word_embeddings")),
        **_biases(config, family),
        bos_token_id=next(iter(_token_ids(config, generation, "bos_token_id", path)), None),
        eos_token_ids=_token_ids(config, generation, "eos_token_id", path),
        **{name: getattr(family, name) for name in _AS_IN_FAMILY},
        **_multipliers(config, family, path),
        activation=_ACTIVATIONS[config.get(family.activation, "silu")],
        **unlike,
        **experts(config, family, layers, path),
    )


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; BadModelFile if it is unreadable, empty, or something else."""
    try:
        text = path.read_text(encoding=ENCODING)
    except (OSError, UnicodeDecodeError) as error:
        raise BadModelFile(f"{path} cannot be read ({error}); fetch the model again") from error
    if not text.strip():
        raise BadModelFile(f"{path} is empty; fetch the model again")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits is a ValueError
        raise BadModelFile(f"{path} is not valid JSON ({error}); fetch the model again") from error
    if not isinstance(value, dict):
        raise BadModelFile(
            f"{path} holds a JSON {type(value).__name__}, not an object; fetch the model again"
        )
    return value


def _architecture(config: Mapping[str, Any], path: Path) -> str:
    named = config.get("architectures")
    if not isinstance(named, list) or not named:
        raise BadModelFile(
            f"{path} does not say which architecture the model is (field architectures); "
            f"supported: {', '.join(FAMILIES)}"
        )
    if not isinstance(named[0], str) or named[0] not in FAMILIES:
        raise _unsupported(named[0])
    if named[0] == _HYBRID:
        _require_dense(config)
    text = config.get("text_config")
    if named[0] == _MISTRAL3 and isinstance(text, dict) and text.get("model_type") == "mistral4":
        raise _unsupported("Mistral4ForCausalLM")
    return str(named[0])


def _family(config: Mapping[str, Any], architecture: str) -> Family:
    text = config.get("text_config")
    if (
        architecture == _MISTRAL3
        and isinstance(text, dict)
        and text.get("model_type") == "ministral3"
    ):
        return replace(FAMILIES["Ministral3ForCausalLM"], text_part=True)
    return FAMILIES[architecture]


def _unsupported(architecture: object) -> UnsupportedModel:
    return UnsupportedModel(
        f"architecture {architecture} is not supported{why_not(architecture)}; supported: "
        f"{', '.join(FAMILIES)}"
    )


def _require_dense(config: Mapping[str, Any]) -> None:
    """Raises UnsupportedModel for a Granite 4 with state layers or experts, or without RoPE."""
    kinds = config.get("layer_types")
    attend = ("attention", "full_attention")
    if not isinstance(kinds, list) or any(kind not in attend for kind in kinds):
        raise _unsupported(_HYBRID)
    found = {"num_local_experts": 8, "position_embedding_type": None, **config}
    for name, expected in (("num_local_experts", 0), ("position_embedding_type", "rope")):
        if found[name] != expected:
            raise UnsupportedModel(
                f"architecture {_HYBRID} with {name} {found[name]!r} is not supported, only "
                f"{expected!r}: granite-4.0-micro, -1b and -350m run, and Granite 3"
            )


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of a model that reads images, too, what its config says of the language model."""
    text = config.get("text_config")
    if not isinstance(text, dict):
        return config
    tied = config.get("tie_word_embeddings")
    return {**config, **text, **({} if tied is None else {"tie_word_embeddings": tied})}


def _width(architecture: str) -> str:
    """The field that says how wide the MLP is."""
    return "shared_intermediate_size" if architecture == _HYBRID else "intermediate_size"


def _refuse_unsupported(config: Mapping[str, Any], architecture: str) -> None:
    activation = config.get(FAMILIES[architecture].activation, "silu")
    if not isinstance(activation, str) or activation not in _ACTIVATIONS:
        raise UnsupportedModel(
            f"{architecture} with activation {activation!r} is not supported, only "
            f"{', '.join(_ACTIVATIONS)}"
        )
    if architecture in ("CohereForCausalLM", "Cohere2ForCausalLM") and config.get("use_qk_norm"):
        raise UnsupportedModel(
            f"{architecture} with norms of queries and keys (Command R+) is not supported; the "
            "others of its family (Command R, R7B, A, Aya) are"
        )
    if architecture == "OlmoeForCausalLM" and config.get("clip_qkv") is not None:
        raise UnsupportedModel(
            f"{architecture} that clips queries, keys and values (clip_qkv) is not supported; the "
            "others of its family are"
        )
    if architecture in _GEMMA3 and config.get("attn_logit_softcapping") is not None:
        raise UnsupportedModel(
            f"{architecture} that caps attention (attn_logit_softcapping) is not supported; the "
            "others of its family are, and Gemma 2"
        )
    if config.get("use_bidirectional_attention") not in (None, False, "vision"):
        raise UnsupportedModel(
            f"{architecture} that looks ahead in a text (use_bidirectional_attention) is not "
            "supported: it makes embeddings, not text. The others of its family are"
        )
    if architecture == _GPT_OSS and (
        config.get("swiglu_alpha", 1.702) != 1.702 or config.get("swiglu_limit", 7.0) != 7
    ):
        raise UnsupportedModel(
            f"{architecture} whose experts are clamped otherwise than at 7 (swiglu_limit, "
            "swiglu_alpha) is not supported; gpt-oss-20b and -120b are"
        )
    quantised = config.get("quantization_config")
    if quantised:
        method = quantised.get("quant_method", "?") if isinstance(quantised, dict) else "?"
        if architecture == _GPT_OSS and method == "mxfp4":
            return
        raise UnsupportedModel(
            f"weights quantised by {method!r} are not supported; use the model's bf16 safetensors "
            "or a .gguf file"
        )


def _biases(config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    stated = bool(config.get("attention_bias"))
    if family.attention_bias == "qkv unless said":
        said = config.get("qkv_bias")
        return {"qkv_bias": said is None or bool(said), "output_bias": False, "mlp_bias": False}
    return {
        "qkv_bias": family.attention_bias == "qkv" or (stated and family.attention_bias != "none"),
        "output_bias": stated and family.attention_bias == "stated",
        "mlp_bias": family.mlp_bias and bool(config.get("mlp_bias", False)),
    }


def _multipliers(config: Mapping[str, Any], family: Family, path: Path) -> dict[str, Any]:
    if family.logit_scale:
        return {"logits_multiplier": positive(config, "logit_scale", path, default=0.0625)}
    if family.scaled:
        return _scales(config, family, path)
    if not family.multipliers:
        return {}
    return {
        "embedding_multiplier": positive(config, "embedding_multiplier", path, default=1.0),
        "residual_multiplier": positive(config, "residual_multiplier", path, default=1.0),
        "logits_multiplier": 1 / positive(config, "logits_scaling", path, default=1.0),
        "attention_multiplier": positive(config, "attention_multiplier", path, default=1.0),
    }


def _scales(config: Mapping[str, Any], family: Family, path: Path) -> dict[str, Any]:
    """Gemma's multipliers and caps."""
    caps = {"attention_softcap": "attn_logit_softcapping"}
    if not family.uncapped:
        caps["logits_softcap"] = "final_logit_softcapping"
    return {
        "embedding_multiplier": math.sqrt(count(config, "hidden_size", path)),
        "embedding_multiplier_rounded": True,
        "attention_multiplier": positive(config, "query_pre_attn_scalar", path, default=256)
        ** -0.5,
        **{ours: positive(config, theirs, path, default=0.0) for ours, theirs in caps.items()},
    }


def _token_ids(
    config: Mapping[str, Any], generation: Mapping[str, Any], key: str, path: Path
) -> tuple[int, ...]:
    """generation_config.json is what generation goes by; config.json is the fallback."""
    value = generation.get(key)
    if value is None:
        value = config.get(key)
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(type(index) is int and 0 <= index <= LARGEST for index in ids):
        raise BadModelFile(f"{path}: {key} must be a number or a list of them, found {value!r}")
    return tuple(ids)

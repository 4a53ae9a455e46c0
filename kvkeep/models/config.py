"""A Hugging Face `config.json`, of transformers 4 or 5, read into a `ModelSpec`."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvkeep.errors import BadModelFile, UnsupportedModel
from kvkeep.models.frequencies import rope_spec
from kvkeep.models.spec import ModelSpec, RopeSpec

ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Phi3ForCausalLM",
)

_LARGEST = 1 << 40  # of any size or length in a config
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
    _refuse_unsupported(config, architecture)
    heads = _count(config, "num_attention_heads", path)
    hidden_size = _count(config, "hidden_size", path)
    layers = _count(config, "num_hidden_layers", path)
    kv_heads = _count(config, "num_key_value_heads", path, default=heads)
    if heads % kv_heads:
        raise BadModelFile(
            f"{path}: num_attention_heads ({heads}) must be a multiple of num_key_value_heads "
            f"({kv_heads}); fetch the model again"
        )
    # Qwen 3 is the one family whose head_dim does not follow from the others.
    usual_head_dim = 128 if architecture == "Qwen3ForCausalLM" else hidden_size // heads
    head_dim = _count(config, "head_dim", path, default=usual_head_dim)
    if head_dim > _WIDEST_HEAD:
        raise BadModelFile(f"{path}: heads of {head_dim} dimensions; fetch the model again")
    rope, trained = _positions(config, head_dim, path)
    return ModelSpec(
        architecture=architecture,
        vocab_size=_count(config, "vocab_size", path),
        hidden_size=hidden_size,
        intermediate_size=_count(config, "intermediate_size", path),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=_positive(config, "rms_norm_eps", path, default=1e-6),
        max_positions=min(trained, _sliding_window(config, architecture, layers, path) or trained),
        rope=rope,
        tied_head=bool(config.get("tie_word_embeddings", False)),
        **_biases(config, architecture),
        qk_norm=architecture == "Qwen3ForCausalLM",
        bos_token_id=next(iter(_token_ids(config, generation, "bos_token_id", path)), None),
        eos_token_ids=_token_ids(config, generation, "eos_token_id", path),
    )


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; BadModelFile if it is unreadable, empty, or something else."""
    try:
        text = path.read_text(encoding="utf-8")
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
            f"supported: {', '.join(ARCHITECTURES)}"
        )
    if not isinstance(named[0], str) or named[0] not in ARCHITECTURES:
        raise UnsupportedModel(
            f"architecture {named[0]} is not supported; supported: {', '.join(ARCHITECTURES)}"
        )
    return str(named[0])


def _refuse_unsupported(config: Mapping[str, Any], architecture: str) -> None:
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModel(
            f"{architecture} with activation {activation!r} is not supported, only 'silu'"
        )
    quantised = config.get("quantization_config")
    if quantised:
        method = quantised.get("quant_method", "?") if isinstance(quantised, dict) else "?"
        raise UnsupportedModel(
            f"weights quantised by {method!r} are not supported; use the model's bf16 safetensors "
            "or a .gguf file"
        )


def _biases(config: Mapping[str, Any], architecture: str) -> dict[str, bool]:
    """Qwen 2 always has them on q, k and v, Mistral never; the others say."""
    stated = bool(config.get("attention_bias", False))
    attention = stated and architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM")
    return {
        "qkv_bias": attention or architecture == "Qwen2ForCausalLM",
        "output_bias": attention,
        "mlp_bias": architecture == "LlamaForCausalLM" and bool(config.get("mlp_bias", False)),
    }


def _positions(config: Mapping[str, Any], head_dim: int, path: Path) -> tuple[RopeSpec, int]:
    """The RoPE table, and the length in tokens that it was trained or extended to."""
    stated = _count(config, "max_position_embeddings", path)
    settings = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(settings, dict) or any(isinstance(x, dict) for x in settings.values()):
        raise UnsupportedModel(
            f"{path}: RoPE settings must be one flat object, found {settings!r}; models that "
            "rotate differently from layer to layer are not supported"
        )
    _require_whole_rotation(config, settings, path)
    rope = rope_spec(
        settings,
        theta=_rope_theta(config, settings, path),
        rotary_dim=head_dim,
        max_positions=stated,
    )
    return rope, _extended_length(settings, stated)


def _rope_theta(config: Mapping[str, Any], settings: Mapping[str, Any], path: Path) -> float:
    holder = settings if settings.get("rope_theta") is not None else config
    return _positive(holder, "rope_theta", path, default=10_000.0)


def _require_whole_rotation(
    config: Mapping[str, Any], settings: Mapping[str, Any], path: Path
) -> None:
    """The cache rotates whole heads; no model of these families does otherwise."""
    holder = settings if settings.get("partial_rotary_factor") is not None else config
    factor = _positive(holder, "partial_rotary_factor", path, default=1.0)
    if factor != 1:
        raise UnsupportedModel(
            f"{path} rotates a part of each head (partial_rotary_factor {factor}); "
            "only models that rotate whole heads are supported"
        )


def _extended_length(rope_settings: Mapping[str, Any], stated: int) -> int:
    """Some yarn configs state the length before extension as max_position_embeddings."""
    kind = rope_settings.get("rope_type") or rope_settings.get("type")
    original = rope_settings.get("original_max_position_embeddings")
    factor = rope_settings.get("factor")
    if kind == "yarn" and original and factor:
        return max(stated, int(min(original * factor, _LARGEST)))  # rope_spec has seen both
    return stated


def _sliding_window(
    config: Mapping[str, Any], architecture: str, layers: int, path: Path
) -> int | None:
    """Tokens that a layer sees, where the model was trained to see fewer than all."""
    if architecture == "LlamaForCausalLM":
        return None
    if architecture not in ("MistralForCausalLM", "Phi3ForCausalLM"):
        kinds = config.get("layer_types")
        slides = bool(config.get("use_sliding_window", False)) and (
            "sliding_attention" in kinds
            if isinstance(kinds, list) and kinds
            else _whole(config, "max_window_layers", path, default=28) < layers
        )
        if not slides:
            return None
    usual = None if architecture == "Phi3ForCausalLM" else 4096
    if config.get("sliding_window", usual) is None:
        return None
    return _count(config, "sliding_window", path, default=usual)


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
    if not all(type(index) is int and 0 <= index <= _LARGEST for index in ids):
        raise BadModelFile(f"{path}: {key} must be a number or a list of them, found {value!r}")
    return tuple(ids)


def _count(config: Mapping[str, Any], key: str, path: Path, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise BadModelFile(f"{path} lacks the field {key}; fetch the model again")
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _LARGEST:
        raise BadModelFile(
            f"{path}: {key} must be a whole number of at least 1 and at most {_LARGEST}, found "
            f"{value!r}; fetch the model again"
        )
    return value


def _whole(config: Mapping[str, Any], key: str, path: Path, default: int) -> int:
    """As `_count`, from 0 up."""
    return 0 if config.get(key) == 0 else _count(config, key, path, default)


def _positive(config: Mapping[str, Any], key: str, path: Path, default: float) -> float:
    value = config.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise BadModelFile(
            f"{path}: {key} must be a positive number, found {value!r}; fetch the model again"
        )
    return float(value)

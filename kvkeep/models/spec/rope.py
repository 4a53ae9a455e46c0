"""RoPE settings of a config, resolved to one fixed table of frequencies in float64.

Also the length in tokens that a model was trained or extended to, which these settings decide.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvkeep.errors import BadModelFile, UnsupportedModel
from kvkeep.models.spec.config_fields import LARGEST, positive_float, positive_int
from kvkeep.models.spec.families import FAMILIES
from kvkeep.models.spec.family import Family
from kvkeep.models.spec.model_spec import RopeSpec

SUPPORTED = ("default", "linear", "llama3", "yarn", "longrope")
_PHI3 = "Phi3ForCausalLM"
_ORIGINAL_LENGTH = "original_max_position_embeddings"


def split_rope_settings(
    config: Mapping[str, Any], family: Family
) -> tuple[Mapping[str, Any], Mapping[str, Any] | None]:
    """Return the config with the RoPE settings of global layers, and with those of local layers.

    The second is None if both kinds of layers rotate alike. transformers 5 has an object of
    settings for each kind; in transformers 4 the base of local layers was a field of its own, and
    none of them were scaled.
    """
    if not (family.layer_pattern and family.layer_pattern.separate_local_rope):
        return config, None
    global_rope: Any = (
        config.get("rope_parameters") or config.get("rope_scaling") or family.default_rope
    )
    local_rope = None
    kinds = "full_attention", "sliding_attention"
    if isinstance(global_rope, dict) and any(kind in global_rope for kind in kinds):
        global_rope, local_rope = (global_rope.get(kind) for kind in kinds)
    unscaled = {"rope_type": "default"}
    global_config = {**config, "rope_parameters": global_rope or unscaled, "rope_scaling": None}
    local_base = config.get("rope_local_base_freq", config.get("rope_theta"))
    local_settings = {"rope_parameters": local_rope or unscaled, "rope_theta": local_base}
    return global_config, {**global_config, **local_settings}


def rope_and_trained_length(
    config: Mapping[str, Any], family: Family, head_dim: int, path: Path
) -> tuple[RopeSpec, int]:
    """Return the RoPE table, and the length in tokens that it was trained or extended to.

    Raises BadModelFile, UnsupportedModel.
    """
    stated_length = positive_int(config, "max_position_embeddings", path)
    settings = (
        config.get("rope_scaling") or config.get("rope_parameters") or dict(family.default_rope)
    )
    if not isinstance(settings, dict) or any(isinstance(x, dict) for x in settings.values()):
        raise UnsupportedModel(
            f"{path}: RoPE settings must be one flat object, found {settings!r}; models that "
            "rotate differently from layer to layer are not supported"
        )
    settings = _normalised_settings(config, settings, family, path)
    if family.gemma4 and settings.get("rope_type") == "proportional":
        return _proportional(settings, head_dim, path), stated_length
    rotary_dim = _rotary_dim(config, settings, family, head_dim, path)
    rope = rope_spec(
        settings,
        theta=_rope_theta(config, settings, path),
        rotary_dim=rotary_dim,
        max_positions=stated_length,
    )
    unrotated = (0.0,) * (head_dim // 2 - rotary_dim // 2)
    rope = replace(rope, inverse_frequencies=rope.inverse_frequencies + unrotated)
    if rope.kind == "longrope":  # the table in use is the one for short texts
        return rope, min(stated_length, settings[_ORIGINAL_LENGTH])
    if settings.get("llama_4_scaling_beta"):
        # Beyond the original length, queries grow with their position.
        original = positive_int(settings, _ORIGINAL_LENGTH, path, default=stated_length)
        return rope, min(stated_length, original)
    return rope, _extended_length(settings, stated_length)


def _proportional(settings: Mapping[str, Any], head_dim: int, path: Path) -> RopeSpec:
    """Take the first frequencies of a whole head's table; the other pairs are not rotated."""
    share = positive_float(settings, "partial_rotary_factor", path, default=1.0)
    pairs = int(share * head_dim // 2)
    if not 0 < pairs <= head_dim // 2:
        raise BadModelFile(
            f"{path}: partial_rotary_factor {share} of heads of {head_dim} gives no pairs that "
            "could be rotated; fetch the model again"
        )
    scaling = {key: settings[key] for key in ("rope_type", "factor") if settings.get(key)}
    kind = "linear" if "factor" in scaling else "default"
    theta = _rope_theta({}, settings, path)
    table = rope_spec({**scaling, "rope_type": kind}, theta, head_dim, 1).inverse_frequencies
    return RopeSpec("proportional", table[:pairs] + (0.0,) * (head_dim // 2 - pairs))


def _normalised_settings(
    config: Mapping[str, Any], settings: Mapping[str, Any], family: Family, path: Path
) -> Mapping[str, Any]:
    """Return the settings with the rope_type and the original length where `rope_spec` expects."""
    kind = settings.get("rope_type") or settings.get("type")
    if kind == "mrope" and family.multimodal:  # in text, all three positions are the same
        return {**settings, "rope_type": "default"}
    pattern = family.layer_pattern
    separate_local_rope = pattern is not None and pattern.separate_local_rope
    holder = config if config.get(_ORIGINAL_LENGTH) and not separate_local_rope else settings
    if not (kind == "longrope" or (kind in ("su", "yarn") and family is FAMILIES[_PHI3])):
        stated = holder.get(_ORIGINAL_LENGTH)
        return settings if stated is None else {**settings, _ORIGINAL_LENGTH: stated}
    longest = positive_int(config, "max_position_embeddings", path)
    original = positive_int(holder, _ORIGINAL_LENGTH, path, default=longest)
    return {**settings, "rope_type": "longrope", _ORIGINAL_LENGTH: original}


def _rope_theta(config: Mapping[str, Any], settings: Mapping[str, Any], path: Path) -> float:
    holder = settings if settings.get("rope_theta") is not None else config
    return positive_float(holder, "rope_theta", path, default=10_000.0)


def _rotary_dim(
    config: Mapping[str, Any],
    settings: Mapping[str, Any],
    family: Family,
    head_dim: int,
    path: Path,
) -> int:
    """Return how many dimensions of each head are rotated."""
    holder = settings if settings.get("partial_rotary_factor") is not None else config
    default = family.partial_rotary_factor or 1.0
    factor = positive_float(holder, "partial_rotary_factor", path, default=default)
    if factor == 1:
        return head_dim
    if family.partial_rotary_factor is None:
        raise UnsupportedModel(
            f"{path} rotates a part of each head (partial_rotary_factor {factor}), which no model "
            "of its architecture does: fetch the model again"
        )
    rotary_dim = int(head_dim * factor)
    if factor > 1 or rotary_dim < 2 or rotary_dim % 2 or head_dim % 2:
        raise BadModelFile(
            f"{path}: partial_rotary_factor {factor} of heads of {head_dim} gives no pairs that "
            "could be rotated; fetch the model again"
        )
    return rotary_dim


def _extended_length(settings: Mapping[str, Any], stated_length: int) -> int:
    """Return the trained length: some yarn configs state the one before extension."""
    kind = settings.get("rope_type") or settings.get("type")
    original, factor = settings.get(_ORIGINAL_LENGTH), settings.get("factor")
    if kind == "yarn" and original and factor:
        # Both were checked by rope_spec.
        return max(stated_length, int(min(original * factor, LARGEST)))
    return stated_length


def rope_spec(
    settings: Mapping[str, Any], theta: float, rotary_dim: int, max_positions: int
) -> RopeSpec:
    """Compute the frequency table for a config's `rope_scaling` or `rope_parameters`.

    theta: base of the geometric series. rotary_dim: how many of a head's dimensions are rotated.
    max_positions: stands in for `original_max_position_embeddings` where that is missing.

    longrope (LongRoPE, arXiv:2402.13753) has two tables. The result is the short one, for texts up
    to `original_max_position_embeddings`.

    Raises UnsupportedModel for kinds whose table changes with the length (dynamic) and for unknown
    ones, BadModelFile if a field is missing.
    """
    kind = settings.get("rope_type") or settings.get("type") or "default"
    if kind not in SUPPORTED:
        raise UnsupportedModel(
            f"RoPE kind {kind!r} is not supported; supported: {', '.join(SUPPORTED)}. "
            "Kinds whose frequencies change with the length (dynamic) cannot work with keys that "
            "are written once: choose a model with one of the supported kinds"
        )
    try:
        spec = _scaled_table(kind, settings, theta, rotary_dim, max_positions)
    except (ArithmeticError, ValueError) as error:
        raise BadModelFile(_bad_settings(kind, f"{error}")) from error
    numbers = (*spec.inverse_frequencies, spec.attention_scaling)
    if not all(math.isfinite(number) and number > 0 for number in numbers):
        raise BadModelFile(_bad_settings(kind, "its frequencies are no positive numbers"))
    return spec


def _bad_settings(kind: str, reason: str) -> str:
    return (
        f"RoPE kind {kind!r} has settings that give no table ({reason}); repair the model's "
        "config.json or fetch it again"
    )


def _scaled_table(
    kind: str, settings: Mapping[str, Any], theta: float, rotary_dim: int, max_positions: int
) -> RopeSpec:
    plain = [theta ** (-pair / rotary_dim) for pair in range(0, rotary_dim, 2)]
    if kind == "default":
        return RopeSpec(kind, tuple(plain))
    if kind == "linear":
        factor = _number(settings, "factor", kind)
        return RopeSpec(kind, tuple(frequency / factor for frequency in plain))
    original = _number(settings, "original_max_position_embeddings", kind, max_positions)
    if kind == "llama3":
        return RopeSpec(kind, tuple(_llama3(settings, plain, original)))
    if kind == "longrope":
        scaling = _longrope_attention_scaling(settings, max_positions, original)
        return RopeSpec(kind, tuple(_longrope_short(settings, plain)), scaling)
    factor = _number(settings, "factor", kind, max_positions / original)
    return RopeSpec(
        kind,
        tuple(_yarn(settings, plain, theta, factor, original)),
        _yarn_attention_scaling(settings, factor),
    )


def _llama3(settings: Mapping[str, Any], plain: list[float], original: float) -> list[float]:
    """Scale as Llama 3.1: divide low frequencies by `factor`, keep high ones, blend in between."""
    factor = _number(settings, "factor", "llama3")
    low = _number(settings, "low_freq_factor", "llama3")
    high = _number(settings, "high_freq_factor", "llama3")
    scaled = []
    for frequency in plain:
        turns = original * frequency / (2 * math.pi)
        unscaled = min(max((turns - low) / (high - low), 0.0), 1.0) if high != low else turns > low
        scaled.append(frequency * ((1 - unscaled) / factor + unscaled))
    return scaled


def _yarn(
    settings: Mapping[str, Any], plain: list[float], theta: float, factor: float, original: float
) -> list[float]:
    """Scale as YaRN (Peng et al., 2023): keep high frequencies, divide low ones by `factor`."""
    rotary_dim = 2 * len(plain)

    def dimension_turning(turns: float) -> float:
        return rotary_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first = dimension_turning(_number(settings, "beta_fast", "yarn", 32))
    last = dimension_turning(_number(settings, "beta_slow", "yarn", 1))
    if settings.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary_dim - 1)
    if first == last:
        last += 0.001
    scaled = []
    for pair, frequency in enumerate(plain):
        slowed = min(max((pair - first) / (last - first), 0.0), 1.0)
        scaled.append(frequency * (slowed / factor + 1 - slowed))
    return scaled


def _yarn_attention_scaling(settings: Mapping[str, Any], factor: float) -> float:
    if settings.get("attention_factor") is not None:
        return _number(settings, "attention_factor", "yarn")

    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if settings.get("mscale") and settings.get("mscale_all_dim"):
        all_dims = magnitude(_number(settings, "mscale_all_dim", "yarn"))
        return magnitude(_number(settings, "mscale", "yarn")) / all_dims
    return magnitude(1.0)


def _longrope_short(settings: Mapping[str, Any], plain: list[float]) -> list[float]:
    """Divide each frequency by its own number in LongRoPE's table for short texts."""
    divisors = settings.get("short_factor")
    if not isinstance(divisors, list) or len(divisors) != len(plain):
        raise BadModelFile(
            _bad_settings("longrope", f"short_factor has to be {len(plain)} numbers")
        )
    checked = [_number({"short_factor": value}, "short_factor", "longrope") for value in divisors]
    return [frequency / divisor for frequency, divisor in zip(plain, checked, strict=True)]


def _longrope_attention_scaling(
    settings: Mapping[str, Any], max_positions: int, original: float
) -> float:
    if settings.get("attention_factor") is not None:
        return _number(settings, "attention_factor", "longrope")
    factor = _number(settings, "factor", "longrope", max_positions / original)
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


def _number(
    settings: Mapping[str, Any], key: str, kind: str, default: float | None = None
) -> float:
    """Return a positive number from the settings.

    default: for a field that is missing, null or 0; None if the field is required.

    Raises BadModelFile.
    """
    value = settings.get(key)
    if default is not None and (value is None or value == 0):
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise BadModelFile(
            f"RoPE kind {kind!r} needs a positive number as {key!r}, found {value!r}; "
            "repair the model's config.json or fetch it again"
        )
    return float(value)

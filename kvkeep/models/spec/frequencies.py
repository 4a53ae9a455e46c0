"""RoPE: from a model's settings to one fixed table of frequencies, in float64."""

import math
from collections.abc import Mapping
from typing import Any

from kvkeep.errors import BadModelFile, UnsupportedModel
from kvkeep.models.spec.model_spec import RopeSpec

SUPPORTED = ("default", "linear", "llama3", "yarn", "longrope")


def rope_spec(
    settings: Mapping[str, Any], theta: float, rotary_dim: int, max_positions: int
) -> RopeSpec:
    """The table that a config's `rope_scaling` or `rope_parameters` asks for.

    theta: base of the geometric series. rotary_dim: how many of a head's dimensions are rotated.
    max_positions: stands in for `original_max_position_embeddings` where that is missing.

    Of longrope (LongRoPE, arXiv:2402.13753), which has two tables, it is the short one: that of
    texts up to `original_max_position_embeddings`.

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
        spec = _table(kind, settings, theta, rotary_dim, max_positions)
    except (ArithmeticError, ValueError) as error:
        raise BadModelFile(_no_table(kind, f"{error}")) from error
    numbers = (*spec.inverse_frequencies, spec.attention_scaling)
    if not all(math.isfinite(number) and number > 0 for number in numbers):
        raise BadModelFile(_no_table(kind, "its frequencies are no positive numbers"))
    return spec


def _no_table(kind: str, why: str) -> str:
    return (
        f"RoPE kind {kind!r} has settings that give no table ({why}); repair the model's "
        "config.json or fetch it again"
    )


def _table(
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
        return RopeSpec(kind, tuple(_short(settings, plain)), scaling)
    factor = _number(settings, "factor", kind, max_positions / original)
    return RopeSpec(
        kind,
        tuple(_yarn(settings, plain, theta, factor, original)),
        _yarn_attention_scaling(settings, factor),
    )


def _llama3(settings: Mapping[str, Any], plain: list[float], original: float) -> list[float]:
    """Llama 3.1: long wavelengths are slowed by `factor`, short ones kept, a ramp between."""
    factor = _number(settings, "factor", "llama3")
    low = _number(settings, "low_freq_factor", "llama3")
    high = _number(settings, "high_freq_factor", "llama3")
    scaled = []
    for frequency in plain:
        turns = original * frequency / (2 * math.pi)
        kept = min(max((turns - low) / (high - low), 0.0), 1.0) if high != low else turns > low
        scaled.append(frequency * ((1 - kept) / factor + kept))
    return scaled


def _yarn(
    settings: Mapping[str, Any], plain: list[float], theta: float, factor: float, original: float
) -> list[float]:
    """YaRN (Peng et al., 2023): pairs that turn often are kept, pairs that turn little slowed."""
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
        whole = magnitude(_number(settings, "mscale_all_dim", "yarn"))
        return magnitude(_number(settings, "mscale", "yarn")) / whole
    return magnitude(1.0)


def _short(settings: Mapping[str, Any], plain: list[float]) -> list[float]:
    """LongRoPE's table of short texts: each frequency has a divisor of its own."""
    divisors = settings.get("short_factor")
    if not isinstance(divisors, list) or len(divisors) != len(plain):
        raise BadModelFile(_no_table("longrope", f"short_factor has to be {len(plain)} numbers"))
    numbers = (_number({"short_factor": each}, "short_factor", "longrope") for each in divisors)
    return [frequency / divisor for frequency, divisor in zip(plain, numbers, strict=True)]


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
    """default: for a field that is missing, null or 0; None where it must be there."""
    value = settings.get(key)
    if default is not None and (value is None or value == 0):
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise BadModelFile(
            f"RoPE kind {kind!r} needs a positive number as {key!r}, found {value!r}; "
            "repair the model's config.json or fetch it again"
        )
    return float(value)

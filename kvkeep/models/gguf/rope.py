"""Translation of a GGUF file's RoPE fields and tables to the `rope_scaling` of config.json.

llama.cpp computes each pair's rotation from four things: `rope.scaling.type`, a factor, a table of
frequency divisors among the tensors, and `rope.scaling.attn_factor`, which multiplies cosine and
sine. If config.json has a kind for a file's combination, that kind is used. Every other combination
becomes longrope, which has a divisor for each pair and an attention factor.
"""

import math
from collections.abc import Sequence
from typing import Any

from kvkeep.errors import BadModelFile, UnsupportedModel
from kvkeep.models.gguf.file import GgufFile
from kvkeep.models.spec.rope import rope_spec

_DIVISORS = "rope_freqs.weight"
_LONGROPE_TABLES = {kind: f"rope_factors_{kind}.weight" for kind in ("short", "long")}
_UNIT = (0.0, 1.0)  # values of a factor that scale nothing: 0 stands for 1
# In these, llama.cpp scales local layers even if the type is "none".
_LOCAL_ALWAYS_SCALED = ("gemma2", "gpt-oss")
_PHI3 = "phi3"  # has two tables whatever the type, and its config calls longrope "yarn"


def rope_scaling(file: GgufFile, family: str, rotary_dim: int) -> dict[str, Any] | None:
    """Return the `rope_scaling` of a config; None if nothing is scaled.

    rotary_dim: how many dimensions of a head are rotated.

    Raises UnsupportedModel for settings that no config can express, BadModelFile for wrong ones.
    """
    settings, attention = _settings(file, family), attention_factor(file, family)
    tables = _tables(file, family, rotary_dim)
    scaling: dict[str, Any] | None
    if len(tables) == 2:
        scaling = _two_tables(file, family, settings, tables, attention)
    else:
        divisors = tables.get(_DIVISORS, [1.0] * (rotary_dim // 2))
        scaling = _one_table(file, family, settings, divisors, attention)
    return _with_temperature(file, family, scaling)


def attention_factor(file: GgufFile, family: str) -> float:
    """Return the factor on cosine and sine, `rope.scaling.attn_factor`. Raises BadModelFile."""
    factor = file.number(f"{family}.rope.scaling.attn_factor", 1.0)
    if factor <= 0:
        raise BadModelFile(
            f"{file.path}: {family}.rope.scaling.attn_factor must be above 0, found {factor}; "
            "fetch it again"
        )
    return factor


def unscaled_longrope(rotary_dim: int, attention: float, longest: int) -> dict[str, Any]:
    """Return settings that multiply cosine and sine, and scale no frequency."""
    divisors = [1.0] * (rotary_dim // 2)
    return _longrope(divisors, divisors, attention, longest)


def linear_factor(file: GgufFile, family: str) -> float:
    """Return the factor of linear scaling; 1 without scaling.

    Raises UnsupportedModel for any other scaling, BadModelFile.
    """
    settings, attention = _settings(file, family), attention_factor(file, family)
    if attention != 1 or (settings and settings["rope_type"] == "yarn"):
        key = "type" if attention == 1 else "attn_factor"
        raise UnsupportedModel(
            f"{file.path} scales RoPE by {family}.rope.scaling.{key}, which no published {family} "
            "does; use the model's safetensors folder"
        )
    return float(settings["factor"]) if settings else 1.0


def original_length(file: GgufFile, family: str) -> int:
    """Return the trained length before RoPE was extended; without one, the context length."""
    longest = file.count(f"{family}.context_length")
    return file.non_negative(f"{family}.rope.scaling.original_context_length", 0) or longest


def has_temperature(file: GgufFile, family: str) -> bool:
    """Whether queries grow with their position, as in Ministral 3."""
    return family == "mistral3" and file.number("mistral3.attention.temperature_scale", 0.0) != 0


def _settings(file: GgufFile, family: str) -> dict[str, Any] | None:
    """Return the scaling by type and factor, without tables and attn_factor; None for none."""
    prefix = f"{family}.rope.scaling"
    kind = file.text(f"{prefix}.type", "linear")
    old_factor = file.number(f"{family}.rope.scale_linear", 1.0)  # its name before 2024
    stated_factor = file.number(f"{prefix}.factor", old_factor)
    factor = 1.0 if stated_factor == 0 else shortest_decimal(stated_factor)
    if factor < 0:
        raise BadModelFile(
            f"{file.path}: {prefix}.factor must be above 0, found {factor}; fetch it again"
        )
    if kind == "none":
        if factor != 1 and family in _LOCAL_ALWAYS_SCALED:
            raise UnsupportedModel(
                f"{file.path} has {prefix}.factor {factor} with {prefix}.type 'none', by which "
                "llama.cpp scales local layers alone; use the model's safetensors folder"
            )
        return None
    if kind == "yarn":
        return _yarn(file, family, factor)
    if kind not in ("linear", "longrope"):
        raise UnsupportedModel(
            f"the GGUF RoPE scaling {kind!r} ({prefix}.type) is not supported; supported: none, "
            "linear, yarn, longrope, and Llama 3's rope_freqs.weight"
        )
    return None if factor == 1 else {"rope_type": "linear", "factor": factor}


def _yarn(file: GgufFile, family: str, factor: float) -> dict[str, Any]:
    prefix = f"{family}.rope.scaling"
    scaling: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
    for key, name in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
        if file.has(f"{prefix}.{key}"):
            scaling[name] = shortest_decimal(file.number(f"{prefix}.{key}"))
    if file.has(f"{prefix}.original_context_length"):
        scaling["original_max_position_embeddings"] = original_length(file, family)
    attention = file.number(f"{prefix}.yarn_attn_factor", 1.0)
    if attention not in _UNIT:
        scaling["attention_factor"] = shortest_decimal(attention)
    log_multiplier = file.number(f"{prefix}.yarn_log_multiplier", 0.0)
    if family == "mistral3" and log_multiplier:
        scaling |= {"mscale": 1.0, "mscale_all_dim": shortest_decimal(log_multiplier)}
    unsupported = {"yarn_ext_factor": file.number(f"{prefix}.yarn_ext_factor", 1.0)}
    if family != "mistral3":
        unsupported["yarn_log_multiplier"] = log_multiplier
    for key, value in unsupported.items():
        if value not in _UNIT:
            raise UnsupportedModel(
                f"the GGUF field {prefix}.{key} ({value}) is not supported; use the model's "
                "safetensors folder"
            )
    if family == "gpt-oss":  # no file states it, and all models have it
        scaling["truncate"] = False
    return scaling


def _tables(file: GgufFile, family: str, rotary_dim: int) -> dict[str, list[float]]:
    """Return the divisor tables in effect by name: rope_freqs.weight, or both of longrope."""
    longrope = file.text(f"{family}.rope.scaling.type", "linear") == "longrope"
    two_tables = list(_LONGROPE_TABLES.values())
    expected = two_tables if family == _PHI3 or longrope else [_DIVISORS]
    present = [name for name in (_DIVISORS, *two_tables) if name in file.tensors]
    if present and present != expected:
        raise UnsupportedModel(
            f"{file.path} has {' and '.join(present)} where its {family}.rope.scaling.type asks "
            f"for {' and '.join(expected)}; use the model's safetensors folder"
        )
    return {name: _divisors(file, name, rotary_dim) for name in present}


def _divisors(file: GgufFile, name: str, rotary_dim: int) -> list[float]:
    """Return the number by which each pair's frequency is divided."""
    divisors = file.tensors[name].unpack().reshape(-1).tolist()
    if len(divisors) != rotary_dim // 2 or not all(0 < divisor < math.inf for divisor in divisors):
        raise BadModelFile(
            f"{file.path}: {name} must be a positive number for each of {rotary_dim // 2} pairs "
            "that are rotated; fetch it again"
        )
    return divisors


def _llama3(file: GgufFile, family: str, stored: list[float]) -> dict[str, Any] | None:
    """Return the llama3 settings that give the stored divisors; None if no such settings do.

    GGUF stores the divisors instead of the settings. The factor is the largest divisor; the other
    settings are the same in every Llama 3.1, 3.2 and 3.3.
    """
    settings = {
        "rope_type": "llama3",
        "factor": round(max(stored), 3),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    theta, rotary_dim = _theta(file, family), 2 * len(stored)
    plain = rope_spec({}, theta, rotary_dim, 8192).inverse_frequencies
    scaled = rope_spec(settings, theta, rotary_dim, 8192).inverse_frequencies
    divisors = [before / after for before, after in zip(plain, scaled, strict=True)]
    is_llama3 = all(
        abs(expected - divisor) <= 1e-3 * expected
        for expected, divisor in zip(divisors, stored, strict=True)
    )
    return settings if is_llama3 else None


def _one_table(
    file: GgufFile,
    family: str,
    settings: dict[str, Any] | None,
    divisors: Sequence[float],
    attention: float,
) -> dict[str, Any] | None:
    """Return settings for one table of divisors on top of linear or yarn scaling.

    attention: the factor on cosine and sine.
    """
    plain_table = all(divisor == 1 for divisor in divisors)
    is_yarn = settings is not None and settings["rope_type"] == "yarn"
    as_yarn = is_yarn and family != _PHI3
    if plain_table and attention == 1 and (as_yarn or not is_yarn):
        return settings
    # llama3 settings state another original length than the one that a temperature needs.
    if settings is None and attention == 1 and not has_temperature(file, family):
        llama3 = _llama3(file, family, list(divisors))
        if llama3 is not None:
            return llama3
    scales, magnitude = _scales(file, family, settings, 2 * len(divisors))
    if settings and plain_table and as_yarn:
        return {**settings, "attention_factor": shortest_decimal(magnitude * attention)}
    combined = [
        shortest_decimal(scale * divisor) for scale, divisor in zip(scales, divisors, strict=True)
    ]
    longest = file.count(f"{family}.context_length")
    return _longrope(combined, combined, magnitude * attention, longest)


def _scales(
    file: GgufFile, family: str, settings: dict[str, Any] | None, rotary_dim: int
) -> tuple[list[float], float]:
    """Return each pair's divisor under these settings, and their factor on cosine and sine."""
    theta, longest = _theta(file, family), file.count(f"{family}.context_length")
    scaled = rope_spec(settings or {}, theta, rotary_dim, longest)
    plain = rope_spec({}, theta, rotary_dim, longest).inverse_frequencies
    scales = [
        before / after for before, after in zip(plain, scaled.inverse_frequencies, strict=True)
    ]
    return scales, scaled.attention_scaling


def _theta(file: GgufFile, family: str) -> float:
    theta = file.number(f"{family}.rope.freq_base", 10_000.0)
    if theta <= 0:
        raise BadModelFile(
            f"{file.path}: {family}.rope.freq_base must be above 0, found {theta}; fetch it again"
        )
    return theta


def _two_tables(
    file: GgufFile,
    family: str,
    settings: dict[str, Any] | None,
    tables: dict[str, list[float]],
    attention: float,
) -> dict[str, Any]:
    """Return longrope settings: a table for short and one for long texts (Phi-3, LongRoPE)."""
    scales, magnitude = _scales(file, family, settings, 2 * len(tables[_LONGROPE_TABLES["short"]]))
    short, long = (
        [shortest_decimal(s * divisor) for s, divisor in zip(scales, tables[name], strict=True)]
        for name in _LONGROPE_TABLES.values()
    )
    longest, original = file.count(f"{family}.context_length"), original_length(file, family)
    attention *= magnitude
    settings = _longrope(short, long, attention, original)
    default = math.sqrt(1 + max(0.0, math.log(longest / original)) / math.log(max(2, original)))
    if abs(attention - default) <= 1e-6 * default:
        del settings["attention_factor"]
    return settings


def _longrope(
    short: list[float], long: list[float], attention: float, original: int
) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "attention_factor": shortest_decimal(attention),
        "original_max_position_embeddings": original,
    }


def _with_temperature(
    file: GgufFile, family: str, settings: dict[str, Any] | None
) -> dict[str, Any] | None:
    """Add Ministral 3's growth of queries with their position, if the file has it."""
    if not has_temperature(file, family):
        return settings
    beta = file.number("mistral3.attention.temperature_scale")
    return {
        **(settings or {"rope_type": "default"}),
        "original_max_position_embeddings": original_length(file, family),
        "llama_4_scaling_beta": shortest_decimal(beta),
    }


def shortest_decimal(value: float) -> float:
    """Return the short decimal that a float32 stands for: 1e-05, not 9.999999747378752e-06."""
    return float(f"{value:.7g}")

"""Translation of a GGUF file's RoPE fields and tables to the `rope_scaling` of config.json.

llama.cpp computes each pair's frequency from four things: `rope.scaling.type`, a factor, a table of
divisors among the tensors, and `rope.scaling.attn_factor`, which multiplies what is rotated. Where
`config.json` has a kind for a file's combination, the config names that kind; any other combination
becomes longrope, which has a divisor for each pair and an attention factor.
"""

import math
from collections.abc import Sequence
from typing import Any

from kvkeep.errors import BadModelFile, UnsupportedModel
from kvkeep.models.gguf.file import GgufFile
from kvkeep.models.spec.rope import rope_spec

_FREQS = "rope_freqs.weight"
_TWO = {kind: f"rope_factors_{kind}.weight" for kind in ("short", "long")}
_UNIT = (0.0, 1.0)  # of a factor: 0 stands for 1
# In these llama.cpp scales local layers even where the type says "none".
_LOCAL_SCALED = ("gemma2", "gpt-oss")
_ALWAYS_TWO = "phi3"  # has its two tables whatever the type says


def rope_scaling(file: GgufFile, family: str, rotary_dim: int) -> dict[str, Any] | None:
    """The `rope_scaling` of a config; None where nothing is scaled.

    rotary_dim: numbers of a head that are rotated.

    Raises UnsupportedModel for settings that no config can say, BadModelFile for wrong ones.
    """
    settings, attention = _settings(file, family), attention_factor(file, family)
    tables = _tables(file, family, rotary_dim)
    found: dict[str, Any] | None
    if len(tables) == 2:
        found = _two_lengths(file, family, settings, tables, attention)
    else:
        divisors = tables.get(_FREQS, [1.0] * (rotary_dim // 2))
        found = _one_table(file, family, settings, divisors, attention)
    return _with_temperature(file, family, found)


def attention_factor(file: GgufFile, family: str) -> float:
    """The factor on cosine and sine from `rope.scaling.attn_factor`. Raises BadModelFile."""
    factor = file.number(f"{family}.rope.scaling.attn_factor", 1.0)
    if factor <= 0:
        raise BadModelFile(
            f"{file.path}: {family}.rope.scaling.attn_factor must be above 0, found {factor}; "
            "fetch it again"
        )
    return factor


def unscaled_longrope(rotary_dim: int, attention: float, longest: int) -> dict[str, Any]:
    """Settings that scale no frequency, and multiply cosine and sine."""
    divisors = [1.0] * (rotary_dim // 2)
    return _longrope(divisors, divisors, attention, longest)


def linear_factor(file: GgufFile, family: str) -> float:
    """The factor of a family that can be scaled linearly and in no other way.

    Raises UnsupportedModel for any other way, BadModelFile.
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
    """The length of a text before RoPE was extended: that of all texts where none is given."""
    longest = file.count(f"{family}.context_length")
    return file.whole(f"{family}.rope.scaling.original_context_length", 0) or longest


def has_temperature(file: GgufFile, family: str) -> bool:
    """Whether queries grow with their place in a text, as those of Ministral 3."""
    return family == "mistral3" and file.number("mistral3.attention.temperature_scale", 0.0) != 0


def _settings(file: GgufFile, family: str) -> dict[str, Any] | None:
    """What the type and the factor say, tables and attn_factor left out."""
    prefix = f"{family}.rope.scaling"
    kind = file.text(f"{prefix}.type", "linear")
    old = file.number(f"{family}.rope.scale_linear", 1.0)  # the factor's name of before 2024
    said = file.number(f"{prefix}.factor", old)
    factor = 1.0 if said == 0 else shortest(said)
    if factor < 0:
        raise BadModelFile(
            f"{file.path}: {prefix}.factor must be above 0, found {factor}; fetch it again"
        )
    if kind == "none":
        if factor != 1 and family in _LOCAL_SCALED:
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
            scaling[name] = shortest(file.number(f"{prefix}.{key}"))
    if file.has(f"{prefix}.original_context_length"):
        scaling["original_max_position_embeddings"] = original_length(file, family)
    said = file.number(f"{prefix}.yarn_attn_factor", 1.0)
    if said not in _UNIT:
        scaling["attention_factor"] = shortest(said)
    weight = file.number(f"{prefix}.yarn_log_multiplier", 0.0)
    if family == "mistral3" and weight:
        scaling |= {"mscale": 1.0, "mscale_all_dim": shortest(weight)}
    unread = {"yarn_ext_factor": file.number(f"{prefix}.yarn_ext_factor", 1.0)}
    if family != "mistral3":
        unread["yarn_log_multiplier"] = weight
    for key, value in unread.items():
        if value not in _UNIT:
            raise UnsupportedModel(
                f"the GGUF field {prefix}.{key} ({value}) is not supported; use the model's "
                "safetensors folder"
            )
    if family == "gpt-oss":  # no file says it, and all are the same
        scaling["truncate"] = False
    return scaling


def _tables(file: GgufFile, family: str, rotary_dim: int) -> dict[str, list[float]]:
    """The divisors that are in effect: rope_freqs.weight, or both tables of longrope."""
    longrope = file.text(f"{family}.rope.scaling.type", "linear") == "longrope"
    names = list(_TWO.values()) if family == _ALWAYS_TWO or longrope else [_FREQS]
    there = [name for name in (_FREQS, *_TWO.values()) if name in file.tensors]
    if there and there != names:
        raise UnsupportedModel(
            f"{file.path} has {' and '.join(there)} where its {family}.rope.scaling.type asks for "
            f"{' and '.join(names)}; use the model's safetensors folder"
        )
    return {name: _divisors(file, name, rotary_dim) for name in there}


def _divisors(file: GgufFile, name: str, rotary_dim: int) -> list[float]:
    """What each pair's frequency is divided by."""
    divisors = file.tensors[name].unpack().reshape(-1).tolist()
    if len(divisors) != rotary_dim // 2 or not all(0 < each < math.inf for each in divisors):
        raise BadModelFile(
            f"{file.path}: {name} must be a positive number for each of {rotary_dim // 2} pairs "
            "that are rotated; fetch it again"
        )
    return divisors


def _llama3(file: GgufFile, family: str, stored: list[float]) -> dict[str, Any] | None:
    """The settings whose divisors are those of `rope_freqs.weight`; None if they are not Llama 3's.

    GGUF stores what each frequency is divided by, not the settings: only the factor is in the
    numbers, as the largest. The others are the same in every Llama 3.1, 3.2 and 3.3.
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
    alike = all(
        abs(ours - theirs) <= 1e-3 * ours for ours, theirs in zip(divisors, stored, strict=True)
    )
    return settings if alike else None


def _one_table(
    file: GgufFile,
    family: str,
    settings: dict[str, Any] | None,
    divisors: Sequence[float],
    attention: float,
) -> dict[str, Any] | None:
    """A table of divisors on top of linear or yarn settings, and a factor on what is rotated."""
    plain_table = all(each == 1 for each in divisors)
    is_yarn = settings is not None and settings["rope_type"] == "yarn"
    as_yarn = is_yarn and family != _ALWAYS_TWO  # whose config calls longrope yarn
    if plain_table and attention == 1 and (as_yarn or not is_yarn):
        return settings
    # Llama 3's settings have a length of their own, where a temperature needs the file's.
    if settings is None and attention == 1 and not has_temperature(file, family):
        llama3 = _llama3(file, family, list(divisors))
        if llama3 is not None:
            return llama3
    scales, magnitude = _scales(file, family, settings, 2 * len(divisors))
    if settings and plain_table and as_yarn:
        return {**settings, "attention_factor": shortest(magnitude * attention)}
    whole = [shortest(scale * each) for scale, each in zip(scales, divisors, strict=True)]
    longest = file.count(f"{family}.context_length")
    return _longrope(whole, whole, magnitude * attention, longest)


def _scales(
    file: GgufFile, family: str, settings: dict[str, Any] | None, rotary_dim: int
) -> tuple[list[float], float]:
    """By what settings divide each pair's frequency, and what they multiply cosine and sine by."""
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


def _two_lengths(
    file: GgufFile,
    family: str,
    settings: dict[str, Any] | None,
    tables: dict[str, list[float]],
    attention: float,
) -> dict[str, Any]:
    """Tables for short and for long texts (LongRoPE), of Phi-3 and of files whose type says so."""
    scales, magnitude = _scales(file, family, settings, 2 * len(tables[_TWO["short"]]))
    short, long = (
        [shortest(scale * each) for scale, each in zip(scales, tables[name], strict=True)]
        for name in _TWO.values()
    )
    longest, original = file.count(f"{family}.context_length"), original_length(file, family)
    attention *= magnitude
    found = _longrope(short, long, attention, original)
    usual = math.sqrt(1 + max(0.0, math.log(longest / original)) / math.log(max(2, original)))
    if abs(attention - usual) <= 1e-6 * usual:  # what config.json does not say, either
        del found["attention_factor"]
    return found


def _longrope(
    short: list[float], long: list[float], attention: float, original: int
) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "attention_factor": shortest(attention),
        "original_max_position_embeddings": original,
    }


def _with_temperature(
    file: GgufFile, family: str, settings: dict[str, Any] | None
) -> dict[str, Any] | None:
    """Ministral 3's factor on queries that are far in a text, whatever else scales them."""
    if not has_temperature(file, family):
        return settings
    beta = file.number("mistral3.attention.temperature_scale")
    length = {"original_max_position_embeddings": original_length(file, family)}
    kind = settings or {"rope_type": "default"}
    return {**kind, **length, "llama_4_scaling_beta": shortest(beta)}


def shortest(value: float) -> float:
    """The short decimal that a float32 stands for: 1e-05, not 9.999999747378752e-06."""
    return float(f"{value:.7g}")

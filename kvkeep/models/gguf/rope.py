"""Translation of a GGUF file's RoPE fields and tables to the `rope_scaling` of config.json.

llama.cpp computes each pair's rotation from four things: `rope.scaling.type`, a factor, a table of
frequency divisors among the tensors, and `rope.scaling.attn_factor`, which multiplies cosine and
sine. If config.json has a kind for a file's combination, that kind is used. Every other combination
becomes longrope, which has a divisor for each pair and an attention factor.
"""

import math
from typing import Any

from kvkeep.errors import BadModelFile, UnsupportedModel
from kvkeep.models.gguf.file import GgufFile, shortest_decimal
from kvkeep.models.spec.rope import rope_spec

_ONE_TABLE = ["rope_freqs.weight"]
_TWO_TABLES = ["rope_factors_short.weight", "rope_factors_long.weight"]
_SCALING = "{arch}.rope.scaling."
_UNIT = (0.0, 1.0)  # values of a factor that scale nothing: 0 stands for 1
# In these, llama.cpp scales local layers even if the type is "none".
_LOCAL_ALWAYS_SCALED = ("gemma2", "gpt-oss")
_PHI3 = "phi3"  # has two tables whatever the type, and its config calls longrope "yarn"


def rope_scaling(file: GgufFile, rotary_dim: int) -> dict[str, Any] | None:
    """Return the `rope_scaling` of a config; None if nothing is scaled.

    rotary_dim: how many dimensions of a head are rotated.

    Raises UnsupportedModel for settings that no config can express, BadModelFile for wrong ones.
    """
    scaling = _frequency_scaling(file, rotary_dim)
    if not has_temperature(file):
        return scaling
    return {
        **(scaling or {"rope_type": "default"}),
        "original_max_position_embeddings": original_length(file),
        "llama_4_scaling_beta": file.decimal("mistral3.attention.temperature_scale"),
    }


def attention_factor(file: GgufFile) -> float:
    """Return the factor on cosine and sine, `rope.scaling.attn_factor`. Raises BadModelFile."""
    return _positive(file, f"{_SCALING}attn_factor", 1.0)


def unscaled_longrope(rotary_dim: int, attention: float, longest: int) -> dict[str, Any]:
    """Return settings that multiply cosine and sine, and scale no frequency."""
    divisors = [1.0] * (rotary_dim // 2)
    return _longrope([divisors, divisors], attention, longest)


def linear_factor(file: GgufFile) -> float:
    """Return the factor of linear scaling; 1 without scaling.

    Raises UnsupportedModel for any other scaling, BadModelFile.
    """
    settings, attention = _settings(file), attention_factor(file)
    if attention != 1 or (settings and settings["rope_type"] == "yarn"):
        key = "type" if attention == 1 else "attn_factor"
        raise file.unsupported(f"scales RoPE by {file.full_key(_SCALING)}{key}")
    return float(settings["factor"]) if settings else 1.0


def original_length(file: GgufFile) -> int:
    """Return the trained length before RoPE was extended; without one, the context length."""
    longest = file.count("{arch}.context_length")
    return file.non_negative(f"{_SCALING}original_context_length", 0) or longest


def has_temperature(file: GgufFile) -> bool:
    """Whether queries grow with their position, as in Ministral 3."""
    key = "mistral3.attention.temperature_scale"
    return file.architecture == "mistral3" and file.number(key, 0.0) != 0


def _frequency_scaling(file: GgufFile, rotary_dim: int) -> dict[str, Any] | None:
    """Return the scaling by type, factor, tables and attn_factor together."""
    settings, attention = _settings(file), attention_factor(file)
    tables = _tables(file, rotary_dim)
    is_yarn = settings is not None and settings["rope_type"] == "yarn"
    as_yarn = is_yarn and file.architecture != _PHI3
    is_plain = all(divisor == 1 for table in tables for divisor in table) and len(tables) < 2
    if is_plain and attention == 1 and as_yarn == is_yarn:
        return settings
    # llama3 settings state another original length than the one that a temperature needs.
    if settings is None and attention == 1 and not has_temperature(file) and len(tables) == 1:
        llama3 = _llama3(file, tables[0])
        if llama3 is not None:
            return llama3
    scales, magnitude = _scales(file, settings, rotary_dim)
    attention *= magnitude
    if settings and is_plain and as_yarn:
        return {**settings, "attention_factor": shortest_decimal(attention)}
    longest = file.count("{arch}.context_length")
    if len(tables) < 2:
        table = _products(scales, tables[0] if tables else [1.0] * len(scales))
        return _longrope([table, table], attention, longest)
    original = original_length(file)
    scaling = _longrope([_products(scales, table) for table in tables], attention, original)
    default = math.sqrt(1 + max(0.0, math.log(longest / original)) / math.log(max(2, original)))
    if abs(attention - default) <= 1e-6 * default:
        del scaling["attention_factor"]
    return scaling


def _settings(file: GgufFile) -> dict[str, Any] | None:
    """Return the scaling by type and factor, without tables and attn_factor; None for none."""
    scaling_type = _scaling_type(file)
    old_factor = file.number("{arch}.rope.scale_linear", 1.0)  # its name before 2024
    factor = file.decimal(f"{_SCALING}factor", old_factor) or 1.0
    if factor < 0:
        raise file.invalid(f"{_SCALING}factor", "above 0")
    if scaling_type == "none":
        if factor != 1 and file.architecture in _LOCAL_ALWAYS_SCALED:
            raise file.unsupported(
                f"has rope.scaling.factor {factor} with rope.scaling.type 'none', by which "
                "llama.cpp scales local layers alone"
            )
        return None
    if scaling_type == "yarn":
        return _yarn(file, factor)
    if scaling_type not in ("linear", "longrope"):
        raise UnsupportedModel(
            f"the GGUF RoPE scaling {scaling_type!r} (rope.scaling.type) is not supported; "
            "supported: none, linear, yarn, longrope, and Llama 3's rope_freqs.weight"
        )
    return None if factor == 1 else {"rope_type": "linear", "factor": factor}


def _scaling_type(file: GgufFile) -> str:
    return file.text(f"{_SCALING}type", "linear")


def _yarn(file: GgufFile, factor: float) -> dict[str, Any]:
    scaling: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
    for name in ("beta_fast", "beta_slow"):
        if file.has(f"{_SCALING}yarn_{name}"):
            scaling[name] = file.decimal(f"{_SCALING}yarn_{name}")
    if file.has(f"{_SCALING}original_context_length"):
        scaling["original_max_position_embeddings"] = original_length(file)
    attention = file.number(f"{_SCALING}yarn_attn_factor", 1.0)
    if attention not in _UNIT:
        scaling["attention_factor"] = shortest_decimal(attention)
    unsupported = ["yarn_ext_factor"]
    log_multiplier = file.number(f"{_SCALING}yarn_log_multiplier", 0.0)
    if file.architecture != "mistral3":
        unsupported.append("yarn_log_multiplier")
    elif log_multiplier:
        scaling |= {"mscale": 1.0, "mscale_all_dim": shortest_decimal(log_multiplier)}
    for key in unsupported:
        if (value := file.number(_SCALING + key, 1.0)) not in _UNIT:
            raise file.unsupported(f"has rope.scaling.{key} {value}")
    if file.architecture == "gpt-oss":  # no file states it, and all models have it
        scaling["truncate"] = False
    return scaling


def _tables(file: GgufFile, rotary_dim: int) -> list[list[float]]:
    """Return the tables of frequency divisors: none, one, or longrope's short and long one."""
    has_two = file.architecture == _PHI3 or _scaling_type(file) == "longrope"
    expected = _TWO_TABLES if has_two else _ONE_TABLE
    present = [name for name in _ONE_TABLE + _TWO_TABLES if name in file.tensors]
    if present and present != expected:
        raise file.unsupported(
            f"has {' and '.join(present)} where rope.scaling.type asks for {' and '.join(expected)}"
        )
    return [_divisors(file, name, rotary_dim // 2) for name in present]


def _divisors(file: GgufFile, name: str, pairs: int) -> list[float]:
    divisors: list[float] = file.tensors[name].unpack().reshape(-1).tolist()
    if len(divisors) != pairs or not all(0 < divisor < math.inf for divisor in divisors):
        raise BadModelFile(
            f"{file.path}: {name} must be a positive number for each of {pairs} pairs "
            "that are rotated; fetch it again"
        )
    return divisors


def _llama3(file: GgufFile, divisors: list[float]) -> dict[str, Any] | None:
    """Return the llama3 settings that give these divisors; None if no such settings do.

    GGUF stores the divisors instead of the settings. The factor is the largest divisor; the other
    settings are the same in every Llama 3.1, 3.2 and 3.3.
    """
    settings = {
        "rope_type": "llama3",
        "factor": round(max(divisors), 3),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    expected, _ = _scales(file, settings, 2 * len(divisors))
    is_llama3 = all(
        abs(scale - divisor) <= 1e-3 * scale
        for scale, divisor in zip(expected, divisors, strict=True)
    )
    return settings if is_llama3 else None


def _scales(
    file: GgufFile, settings: dict[str, Any] | None, rotary_dim: int
) -> tuple[list[float], float]:
    """Return each pair's divisor under these settings, and their factor on cosine and sine."""
    theta = _positive(file, "{arch}.rope.freq_base", 10_000.0)
    longest = file.count("{arch}.context_length")
    scaled = rope_spec(settings or {}, theta, rotary_dim, longest)
    plain = rope_spec({}, theta, rotary_dim, longest)
    frequencies = zip(plain.inverse_frequencies, scaled.inverse_frequencies, strict=True)
    return [before / after for before, after in frequencies], scaled.attention_scaling


def _products(scales: list[float], divisors: list[float]) -> list[float]:
    return [shortest_decimal(a * b) for a, b in zip(scales, divisors, strict=True)]


def _longrope(tables: list[list[float]], attention: float, original: int) -> dict[str, Any]:
    """Return settings with the divisors for short and for long texts."""
    return {
        "rope_type": "longrope",
        "short_factor": tables[0],
        "long_factor": tables[1],
        "attention_factor": shortest_decimal(attention),
        "original_max_position_embeddings": original,
    }


def _positive(file: GgufFile, key: str, default: float) -> float:
    value = file.number(key, default)
    if value <= 0:
        raise file.invalid(key, "above 0")
    return value

"""Translation of a GGUF file's RoPE fields and tables to the `rope_scaling` of config.json.

llama.cpp computes each pair's rotation from `rope.scaling.type`, a factor, a table of frequency
divisors among the tensors, and `rope.scaling.attn_factor`, which multiplies cosine and sine. A
combination for which config.json has no rope_type becomes longrope, which has a divisor for each
pair and an attention factor.
"""

import math
from typing import Any

from kvkeep.errors import BadModelFile, UnsupportedModel
from kvkeep.models.gguf.file import GgufFile, shortest_decimal
from kvkeep.models.spec.rope import rope_spec

_ONE_TABLE_NAMES = ["rope_freqs.weight"]
_TWO_TABLE_NAMES = ["rope_factors_short.weight", "rope_factors_long.weight"]
_SCALING_PREFIX = "{arch}.rope.scaling."
_NEUTRAL_FACTORS = (0.0, 1.0)  # values of a factor that scale nothing: 0 stands for 1
# In these architectures, llama.cpp scales local layers even if the type is "none".
_LOCAL_ALWAYS_SCALED_ARCHS = ("gemma2", "gpt-oss")
_PHI3 = "phi3"  # has two tables whatever the type, and its config calls longrope "yarn"


def rope_scaling(file: GgufFile, rotary_dim: int) -> dict[str, Any] | None:
    """Return the `rope_scaling` of config.json. rotary_dim: rotated dimensions of a head."""
    scaling = _rope_scaling_without_queries(file, rotary_dim)
    if not scales_queries(file):
        return scaling
    return {
        **(scaling or {"rope_type": "default"}),
        "original_max_position_embeddings": original_length(file),
        "llama_4_scaling_beta": file.rounded_number("mistral3.attention.temperature_scale"),
    }


def attention_factor(file: GgufFile) -> float:
    """Return `rope.scaling.attn_factor`, which multiplies cosine and sine; 1 by default."""
    return _positive_number(file, f"{_SCALING_PREFIX}attn_factor", 1.0)


def unscaled_longrope(rotary_dim: int, attn_factor: float, context_length: int) -> dict[str, Any]:
    """Return a `rope_scaling` that multiplies cosine and sine, and changes no frequency."""
    divisors = [1.0] * (rotary_dim // 2)
    return _longrope([divisors, divisors], attn_factor, context_length)


def linear_factor(file: GgufFile) -> float:
    """Return the factor of linear scaling, or 1. Raises UnsupportedModel for another scaling."""
    scaling, attn_factor = _scaling_by_type(file), attention_factor(file)
    if attn_factor != 1 or (scaling and scaling["rope_type"] == "yarn"):
        key = "type" if attn_factor == 1 else "attn_factor"
        raise file.unsupported_error(f"scales RoPE by {file.full_key(_SCALING_PREFIX)}{key}")
    return float(scaling["factor"]) if scaling else 1.0


def original_length(file: GgufFile) -> int:
    """Return the trained length before RoPE was extended, or else the context length."""
    context_length = file.positive_int("{arch}.context_length")
    return file.non_negative_int(f"{_SCALING_PREFIX}original_context_length", 0) or context_length


def scales_queries(file: GgufFile) -> bool:
    """Whether queries are multiplied by a factor that grows with their position (Ministral 3)."""
    key = "mistral3.attention.temperature_scale"
    return file.arch == "mistral3" and file.number(key, 0.0) != 0


def _rope_scaling_without_queries(file: GgufFile, rotary_dim: int) -> dict[str, Any] | None:
    """Return the scaling of rotations: by type, factor, tables and attn_factor together."""
    scaling, attn_factor = _scaling_by_type(file), attention_factor(file)
    tables = _divisor_tables(file, rotary_dim)
    has_divisors = len(tables) == 2 or any(divisor != 1 for table in tables for divisor in table)
    is_yarn = scaling is not None and scaling["rope_type"] == "yarn"
    needs_longrope = has_divisors or (is_yarn and file.arch == _PHI3)
    if not needs_longrope and attn_factor == 1:
        return scaling
    # llama3 states another original length than the one that a temperature needs.
    if scaling is None and attn_factor == 1 and not scales_queries(file) and len(tables) == 1:
        llama3 = _llama3_scaling(file, tables[0])
        if llama3 is not None:
            return llama3
    scaling_divisors, scaling_attn_factor = _divisors_and_factor(file, scaling, rotary_dim)
    attn_factor *= scaling_attn_factor
    if scaling and is_yarn and not needs_longrope:
        return {**scaling, "attention_factor": shortest_decimal(attn_factor)}
    context_length = file.positive_int("{arch}.context_length")
    if len(tables) < 2:  # the same divisors for texts of any length
        table = tables[0] if tables else [1.0] * len(scaling_divisors)
        divisors = _products(scaling_divisors, table)
        return _longrope([divisors, divisors], attn_factor, context_length)
    trained_length = original_length(file)
    table_divisors = [_products(scaling_divisors, table) for table in tables]
    longrope = _longrope(table_divisors, attn_factor, trained_length)
    # The default of transformers for longrope is not stated.
    log_extension = max(0.0, math.log(context_length / trained_length))
    default_factor = math.sqrt(1 + log_extension / math.log(max(2, trained_length)))
    if abs(attn_factor - default_factor) <= 1e-6 * default_factor:
        del longrope["attention_factor"]
    return longrope


def _scaling_by_type(file: GgufFile) -> dict[str, Any] | None:
    """Return the `rope_scaling` by type and factor only, without tables and attn_factor."""
    scaling_type = _scaling_type(file)
    legacy_factor = file.number("{arch}.rope.scale_linear", 1.0)  # its name before 2024
    factor = file.rounded_number(f"{_SCALING_PREFIX}factor", legacy_factor) or 1.0
    if factor < 0:
        raise file.invalid_error(f"{_SCALING_PREFIX}factor", "above 0")
    if scaling_type == "none":
        if factor != 1 and file.arch in _LOCAL_ALWAYS_SCALED_ARCHS:
            raise file.unsupported_error(
                f"has rope.scaling.factor {factor} with rope.scaling.type 'none', which llama.cpp "
                "applies to local layers only"
            )
        return None
    if scaling_type == "yarn":
        return _yarn_scaling(file, factor)
    if scaling_type not in ("linear", "longrope"):
        raise UnsupportedModel(
            f"the GGUF RoPE scaling {scaling_type!r} (rope.scaling.type) is not supported; "
            "supported: none, linear, yarn, longrope, and Llama 3's rope_freqs.weight"
        )
    return None if factor == 1 else {"rope_type": "linear", "factor": factor}


def _scaling_type(file: GgufFile) -> str:
    return file.string(f"{_SCALING_PREFIX}type", "linear")


def _yarn_scaling(file: GgufFile, factor: float) -> dict[str, Any]:
    """Return the settings of YaRN. factor: by how much it extends the context length."""
    scaling: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
    for name in ("beta_fast", "beta_slow"):
        if file.has(f"{_SCALING_PREFIX}yarn_{name}"):
            scaling[name] = file.rounded_number(f"{_SCALING_PREFIX}yarn_{name}")
    if file.has(f"{_SCALING_PREFIX}original_context_length"):
        scaling["original_max_position_embeddings"] = original_length(file)
    attn_factor = file.number(f"{_SCALING_PREFIX}yarn_attn_factor", 1.0)
    if attn_factor not in _NEUTRAL_FACTORS:
        scaling["attention_factor"] = shortest_decimal(attn_factor)
    unsupported_keys = ["yarn_ext_factor"]
    log_multiplier = file.number(f"{_SCALING_PREFIX}yarn_log_multiplier", 0.0)
    if file.arch != "mistral3":
        unsupported_keys.append("yarn_log_multiplier")
    elif log_multiplier:
        scaling |= {"mscale": 1.0, "mscale_all_dim": shortest_decimal(log_multiplier)}
    for key in unsupported_keys:
        if (value := file.number(_SCALING_PREFIX + key, 1.0)) not in _NEUTRAL_FACTORS:
            raise file.unsupported_error(f"has rope.scaling.{key} {value}")
    if file.arch == "gpt-oss":  # no file states it, and all models have it
        scaling["truncate"] = False
    return scaling


def _divisor_tables(file: GgufFile, rotary_dim: int) -> list[list[float]]:
    """Return the tables of frequency divisors: none, one, or longrope's short and long."""
    has_two = file.arch == _PHI3 or _scaling_type(file) == "longrope"
    expected = _TWO_TABLE_NAMES if has_two else _ONE_TABLE_NAMES
    present = [name for name in _ONE_TABLE_NAMES + _TWO_TABLE_NAMES if name in file.tensors]
    if present and present != expected:
        raise file.unsupported_error(
            f"has {' and '.join(present)}, but rope.scaling.type needs {' and '.join(expected)}"
        )
    return [_divisor_table(file, name, rotary_dim // 2) for name in present]


def _divisor_table(file: GgufFile, name: str, num_pairs: int) -> list[float]:
    divisors: list[float] = file.tensors[name].unpack().reshape(-1).tolist()
    if len(divisors) != num_pairs or not all(0 < divisor < math.inf for divisor in divisors):
        raise BadModelFile(
            f"{file.path}: {name} must be a positive number for each of the {num_pairs} rotated "
            "pairs; fetch it again"
        )
    return divisors


def _llama3_scaling(file: GgufFile, divisors: list[float]) -> dict[str, Any] | None:
    """Return the llama3 scaling that gives these divisors, or None.

    The factor is the largest divisor; the rest is the same in every Llama 3.1, 3.2 and 3.3.
    """
    scaling = {
        "rope_type": "llama3",
        "factor": round(max(divisors), 3),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    expected_divisors, _ = _divisors_and_factor(file, scaling, 2 * len(divisors))
    is_llama3 = all(
        abs(expected - actual) <= 1e-3 * expected
        for expected, actual in zip(expected_divisors, divisors, strict=True)
    )
    return scaling if is_llama3 else None


def _divisors_and_factor(
    file: GgufFile, scaling: dict[str, Any] | None, rotary_dim: int
) -> tuple[list[float], float]:
    """Return each pair's frequency divisor under a scaling, and its factor on cosine and sine."""
    theta = _positive_number(file, "{arch}.rope.freq_base", 10_000.0)
    context_length = file.positive_int("{arch}.context_length")
    scaled = rope_spec(scaling or {}, theta, rotary_dim, context_length)
    unscaled = rope_spec({}, theta, rotary_dim, context_length)
    frequencies = zip(unscaled.inverse_frequencies, scaled.inverse_frequencies, strict=True)
    return [base / frequency for base, frequency in frequencies], scaled.attention_scaling


def _products(a: list[float], b: list[float]) -> list[float]:
    return [shortest_decimal(x * y) for x, y in zip(a, b, strict=True)]


def _longrope(tables: list[list[float]], attn_factor: float, length: int) -> dict[str, Any]:
    """Return a longrope scaling. tables: divisors for texts up to `length`, and for longer ones."""
    return {
        "rope_type": "longrope",
        "short_factor": tables[0],
        "long_factor": tables[1],
        "attention_factor": shortest_decimal(attn_factor),
        "original_max_position_embeddings": length,
    }


def _positive_number(file: GgufFile, key: str, default: float) -> float:
    value = file.number(key, default)
    if value <= 0:
        raise file.invalid_error(key, "above 0")
    return value

"""What a GGUF file says of RoPE, as `config.json` says it."""

import math
from typing import Any

from kvkeep.errors import UnsupportedModel
from kvkeep.models.frequencies import rope_spec
from kvkeep.models.gguf_file import GgufFile


def rope_scaling(file: GgufFile, family: str, head_dim: int) -> dict[str, Any] | None:
    if family in ("phi3", "gemma4"):
        return None  # see `two_lengths`, and `gguf_gemma.py`
    kind = file.text(f"{family}.rope.scaling.type", "none")
    factor = file.number(
        f"{family}.rope.scaling.factor", file.number(f"{family}.rope.scale_linear", 1.0)
    )
    if "rope_freqs.weight" in file.tensors:
        return _llama3_scaling(file, family, head_dim)
    if kind == "none" and factor in (0.0, 1.0):
        return None
    if kind == "linear" or kind == "none":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise UnsupportedModel(
            f"the GGUF RoPE scaling {kind!r} is not supported; supported: none, linear, yarn, and "
            "Llama 3's rope_freqs.weight"
        )
    scaling: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
    for key, name in (
        ("original_context_length", "original_max_position_embeddings"),
        ("yarn_beta_fast", "beta_fast"),
        ("yarn_beta_slow", "beta_slow"),
    ):
        if f"{family}.rope.scaling.{key}" in file.metadata:
            scaling[name] = file.number(f"{family}.rope.scaling.{key}")
    magnitude = "yarn_log_multiplier"
    said = file.number(f"{family}.rope.scaling.yarn_attn_factor", 1.0)
    if said not in (0.0, 1.0):
        scaling["attention_factor"] = shortest(said)
    for key in ("attn_factor", "yarn_ext_factor", magnitude):
        if file.metadata.get(f"{family}.rope.scaling.{key}", 1.0) not in (0.0, 1.0):
            raise UnsupportedModel(
                f"the GGUF field {family}.rope.scaling.{key} is not supported; use the model's "
                "safetensors folder"
            )
    if family == "gpt-oss":  # no file says it, and all are the same
        scaling["truncate"] = False
    if family == "mistral3":
        whole = shortest(file.number(f"mistral3.rope.scaling.{magnitude}", 0.0))
        scaling |= {"mscale": whole, "mscale_all_dim": whole}
        beta = file.number("mistral3.attention.temperature_scale", 0.0)
        scaling["llama_4_scaling_beta"] = shortest(beta)
    return scaling


def _llama3_scaling(file: GgufFile, family: str, head_dim: int) -> dict[str, Any] | None:
    """The settings whose divisors are those of `rope_freqs.weight`, if they are Llama 3's.

    GGUF stores what each frequency is divided by, not the settings: only the factor is in the
    numbers, as the largest. The others are the same in every Llama 3.1, 3.2 and 3.3.
    """
    stored = file.tensors["rope_freqs.weight"].unpack().tolist()
    if max(stored) == min(stored) == 1.0:
        return None
    settings = {
        "rope_type": "llama3",
        "factor": round(max(stored), 3),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    theta = file.number(f"{family}.rope.freq_base", 10_000.0)
    plain = rope_spec({}, theta, head_dim, 8192).inverse_frequencies
    scaled = rope_spec(settings, theta, head_dim, 8192).inverse_frequencies
    divisors = [before / after for before, after in zip(plain, scaled, strict=True)]
    if len(divisors) != len(stored) or any(
        abs(ours - theirs) > 1e-3 * ours for ours, theirs in zip(divisors, stored, strict=True)
    ):
        raise UnsupportedModel(
            f"rope_freqs.weight in {file.path} is not Llama 3's scaling of RoPE; use the model's "
            "safetensors folder, whose config.json states its kind"
        )
    return settings


def two_lengths(file: GgufFile) -> dict[str, Any]:
    """Of a Phi-3 with tables for short and for long texts: the length of the short ones, and both.

    GGUF has the divisors as tensors.
    """
    longest = file.count("phi3.context_length")
    original = file.count("phi3.rope.scaling.original_context_length", longest)
    tables = {kind: f"rope_factors_{kind}.weight" for kind in ("short", "long")}
    if tables["short"] not in file.tensors:
        return {"original_max_position_embeddings": original}
    scaling: dict[str, Any] = {"type": "longrope"}
    for kind, name in tables.items():
        if name in file.tensors:
            divisors = file.tensors[name].unpack().reshape(-1).tolist()
            scaling[f"{kind}_factor"] = [shortest(each) for each in divisors]
    usual = math.sqrt(1 + max(0.0, math.log(longest / original)) / math.log(max(2, original)))
    factor = file.number("phi3.rope.scaling.attn_factor", usual)
    if abs(factor - usual) > 1e-6 * usual:  # else what config.json does not say, either
        scaling["attention_factor"] = shortest(factor)
    return {"original_max_position_embeddings": original, "rope_scaling": scaling}


def shortest(value: float) -> float:
    """The short decimal that a float32 stands for: 1e-05, not 9.999999747378752e-06."""
    return float(f"{value:.7g}")

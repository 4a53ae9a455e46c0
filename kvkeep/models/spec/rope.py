"""RoPE settings of a config, resolved to one fixed table of frequencies in float64.

Also the length in tokens that a model was trained or extended to, which these settings decide.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvkeep.errors import BadModelFile, UnsupportedModel
from kvkeep.models.spec.config_fields import MAX_INTEGER, ConfigFields, is_positive_number
from kvkeep.models.spec.families import FAMILIES
from kvkeep.models.spec.family import Family
from kvkeep.models.spec.model_spec import RopeSpec

_SUPPORTED_TYPES = ("default", "linear", "llama3", "yarn", "longrope")
_LAYER_TYPES = ("full_attention", "sliding_attention")
_ORIGINAL_LENGTH = "original_max_position_embeddings"


def rope_fields(
    config: ConfigFields, family: Family, head_dim: int, local_head_dim: int
) -> tuple[dict[str, RopeSpec | None], int]:
    """Return rope and local_rope of a ModelSpec, and the length that it was trained or extended to.

    transformers 5 has an object of settings for each kind of layer; in transformers 4 the base of
    local layers was a field of its own, and they were not scaled. Raises BadModelFile,
    UnsupportedModel.
    """
    if not family.separate_local_rope:
        rope, trained_length = _rope_and_trained_length(config, family, head_dim)
        return {"rope": rope}, trained_length
    stated: Any = config.get("rope_parameters") or config.get("rope_scaling")
    settings = stated or family.default_rope
    local_settings = None
    if isinstance(settings, dict) and any(kind in settings for kind in _LAYER_TYPES):
        settings, local_settings = (settings.get(kind) for kind in _LAYER_TYPES)
    default = {"rope_type": "default"}
    global_config = config.updated({"rope_parameters": settings or default, "rope_scaling": None})
    local_base = config.get("rope_local_base_freq", config.get("rope_theta"))
    local_config = global_config.updated(
        {"rope_parameters": local_settings or default, "rope_theta": local_base}
    )
    rope, trained_length = _rope_and_trained_length(global_config, family, head_dim)
    local_rope, _ = _rope_and_trained_length(local_config, family, local_head_dim)
    return {"rope": rope, "local_rope": None if local_rope == rope else local_rope}, trained_length


def _rope_and_trained_length(
    config: ConfigFields, family: Family, head_dim: int
) -> tuple[RopeSpec, int]:
    """Return the RoPE of a config without separate local settings, and its trained length."""
    stated_length = config.positive_int("max_position_embeddings")
    stated: Any = config.get("rope_scaling") or config.get("rope_parameters")
    stated = stated or dict(family.default_rope)
    if not isinstance(stated, dict) or any(isinstance(x, dict) for x in stated.values()):
        raise UnsupportedModel(
            f"{config.path}: RoPE settings must be one flat object, found {stated!r}; models with "
            "different RoPE in each layer are not supported"
        )
    settings = _normalised_settings(config, stated, family)
    if family.is_gemma4 and settings.get("rope_type") == "proportional":
        return _proportional_rope(settings, head_dim), stated_length
    theta_source = settings if settings.get("rope_theta") is not None else config
    theta = theta_source.positive_float("rope_theta", default=10_000.0)
    rotary_dim = _rotary_dim(config, settings, family, head_dim)
    rope = rope_spec(settings.values, theta, rotary_dim, max_positions=stated_length)
    zeros = (0.0,) * (head_dim // 2 - rotary_dim // 2)
    rope = replace(rope, inverse_frequencies=rope.inverse_frequencies + zeros)
    # longrope's table in use is the one for short texts. With Llama 4's scaling, queries grow with
    # their position beyond the original length.
    if rope.kind == "longrope" or settings.get("llama_4_scaling_beta"):
        original = settings.positive_int(_ORIGINAL_LENGTH, default=stated_length)
        return rope, min(stated_length, original)
    original, factor = settings.get(_ORIGINAL_LENGTH), settings.get("factor")
    if rope.kind == "yarn" and original and factor:
        # Some configs state the length before extension. rope_spec has checked both numbers.
        return rope, max(stated_length, int(min(original * factor, MAX_INTEGER)))
    return rope, stated_length


def _proportional_rope(settings: ConfigFields, head_dim: int) -> RopeSpec:
    """Return Gemma 4's RoPE: the first frequencies of a whole head's table; other pairs have 0."""
    rotary_share = settings.positive_float("partial_rotary_factor", default=1.0)
    num_pairs = int(min(rotary_share, 2.0) * head_dim // 2)  # times 1e308 it would be infinite
    if not 0 < num_pairs <= head_dim // 2:
        raise _no_pairs_error(settings, rotary_share, head_dim)
    scaling: dict[str, Any] = {}
    if settings.get("factor"):
        scaling = {"rope_type": "linear", "factor": settings.get("factor")}
    theta = settings.positive_float("rope_theta", default=10_000.0)
    frequencies = rope_spec(scaling, theta, head_dim, 1).inverse_frequencies
    zeros = (0.0,) * (head_dim // 2 - num_pairs)
    return RopeSpec("proportional", frequencies[:num_pairs] + zeros)


def _normalised_settings(
    config: ConfigFields, stated: Mapping[str, Any], family: Family
) -> ConfigFields:
    """Return stated settings with rope_type and original length where `rope_spec` expects them."""
    settings = ConfigFields(stated, config.path)
    rope_type = settings.get("rope_type") or settings.get("type")
    if rope_type == "mrope" and family.multimodal:  # in text, all three positions are the same
        return settings.updated({"rope_type": "default"})
    in_main_config = config.get(_ORIGINAL_LENGTH) and not family.separate_local_rope
    length_source = config if in_main_config else settings
    # Phi-3's config calls longrope by other names.
    is_phi3 = family is FAMILIES["Phi3ForCausalLM"]
    if rope_type == "longrope" or (rope_type in ("su", "yarn") and is_phi3):
        max_length = config.positive_int("max_position_embeddings")
        original = length_source.positive_int(_ORIGINAL_LENGTH, default=max_length)
        return settings.updated({"rope_type": "longrope", _ORIGINAL_LENGTH: original})
    original = length_source.get(_ORIGINAL_LENGTH)
    return settings if original is None else settings.updated({_ORIGINAL_LENGTH: original})


def _rotary_dim(config: ConfigFields, settings: ConfigFields, family: Family, head_dim: int) -> int:
    """Return how many dimensions of a head are rotated."""
    source = settings if settings.get("partial_rotary_factor") is not None else config
    share = source.positive_float("partial_rotary_factor", family.partial_rotary_factor or 1.0)
    if share == 1:
        return head_dim
    if family.partial_rotary_factor is None:
        raise config.unsupported_error(
            f"RoPE on a part of each head (partial_rotary_factor {share})"
        )
    rotary_dim = int(head_dim * min(share, 1.0))
    if share > 1 or rotary_dim < 2 or rotary_dim % 2:
        raise _no_pairs_error(config, share, head_dim)
    return rotary_dim


def _no_pairs_error(config: ConfigFields, rotary_share: float, head_dim: int) -> BadModelFile:
    return BadModelFile(
        f"{config.path}: partial_rotary_factor {rotary_share} leaves no pairs to rotate in heads "
        f"of {head_dim}; fetch the model again"
    )


def rope_spec(
    settings: Mapping[str, Any], theta: float, rotary_dim: int, max_positions: int
) -> RopeSpec:
    """Return the frequency table for a config's `rope_scaling` or `rope_parameters`.

    theta: base of the geometric series. rotary_dim: how many of a head's dimensions are rotated.
    max_positions: stands in for `original_max_position_embeddings` where that is missing.

    longrope (LongRoPE, arXiv:2402.13753) has two tables. The result is the short one, for texts up
    to `original_max_position_embeddings`.

    Raises UnsupportedModel for kinds whose table changes with the length (dynamic) and for unknown
    ones, BadModelFile if a field is missing.
    """
    rope_type = settings.get("rope_type") or settings.get("type") or "default"
    if rope_type not in _SUPPORTED_TYPES:
        raise UnsupportedModel(
            f"RoPE kind {rope_type!r} is not supported; supported: {', '.join(_SUPPORTED_TYPES)}. "
            "Kinds whose frequencies change with the length (dynamic) do not work with cached "
            "keys: use a model with one of the supported kinds"
        )
    scaling = _RopeScaling(rope_type, settings, theta, rotary_dim, max_positions)
    try:
        spec = RopeSpec(rope_type, tuple(scaling.frequencies()), scaling.attention_scaling())
    except (ArithmeticError, ValueError) as error:
        raise scaling.invalid_error(f"{error}") from error
    table_numbers = (*spec.inverse_frequencies, spec.attention_scaling)
    if not all(math.isfinite(number) and number > 0 for number in table_numbers):
        raise scaling.invalid_error("its frequencies are not positive numbers")
    return spec


@dataclass(frozen=True)
class _RopeScaling:
    """RoPE settings of a supported kind. Methods raise BadModelFile for invalid ones."""

    rope_type: str
    settings: Mapping[str, Any]  # the others as in `rope_spec`
    theta: float
    rotary_dim: int
    max_positions: int

    def frequencies(self) -> list[float]:
        """Return radians per position for each rotated pair, `[rotary_dim / 2]`."""
        rotary_dim = self.rotary_dim
        dimensions = range(0, rotary_dim, 2)
        base_frequencies = [self.theta ** (-dimension / rotary_dim) for dimension in dimensions]
        match self.rope_type:
            case "linear":
                factor = self._number("factor")
                return [frequency / factor for frequency in base_frequencies]
            case "llama3":
                return self._llama3(base_frequencies)
            case "yarn":
                return self._yarn(base_frequencies)
            case "longrope":
                return self._longrope_short(base_frequencies)
        return base_frequencies

    def attention_scaling(self) -> float:
        """Return yarn's or longrope's factor on cosine and sine; 1 for other kinds."""
        if self.rope_type not in ("yarn", "longrope"):
            return 1.0
        if self.settings.get("attention_factor") is not None:
            return self._number("attention_factor")
        factor = self._extension_factor()
        if self.rope_type == "longrope":
            original = self._original_length()
            return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))

        def mscale(weight: float) -> float:
            return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

        if self.settings.get("mscale") and self.settings.get("mscale_all_dim"):
            all_dims_mscale = mscale(self._number("mscale_all_dim"))
            return mscale(self._number("mscale")) / all_dims_mscale
        return mscale(1.0)

    def invalid_error(self, reason: str) -> BadModelFile:
        return BadModelFile(
            f"RoPE kind {self.rope_type!r} has invalid settings ({reason}); correct the model's "
            "config.json or fetch it again"
        )

    def _llama3(self, base_frequencies: list[float]) -> list[float]:
        """Scale as Llama 3.1: divide low frequencies by `factor`, keep high ones, blend others."""
        factor, original = self._number("factor"), self._original_length()
        low, high = self._number("low_freq_factor"), self._number("high_freq_factor")
        frequencies = []
        for frequency in base_frequencies:
            turns = original * frequency / (2 * math.pi)  # rotations in the original length
            high_share = (
                min(max((turns - low) / (high - low), 0.0), 1.0) if high != low else turns > low
            )
            frequencies.append(frequency * ((1 - high_share) / factor + high_share))
        return frequencies

    def _yarn(self, base_frequencies: list[float]) -> list[float]:
        """Scale as YaRN (Peng et al., 2023): keep high frequencies, divide low ones by `factor`."""
        factor, original = self._extension_factor(), self._original_length()

        def pair_with_turns(turns: float) -> float:  # so many rotations in the original length
            log_period = math.log(original / (turns * 2 * math.pi))
            return self.rotary_dim * log_period / (2 * math.log(self.theta))

        ramp_start = pair_with_turns(self._number("beta_fast", 32))
        ramp_end = pair_with_turns(self._number("beta_slow", 1))
        if self.settings.get("truncate", True):
            ramp_start, ramp_end = math.floor(ramp_start), math.ceil(ramp_end)
        ramp_start, ramp_end = max(ramp_start, 0), min(ramp_end, self.rotary_dim - 1)
        if ramp_start == ramp_end:
            ramp_end += 0.001
        frequencies = []
        for pair, frequency in enumerate(base_frequencies):
            low_share = min(max((pair - ramp_start) / (ramp_end - ramp_start), 0.0), 1.0)
            frequencies.append(frequency * (low_share / factor + 1 - low_share))
        return frequencies

    def _longrope_short(self, base_frequencies: list[float]) -> list[float]:
        """Divide each frequency by its own factor in LongRoPE's table for short texts."""
        factors = self.settings.get("short_factor")
        if not isinstance(factors, list) or len(factors) != len(base_frequencies):
            raise self.invalid_error(f"short_factor must have {len(base_frequencies)} numbers")
        return [
            frequency / self._checked_positive("short_factor", factor)
            for frequency, factor in zip(base_frequencies, factors, strict=True)
        ]

    def _original_length(self) -> float:
        return self._number(_ORIGINAL_LENGTH, self.max_positions)

    def _extension_factor(self) -> float:
        """Return by how much the context length was extended."""
        return self._number("factor", self.max_positions / self._original_length())

    def _number(self, name: str, default: float | None = None) -> float:
        """Return a positive setting. default: replaces one that is missing, null or 0."""
        value = self.settings.get(name)
        if default is not None and (value is None or value == 0):
            return default
        return self._checked_positive(name, value)

    def _checked_positive(self, name: str, value: Any) -> float:
        if not is_positive_number(value):
            raise BadModelFile(
                f"RoPE kind {self.rope_type!r} needs a positive number as {name!r}, found "
                f"{value!r}; correct the model's config.json or fetch it again"
            )
        return float(value)

"""What a config says of positions: the RoPE table, and how far the model was trained to look."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvkeep.errors import BadModelFile, UnsupportedModel
from kvkeep.models.spec.config_numbers import LARGEST, count, positive, whole
from kvkeep.models.spec.families import FAMILIES
from kvkeep.models.spec.family import Family
from kvkeep.models.spec.frequencies import rope_spec
from kvkeep.models.spec.model_spec import RopeSpec

_PHI3 = "Phi3ForCausalLM"
_ORIGINAL = "original_max_position_embeddings"


def ropes_apart(
    config: Mapping[str, Any], family: Family
) -> tuple[Mapping[str, Any], Mapping[str, Any] | None]:
    """What a config says to layers that see everything, and to local ones where that is another.

    transformers 5 has an object of RoPE settings for each kind, 4 had the base of local layers in a
    field and scaled none of them.
    """
    if not (family.unlike and family.unlike.two_ropes):
        return config, None
    whole: Any = config.get("rope_parameters") or config.get("rope_scaling") or family.usual_rope
    near = None
    if isinstance(whole, dict) and ("full_attention" in whole or "sliding_attention" in whole):
        whole, near = whole.get("full_attention"), whole.get("sliding_attention")
    plain = {"rope_type": "default"}
    one = {**config, "rope_parameters": whole or plain, "rope_scaling": None}
    base = config.get("rope_local_base_freq", config.get("rope_theta"))
    return one, {**one, "rope_parameters": near or plain, "rope_theta": base}


def positions(
    config: Mapping[str, Any], family: Family, head_dim: int, path: Path
) -> tuple[RopeSpec, int]:
    """The RoPE table, and the length in tokens that it was trained or extended to.

    Raises BadModelFile, UnsupportedModel.
    """
    stated = count(config, "max_position_embeddings", path)
    settings = (
        config.get("rope_scaling") or config.get("rope_parameters") or dict(family.usual_rope)
    )
    if not isinstance(settings, dict) or any(isinstance(x, dict) for x in settings.values()):
        raise UnsupportedModel(
            f"{path}: RoPE settings must be one flat object, found {settings!r}; models that "
            "rotate differently from layer to layer are not supported"
        )
    settings = _usual_kind(config, settings, family, path)
    if family.gemma4 and settings.get("rope_type") == "proportional":
        return _proportional(settings, head_dim, path), stated
    rotary_dim = _rotary_dim(config, settings, family, head_dim, path)
    rope = rope_spec(
        settings,
        theta=_rope_theta(config, settings, path),
        rotary_dim=rotary_dim,
        max_positions=stated,
    )
    unrotated = (0.0,) * (head_dim // 2 - rotary_dim // 2)
    whole = replace(rope, inverse_frequencies=rope.inverse_frequencies + unrotated)
    if rope.kind == "longrope":  # the table of this length is the one that is taken
        return whole, min(stated, settings[_ORIGINAL])
    if settings.get("llama_4_scaling_beta"):  # from here on queries grow with their place in a text
        return whole, min(stated, count(settings, _ORIGINAL, path, default=stated))
    return whole, _extended_length(settings, stated)


def _proportional(settings: Mapping[str, Any], head_dim: int, path: Path) -> RopeSpec:
    """The first frequencies of a whole head's table; the other pairs are not rotated."""
    part = positive(settings, "partial_rotary_factor", path, default=1.0)
    pairs = int(part * head_dim // 2)
    if not 0 < pairs <= head_dim // 2:
        raise BadModelFile(
            f"{path}: partial_rotary_factor {part} of heads of {head_dim} gives no pairs that "
            "could be rotated; fetch the model again"
        )
    plain = {key: settings[key] for key in ("rope_type", "factor") if settings.get(key)}
    kind = "linear" if "factor" in plain else "default"
    theta = _rope_theta({}, settings, path)
    table = rope_spec({**plain, "rope_type": kind}, theta, head_dim, 1).inverse_frequencies
    return RopeSpec("proportional", table[:pairs] + (0.0,) * (head_dim // 2 - pairs))


def _usual_kind(
    config: Mapping[str, Any], settings: Mapping[str, Any], family: Family, path: Path
) -> Mapping[str, Any]:
    """The same settings under the names that `rope_spec` knows."""
    kind = settings.get("rope_type") or settings.get("type")
    if kind == "mrope" and family.text_part:  # of text, all three positions are the same
        return {**settings, "rope_type": "default"}
    two_ropes = family.unlike is not None and family.unlike.two_ropes
    holder = config if config.get(_ORIGINAL) and not two_ropes else settings
    if not (kind == "longrope" or (kind in ("su", "yarn") and family is FAMILIES[_PHI3])):
        said = holder.get(_ORIGINAL)
        return settings if said is None else {**settings, _ORIGINAL: said}
    usual = count(config, "max_position_embeddings", path)
    original = count(holder, _ORIGINAL, path, default=usual)
    return {**settings, "rope_type": "longrope", _ORIGINAL: original}


def _rope_theta(config: Mapping[str, Any], settings: Mapping[str, Any], path: Path) -> float:
    holder = settings if settings.get("rope_theta") is not None else config
    return positive(holder, "rope_theta", path, default=10_000.0)


def _rotary_dim(
    config: Mapping[str, Any],
    settings: Mapping[str, Any],
    family: Family,
    head_dim: int,
    path: Path,
) -> int:
    """How many of a head's numbers are rotated."""
    holder = settings if settings.get("partial_rotary_factor") is not None else config
    factor = positive(holder, "partial_rotary_factor", path, default=family.rotated or 1.0)
    if factor == 1:
        return head_dim
    if family.rotated is None:
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


def _extended_length(rope_settings: Mapping[str, Any], stated: int) -> int:
    """Some yarn configs state the length before extension as max_position_embeddings."""
    kind = rope_settings.get("rope_type") or rope_settings.get("type")
    original = rope_settings.get(_ORIGINAL)
    factor = rope_settings.get("factor")
    if kind == "yarn" and original and factor:
        return max(stated, int(min(original * factor, LARGEST)))  # rope_spec has seen both
    return stated


def sliding_window(
    config: Mapping[str, Any], family: Family, layers: int, path: Path
) -> int | None:
    """Tokens that a layer sees, where the model was trained to see fewer than all."""
    if family.window == "none":
        return None
    if family.window == "if used":
        kinds = config.get("layer_types")
        slides = bool(config.get("use_sliding_window", False)) and (
            "sliding_attention" in kinds
            if isinstance(kinds, list) and kinds
            else whole(config, "max_window_layers", path, default=28) < layers
        )
        if not slides:
            return None
    if family.window == "if used at all" and not config.get("use_sliding_window", False):
        return None
    if config.get("sliding_window") is None:
        return None
    return count(config, "sliding_window", path)

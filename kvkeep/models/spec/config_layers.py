"""What a config says of layers that are not as the others: local ones, and those without RoPE."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvkeep.errors import BadModelFile, UnsupportedModel
from kvkeep.models.spec.config_numbers import count
from kvkeep.models.spec.family import Family, Unlike

_MOST_LAYERS = 1 << 16
_WHOLE, _LOCAL = "full_attention", "sliding_attention"


def unlike_layers(
    config: Mapping[str, Any], family: Family, layers: int, path: Path
) -> dict[str, Any]:
    """Those of ModelSpec's fields that say which layers these are; none where all are alike.

    Raises BadModelFile, and UnsupportedModel for layers of a kind that is not run.
    """
    unlike = family.unlike
    if unlike is None:
        return {}
    if layers > _MOST_LAYERS:
        raise BadModelFile(f"{path}: {layers} layers; fetch the model again")
    unrotated = _unrotated(config, layers, path) if unlike.unrotated == "stated" else ()
    kinds = _kinds(config, unlike, layers, unrotated, path)
    whole = tuple(layer for layer, kind in enumerate(kinds) if kind == _WHOLE)
    local = tuple(layer for layer, kind in enumerate(kinds) if kind == _LOCAL)
    windowed = config.get("sliding_window") is not None
    if not whole:
        raise UnsupportedModel(
            f"{path}: none of {layers} layers sees the whole text (layer_types), which is not "
            "supported; use a model of the same family in which some do"
        )
    if local and not windowed:
        raise BadModelFile(
            f"{path}: sliding_window must be a number of tokens where layers slide (layer_types), "
            f"found null and {len(local)} such layers; fetch the model again"
        )
    if unlike.unrotated == "whole" or (unlike.unrotated == "whole if windowed" and windowed):
        unrotated = whole
    return {
        "local_layers": local,
        "window": count(config, "sliding_window", path) if local else 0,
        "unrotated_layers": unrotated,
    }


def _kinds(
    config: Mapping[str, Any], unlike: Unlike, layers: int, unrotated: tuple[int, ...], path: Path
) -> list[str]:
    """The kind of each layer, as `layer_types` says or as the family has it without."""
    if config.get("layer_types") is not None:
        kinds = _stated(config["layer_types"], layers, path)
    elif unlike.unrotated == "stated":
        slides = config.get("use_sliding_window") and config.get("sliding_window") is not None
        local = unrotated if slides else ()
        kinds = [_LOCAL if layer in local else _WHOLE for layer in range(layers)]
    elif unlike.unrotated == "whole if windowed" and config.get("sliding_window") is None:
        kinds = [_WHOLE] * layers
    else:
        period = unlike.period
        if unlike.pattern:
            period = count(config, "sliding_window_pattern", path, default=period)
        kinds = [_LOCAL if (layer + 1) % period else _WHOLE for layer in range(layers)]
    return [*kinds[:-1], _WHOLE] if unlike.last_whole else kinds


def _stated(kinds: object, layers: int, path: Path) -> list[str]:
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise BadModelFile(
            f"{path}: layer_types must name the kind of each of {layers} layers, found {kinds!r}; "
            "fetch the model again"
        )
    others = [kind for kind in kinds if kind not in (_WHOLE, _LOCAL)]
    if others:
        raise UnsupportedModel(
            f"layers of kind {others[0]!r} are not supported; supported: {_WHOLE}, {_LOCAL}. Use "
            "a model of the same family that has these alone"
        )
    return kinds


def _unrotated(config: Mapping[str, Any], layers: int, path: Path) -> tuple[int, ...]:
    """The layers without RoPE, as 0 in a list of their own says, or each so-manieth."""
    stated = config.get("no_rope_layers")
    if stated is None:
        interval = count(config, "no_rope_layer_interval", path)
        return tuple(range(interval - 1, layers, interval))
    if not isinstance(stated, list) or len(stated) < layers or any(x not in (0, 1) for x in stated):
        raise BadModelFile(
            f"{path}: no_rope_layers must be 0 or 1 for each of {layers} layers, found {stated!r}; "
            "fetch the model again"
        )
    return tuple(layer for layer in range(layers) if not stated[layer])

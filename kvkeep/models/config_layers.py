"""What a config says of layers that are not as the others: local ones, and those without RoPE."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvkeep.errors import BadModelFile, UnsupportedModel
from kvkeep.models.config_numbers import count
from kvkeep.models.families import Family

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
    if config.get("sliding_window") is None or (
        unlike.if_used and not config.get("use_sliding_window")
    ):
        return {"unrotated_layers": unrotated}
    if config.get("layer_types") is not None:
        kinds = _stated(config["layer_types"], layers, path)
    elif unlike.unrotated == "stated":
        kinds = [_LOCAL if layer in unrotated else _WHOLE for layer in range(layers)]
    else:
        period = count(config, "sliding_window_pattern", path, default=unlike.period)
        kinds = [_LOCAL if (layer + 1) % period else _WHOLE for layer in range(layers)]
    if _WHOLE not in kinds:
        raise UnsupportedModel(
            f"{path}: none of {layers} layers sees the whole text (layer_types), which is not "
            "supported; use a model of the same family in which some do"
        )
    whole = tuple(layer for layer, kind in enumerate(kinds) if kind == _WHOLE)
    local = tuple(layer for layer, kind in enumerate(kinds) if kind == _LOCAL)
    return {
        "local_layers": local,
        "window": count(config, "sliding_window", path) if local else 0,
        "unrotated_layers": whole if unlike.unrotated == "whole" else unrotated,
    }


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

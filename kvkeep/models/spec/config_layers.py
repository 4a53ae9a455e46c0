"""Per-layer settings of a config: local layers, layers without RoPE, and mixtures of experts.

Each function returns `ModelSpec` fields as keyword arguments.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvkeep.errors import BadModelFile, UnsupportedModel
from kvkeep.models.spec.config_fields import non_negative_int, positive_int
from kvkeep.models.spec.family import Family, LayerPattern

_MOST_LAYERS = 1 << 16
_GLOBAL, _LOCAL = "full_attention", "sliding_attention"


def layer_kind_fields(
    config: Mapping[str, Any], family: Family, layers: int, path: Path
) -> dict[str, Any]:
    """Return local_layers, window and unrotated_layers; empty if the family's layers are alike.

    Raises BadModelFile, and UnsupportedModel for unknown kinds of layers and for models without a
    global layer.
    """
    pattern = family.layer_pattern
    if pattern is None:
        return {}
    if layers > _MOST_LAYERS:
        raise BadModelFile(f"{path}: {layers} layers; fetch the model again")
    unrotated: tuple[int, ...] = ()
    if pattern.unrotated == "no_rope_layers":
        unrotated = _layers_without_rope(config, layers, path)
    kinds = _layer_kinds(config, pattern, layers, unrotated, path)
    global_layers = tuple(layer for layer, kind in enumerate(kinds) if kind == _GLOBAL)
    local_layers = tuple(layer for layer, kind in enumerate(kinds) if kind == _LOCAL)
    has_window = config.get("sliding_window") is not None
    if not global_layers:
        raise UnsupportedModel(
            f"{path}: none of {layers} layers sees the whole text (layer_types), which is not "
            "supported; use a model of the same family in which some do"
        )
    if local_layers and not has_window:
        raise BadModelFile(
            f"{path}: sliding_window must be a number of tokens where layers slide (layer_types), "
            f"found null and {len(local_layers)} such layers; fetch the model again"
        )
    if pattern.unrotated == "global" or (pattern.unrotated == "global if windowed" and has_window):
        unrotated = global_layers
    return {
        "local_layers": local_layers,
        "window": positive_int(config, "sliding_window", path) if local_layers else 0,
        "unrotated_layers": unrotated,
    }


def _layer_kinds(
    config: Mapping[str, Any],
    pattern: LayerPattern,
    layers: int,
    unrotated: tuple[int, ...],
    path: Path,
) -> list[str]:
    """Return each layer's kind, from `layer_types` or else from the family's pattern."""
    if config.get("layer_types") is not None:
        kinds = _checked_kinds(config["layer_types"], layers, path)
    elif pattern.unrotated == "no_rope_layers":
        slides = config.get("use_sliding_window") and config.get("sliding_window") is not None
        local = unrotated if slides else ()
        kinds = [_LOCAL if layer in local else _GLOBAL for layer in range(layers)]
    elif pattern.unrotated == "global if windowed" and config.get("sliding_window") is None:
        kinds = [_GLOBAL] * layers
    else:
        period = pattern.period
        if pattern.period_in_config:
            period = positive_int(config, "sliding_window_pattern", path, default=period)
        kinds = [_LOCAL if (layer + 1) % period else _GLOBAL for layer in range(layers)]
    return [*kinds[:-1], _GLOBAL] if pattern.last_layer_global else kinds


def _checked_kinds(kinds: object, layers: int, path: Path) -> list[str]:
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise BadModelFile(
            f"{path}: layer_types must name the kind of each of {layers} layers, found {kinds!r}; "
            "fetch the model again"
        )
    unknown = [kind for kind in kinds if kind not in (_GLOBAL, _LOCAL)]
    if unknown:
        raise UnsupportedModel(
            f"layers of kind {unknown[0]!r} are not supported; supported: {_GLOBAL}, {_LOCAL}. Use "
            "a model of the same family that has these alone"
        )
    return kinds


def _layers_without_rope(config: Mapping[str, Any], layers: int, path: Path) -> tuple[int, ...]:
    """Return the layers without RoPE: zeros in `no_rope_layers`, or else every n-th layer."""
    rope_flags = config.get("no_rope_layers")
    if rope_flags is None:
        interval = positive_int(config, "no_rope_layer_interval", path)
        return tuple(range(interval - 1, layers, interval))
    if (
        not isinstance(rope_flags, list)
        or len(rope_flags) < layers
        or any(flag not in (0, 1) for flag in rope_flags)
    ):
        raise BadModelFile(
            f"{path}: no_rope_layers must be 0 or 1 for each of {layers} layers, found "
            f"{rope_flags!r}; fetch the model again"
        )
    return tuple(layer for layer in range(layers) if not rope_flags[layer])


def model_window(config: Mapping[str, Any], family: Family, layers: int, path: Path) -> int | None:
    """Return the sliding window with which all layers were trained, in tokens; None without one.

    For families whose local layers differ from the others, see `layer_kind_fields`.
    """
    if family.window == "none":
        return None
    if family.window == "max_window_layers":
        kinds = config.get("layer_types")
        slides = bool(config.get("use_sliding_window", False)) and (
            _LOCAL in kinds
            if isinstance(kinds, list) and kinds
            else non_negative_int(config, "max_window_layers", path, default=28) < layers
        )
        if not slides:
            return None
    if family.window == "use_sliding_window" and not config.get("use_sliding_window", False):
        return None
    if config.get("sliding_window") is None:
        return None
    return positive_int(config, "sliding_window", path)


def expert_fields(
    config: Mapping[str, Any], family: Family, layers: int, path: Path
) -> dict[str, Any]:
    """Return the fields of a mixture of experts; empty if the family has none.

    Raises BadModelFile.
    """
    mixture = family.mixture
    if mixture is None:
        return {}
    # transformers 4 and 5 have swapped these two names for some families.
    name = "num_experts" if config.get("num_experts") is not None else "num_local_experts"
    norm_topk = mixture.norm_topk
    if norm_topk is None:
        norm_topk = bool(config.get("norm_topk_prob", False))
    return {
        **expert_counts(config, name, "num_experts_per_tok", path),
        "expert_size": positive_int(config, mixture.width, path),
        "shared_expert_size": (
            positive_int(config, mixture.shared_width, path) if mixture.shared_width else 0
        ),
        "norm_topk": norm_topk,
        "clamped_experts": mixture.clamped,
        **(_sparse_layer_fields(config, layers, path) if mixture.some_layers_dense else {}),
    }


def expert_counts(
    config: Mapping[str, Any], total_key: str, per_token_key: str, path: Path
) -> dict[str, int]:
    """Return experts and experts_per_token, read from the named fields. Raises BadModelFile."""
    total = positive_int(config, total_key, path)
    per_token = positive_int(config, per_token_key, path)
    if per_token > total:
        raise BadModelFile(
            f"{path}: {per_token_key} ({per_token}) must be at most {total_key} ({total}); fetch "
            "the model again"
        )
    return {"experts": total, "experts_per_token": per_token}


def _sparse_layer_fields(config: Mapping[str, Any], layers: int, path: Path) -> dict[str, Any]:
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(index) is int for index in dense):
        raise BadModelFile(
            f"{path}: mlp_only_layers must be a list of whole numbers, found {dense!r}; fetch the "
            "model again"
        )
    return {
        "sparse_step": positive_int(config, "decoder_sparse_step", path, default=1),
        "dense_layers": tuple(sorted({index for index in dense if 0 <= index < layers})),
    }

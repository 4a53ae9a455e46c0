"""Per-layer settings of a config: local layers, layers without RoPE, and mixtures of experts.

Each function returns `ModelSpec` fields as keyword arguments.
"""

from typing import Any

from kvkeep.errors import UnsupportedModel
from kvkeep.models.spec.config_fields import ConfigFields
from kvkeep.models.spec.family import Family, LayerPattern

_MOST_LAYERS = 1 << 16
_GLOBAL, _LOCAL = "full_attention", "sliding_attention"


def layer_kind_fields(config: ConfigFields, family: Family) -> dict[str, Any]:
    """Return local_layers, window and unrotated_layers; empty if the family's layers are alike.

    Raises BadModelFile, and UnsupportedModel for unknown kinds or no global layer.
    """
    pattern = family.layer_pattern
    if pattern is None:
        return {}
    layers = config.layers
    if layers > _MOST_LAYERS:
        raise config.invalid("num_hidden_layers", f"at most {_MOST_LAYERS}")
    unrotated = _layers_without_rope(config) if pattern.unrotated == "no_rope_layers" else ()
    kinds = _layer_kinds(config, pattern, unrotated)
    global_layers = tuple(layer for layer, kind in enumerate(kinds) if kind == _GLOBAL)
    local_layers = tuple(layer for layer, kind in enumerate(kinds) if kind == _LOCAL)
    has_window = config.get("sliding_window") is not None
    if not global_layers:
        raise config.unsupported(f"none of {layers} layers sees the whole text (layer_types)")
    if local_layers and not has_window:
        slide = f"{len(local_layers)} layers slide (layer_types)"
        raise config.invalid("sliding_window", f"a number of tokens, since {slide}")
    if pattern.unrotated == "global" or (pattern.unrotated == "global if windowed" and has_window):
        unrotated = global_layers
    return {
        "local_layers": local_layers,
        "window": config.positive_int("sliding_window") if local_layers else 0,
        "unrotated_layers": unrotated,
    }


def _layer_kinds(
    config: ConfigFields, pattern: LayerPattern, unrotated: tuple[int, ...]
) -> list[str]:
    """Return each layer's kind, from `layer_types` or else from the family's pattern."""
    layers, has_window = config.layers, config.get("sliding_window") is not None
    if config.get("layer_types") is not None:
        kinds = _checked_layer_types(config)
    elif pattern.unrotated == "no_rope_layers":
        local = unrotated if config.get("use_sliding_window") and has_window else ()
        kinds = [_LOCAL if layer in local else _GLOBAL for layer in range(layers)]
    elif pattern.unrotated == "global if windowed" and not has_window:
        kinds = [_GLOBAL] * layers
    else:
        period = pattern.period
        if pattern.period_in_config:
            period = config.positive_int("sliding_window_pattern", default=period)
        kinds = [_LOCAL if (layer + 1) % period else _GLOBAL for layer in range(layers)]
    return [*kinds[:-1], _GLOBAL] if pattern.last_layer_global else kinds


def _checked_layer_types(config: ConfigFields) -> list[str]:
    kinds = config.get("layer_types")
    if not isinstance(kinds, list) or len(kinds) != config.layers:
        raise config.invalid("layer_types", f"the kind of each of {config.layers} layers")
    unknown = [kind for kind in kinds if kind not in (_GLOBAL, _LOCAL)]
    if unknown:
        raise UnsupportedModel(
            f"layers of kind {unknown[0]!r} are not supported; supported: {_GLOBAL}, {_LOCAL}. Use "
            "a model of the same family that has these alone"
        )
    return kinds


def _layers_without_rope(config: ConfigFields) -> tuple[int, ...]:
    """Return the layers without RoPE: zeros in `no_rope_layers`, or else every n-th layer."""
    rope_flags, layers = config.get("no_rope_layers"), config.layers
    if rope_flags is None:
        interval = config.positive_int("no_rope_layer_interval")
        return tuple(range(interval - 1, layers, interval))
    if (
        not isinstance(rope_flags, list)
        or len(rope_flags) < layers
        or any(flag not in (0, 1) for flag in rope_flags)
    ):
        raise config.invalid("no_rope_layers", f"0 or 1 for each of {layers} layers")
    return tuple(layer for layer in range(layers) if not rope_flags[layer])


def model_window(config: ConfigFields, family: Family) -> int | None:
    """Return the sliding window that all layers were trained with; None without one."""
    slides = family.window == "sliding_window" or bool(config.get("use_sliding_window"))
    if family.window == "max_window_layers" and slides:
        kinds = config.get("layer_types")
        if isinstance(kinds, list) and kinds:
            slides = _LOCAL in kinds
        else:
            slides = config.non_negative_int("max_window_layers", default=28) < config.layers
    if family.window == "none" or not slides or config.get("sliding_window") is None:
        return None
    return config.positive_int("sliding_window")


def expert_fields(config: ConfigFields, family: Family) -> dict[str, Any]:
    """Return the fields of a mixture of experts. Raises BadModelFile."""
    mixture = family.mixture
    if mixture is None:
        return {}
    # transformers 4 and 5 have swapped these two names for some families.
    name = "num_experts" if config.get("num_experts") is not None else "num_local_experts"
    shared_width = mixture.shared_width
    fields = {
        **expert_counts(config, name, "num_experts_per_tok"),
        "expert_size": config.positive_int(mixture.width),
        "shared_expert_size": config.positive_int(shared_width) if shared_width else 0,
        "norm_topk": mixture.norm_topk,
    }
    if mixture.norm_topk is None:
        fields["norm_topk"] = bool(config.get("norm_topk_prob", False))
    return fields | (_dense_layer_fields(config) if mixture.some_layers_dense else {})


def expert_counts(config: ConfigFields, total_key: str, per_token_key: str) -> dict[str, int]:
    """Return experts and experts_per_token, read from two fields. Raises BadModelFile."""
    total, per_token = config.positive_int(total_key), config.positive_int(per_token_key)
    if per_token > total:
        raise config.invalid(per_token_key, f"at most {total_key} ({total})")
    return {"experts": total, "experts_per_token": per_token}


def _dense_layer_fields(config: ConfigFields) -> dict[str, Any]:
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(index) is int for index in dense):
        raise config.invalid("mlp_only_layers", "a list of whole numbers")
    return {
        "sparse_step": config.positive_int("decoder_sparse_step", default=1),
        "dense_layers": tuple(sorted({index for index in dense if 0 <= index < config.layers})),
    }

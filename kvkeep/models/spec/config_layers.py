"""Per-layer settings of a config: local layers, layers without RoPE, and mixtures of experts.

Each function returns `ModelSpec` fields as keyword arguments.
"""

from typing import Any

from kvkeep.errors import UnsupportedModel
from kvkeep.models.spec.config_fields import ConfigFields
from kvkeep.models.spec.family import Family, LayerPattern

MAX_LAYERS = 1 << 16
_GLOBAL, _LOCAL = "full_attention", "sliding_attention"


def layer_type_fields(config: ConfigFields, family: Family) -> dict[str, Any]:
    """Return local_layers, window and unrotated_layers; empty if the family's layers are alike.

    Raises BadModelFile, and UnsupportedModel for unknown kinds or no global layer.
    """
    pattern = family.layer_pattern
    if pattern is None:
        return {}
    num_layers = config.num_layers
    if num_layers > MAX_LAYERS:
        raise config.invalid_error("num_hidden_layers", f"at most {MAX_LAYERS}")
    rule = pattern.unrotated_rule
    unrotated_layers = _layers_without_rope(config) if rule == "no_rope_layers" else ()
    layer_types = _layer_types(config, pattern, unrotated_layers)
    global_layers = tuple(layer for layer, kind in enumerate(layer_types) if kind == _GLOBAL)
    local_layers = tuple(layer for layer, kind in enumerate(layer_types) if kind == _LOCAL)
    has_window = config.get("sliding_window") is not None
    if not global_layers:
        reason = f"none of {num_layers} layers has global attention (layer_types)"
        raise config.unsupported_error(reason)
    if local_layers and not has_window:
        reason = f"{len(local_layers)} layers have a sliding window (layer_types)"
        raise config.invalid_error("sliding_window", f"a number of tokens, since {reason}")
    if rule == "global" or (rule == "global if windowed" and has_window):
        unrotated_layers = global_layers
    return {
        "local_layers": local_layers,
        "window": config.positive_int("sliding_window") if local_layers else 0,
        "unrotated_layers": unrotated_layers,
    }


def _layer_types(
    config: ConfigFields, pattern: LayerPattern, unrotated_layers: tuple[int, ...]
) -> list[str]:
    """Return each layer's kind, from `layer_types` or else from the family's pattern."""
    num_layers, has_window = config.num_layers, config.get("sliding_window") is not None
    if config.get("layer_types") is not None:
        layer_types = _checked_layer_types(config)
    elif pattern.unrotated_rule == "no_rope_layers":
        local_layers = unrotated_layers if config.get("use_sliding_window") and has_window else ()
        layer_types = [_LOCAL if layer in local_layers else _GLOBAL for layer in range(num_layers)]
    elif pattern.unrotated_rule == "global if windowed" and not has_window:
        layer_types = [_GLOBAL] * num_layers
    else:
        period = pattern.period
        if pattern.period_in_config:
            period = config.positive_int("sliding_window_pattern", default=period)
        layer_types = [_LOCAL if (layer + 1) % period else _GLOBAL for layer in range(num_layers)]
    return [*layer_types[:-1], _GLOBAL] if pattern.last_layer_global else layer_types


def _checked_layer_types(config: ConfigFields) -> list[str]:
    """Return the config's `layer_types`. Raises UnsupportedModel for other kinds of layers."""
    layer_types = config.get("layer_types")
    if not isinstance(layer_types, list) or len(layer_types) != config.num_layers:
        raise config.invalid_error("layer_types", f"the kind of each of {config.num_layers} layers")
    unknown = [layer_type for layer_type in layer_types if layer_type not in (_GLOBAL, _LOCAL)]
    if unknown:
        raise UnsupportedModel(
            f"layers of kind {unknown[0]!r} are not supported; supported: {_GLOBAL}, {_LOCAL}. Use "
            "a model of the same family with only these"
        )
    return layer_types


def _layers_without_rope(config: ConfigFields) -> tuple[int, ...]:
    """Return the layers without RoPE: zeros in `no_rope_layers`, or else every n-th layer."""
    rope_flags, num_layers = config.get("no_rope_layers"), config.num_layers
    if rope_flags is None:
        interval = config.positive_int("no_rope_layer_interval")
        return tuple(range(interval - 1, num_layers, interval))
    if (
        not isinstance(rope_flags, list)
        or len(rope_flags) < num_layers
        or any(flag not in (0, 1) for flag in rope_flags)
    ):
        raise config.invalid_error("no_rope_layers", f"0 or 1 for each of {num_layers} layers")
    return tuple(layer for layer in range(num_layers) if not rope_flags[layer])


def model_window(config: ConfigFields, family: Family) -> int | None:
    """Return the sliding window that all layers were trained with; None without one."""
    is_sliding = family.window_rule == "sliding_window" or bool(config.get("use_sliding_window"))
    if family.window_rule == "max_window_layers" and is_sliding:
        layer_types = config.get("layer_types")
        if isinstance(layer_types, list) and layer_types:
            is_sliding = _LOCAL in layer_types
        else:
            first_sliding = config.non_negative_int("max_window_layers", default=28)
            is_sliding = first_sliding < config.num_layers
    if family.window_rule == "none" or not is_sliding or config.get("sliding_window") is None:
        return None
    return config.positive_int("sliding_window")


def expert_fields(config: ConfigFields, family: Family) -> dict[str, Any]:
    """Return the fields of a mixture of experts. Raises BadModelFile."""
    mixture = family.mixture
    if mixture is None:
        return {}
    # transformers 4 and 5 have swapped these two names for some families.
    experts_field = "num_experts" if config.get("num_experts") is not None else "num_local_experts"
    if mixture.optional and not config.get(experts_field):
        return {}
    shared_width_field = mixture.shared_width_field
    fields: dict[str, Any] = {
        **expert_counts(config, experts_field, "num_experts_per_tok"),
        "expert_size": config.positive_int(mixture.width_field),
        "shared_expert_size": config.positive_int(shared_width_field) if shared_width_field else 0,
        "norm_topk": mixture.norm_topk,
    }
    if mixture.norm_topk is None:
        fields["norm_topk"] = bool(config.get("norm_topk_prob", False))
    if mixture.ungated_shared_expert:
        fields["ungated_shared_expert"] = True
    if mixture.sigmoid_router:
        fields["sigmoid_router"] = True
        fields["router_bias"] = bool(config.get("use_expert_bias", True))
        fields["routed_scale"] = config.positive_float("routed_scaling_factor", default=1.0)
    if mixture.first_dense_field:
        dense_count = config.non_negative_int(mixture.first_dense_field, default=0)
        fields["dense_layers"] = tuple(range(min(dense_count, config.num_layers, MAX_LAYERS)))
    return fields | (_dense_layer_fields(config) if mixture.some_layers_dense else {})


def expert_counts(config: ConfigFields, total_field: str, per_token_field: str) -> dict[str, int]:
    """Return experts and experts_per_token, read from two fields. Raises BadModelFile."""
    total, per_token = config.positive_int(total_field), config.positive_int(per_token_field)
    if per_token > total:
        raise config.invalid_error(per_token_field, f"at most {total_field} ({total})")
    return {"experts": total, "experts_per_token": per_token}


def _dense_layer_fields(config: ConfigFields) -> dict[str, Any]:
    """Return sparse_step and dense_layers: which layers have an MLP in the place of experts."""
    dense_layers = config.get("mlp_only_layers") or []
    if not isinstance(dense_layers, list) or not all(type(i) is int for i in dense_layers):
        raise config.invalid_error("mlp_only_layers", "a list of whole numbers")
    return {
        "sparse_step": config.positive_int("decoder_sparse_step", default=1),
        "dense_layers": tuple(sorted({i for i in dense_layers if 0 <= i < config.num_layers})),
    }

"""Config fields of models with state layers, as `ModelSpec` fields."""

import math
from typing import Any

from kvkeep.models.spec.config_fields import ConfigFields
from kvkeep.models.spec.config_layers import MAX_LAYERS
from kvkeep.models.spec.family import Family
from kvkeep.models.spec.state_layers import StateLayers

_ATTENTION = "full_attention"
# In configs of converted GGUF files; see `StateLayers.tiled_output`.
TILED_OUTPUT_FIELD = "kvkeep_tiled_output"


def state_fields(config: ConfigFields, family: Family) -> dict[str, Any]:
    """Return `states`, and what else these configs state in a way of their own; may be empty.

    Raises BadModelFile, and UnsupportedModel for unknown kinds of layers.
    """
    if family.state_kind == "convolution":
        return _lfm2_fields(config)
    if family.state_kind == "delta_net":
        return _delta_net_fields(config)
    if family.state_kind == "mamba2":
        return _mamba_fields(config)
    return {}


def _lfm2_fields(config: ConfigFields) -> dict[str, Any]:
    layer_types = config.get("layer_types")
    if layer_types is None and config.get("full_attn_idxs") is not None:
        layer_types = _types_by_index(config)
    layers = state_layers(config, layer_types, "conv")
    fields = {"intermediate_size": _lfm2_mlp_width(config)}
    if not layers:
        return fields
    width = config.positive_int("conv_L_cache")
    if width < 2:
        raise config.invalid_error("conv_L_cache", "at least 2")
    has_bias, channels = bool(config.get("conv_bias")), config.positive_int("hidden_size")
    return {**fields, "states": StateLayers("convolution", layers, channels, width, has_bias)}


def _delta_net_fields(config: ConfigFields) -> dict[str, Any]:
    layer_types = config.get("layer_types")
    if layer_types is None:
        interval = config.positive_int("full_attention_interval", default=4)
        num_layers = min(config.num_layers, MAX_LAYERS + 1)
        is_state = [(layer + 1) % interval > 0 for layer in range(num_layers)]
        layer_types = ["linear_attention" if flag else _ATTENTION for flag in is_state]
    layers = state_layers(config, layer_types, "linear_attention")
    if not layers:
        return {}
    key_heads, value_heads, key_dim, value_dim, width = (
        config.positive_int(f"linear_{name}")
        for name in (
            "num_key_heads",
            "num_value_heads",
            "key_head_dim",
            "value_head_dim",
            "conv_kernel_dim",
        )
    )
    if value_heads % key_heads:
        expected = f"a multiple of linear_num_key_heads ({key_heads})"
        raise config.invalid_error("linear_num_value_heads", expected)
    if width < 2:
        raise config.invalid_error("linear_conv_kernel_dim", "at least 2")
    states = StateLayers(
        "delta_net",
        layers,
        2 * key_heads * key_dim + value_heads * value_dim,
        width,
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        tiled_output=bool(config.get(TILED_OUTPUT_FIELD)),
    )
    return {"states": states}


def _mamba_fields(config: ConfigFields) -> dict[str, Any]:
    """Return `states`, and which layers with attention have no RoPE."""
    layers = state_layers(config, _mamba_layer_types(config), "linear_attention")
    fields: dict[str, Any] = {}
    if config.get("position_embedding_type", "rope") != "rope":
        attending = set(range(config.num_layers)) - set(layers)
        fields["unrotated_layers"] = tuple(sorted(attending))
    if not layers:
        return fields
    heads, groups, width, hidden_size = (
        config.positive_int(name)
        for name in ("mamba_n_heads", "mamba_n_groups", "mamba_d_conv", "hidden_size")
    )
    head_dim, state_size = config.get("mamba_d_head"), config.positive_int("mamba_d_state")
    inner_size = config.positive_int("mamba_expand") * hidden_size
    if head_dim is None or head_dim == "auto":
        head_dim = inner_size // heads
    if heads * head_dim != inner_size:
        raise config.invalid_error("mamba_n_heads", f"heads of together {inner_size} dimensions")
    if heads % groups:
        raise config.invalid_error("mamba_n_groups", f"a divisor of mamba_n_heads ({heads})")
    if width < 2:
        raise config.invalid_error("mamba_d_conv", "at least 2")
    if not _is_unlimited(config.get("time_step_limit")):
        raise config.unsupported_error("steps are limited (time_step_limit)")
    fields["states"] = StateLayers(
        "mamba2",
        layers,
        inner_size + 2 * groups * state_size,
        width,
        conv_bias=bool(config.get("mamba_conv_bias")),
        key_heads=groups,
        value_heads=heads,
        key_dim=state_size,
        value_dim=head_dim,
        proj_bias=bool(config.get("mamba_proj_bias")),
    )
    return fields


def _mamba_layer_types(config: ConfigFields) -> Any:
    """Return each layer's type, in transformers' present names."""
    num_layers = min(config.num_layers, MAX_LAYERS + 1)
    if "attn_layer_indices" in config.values:  # Bamba
        indices = config.get("attn_layer_indices") or []
        if not isinstance(indices, list):
            raise config.invalid_error("attn_layer_indices", "a list of whole numbers")
        is_attention = [layer in indices for layer in range(num_layers)]
        return [_ATTENTION if flag else "linear_attention" for flag in is_attention]
    layer_types = config.get("layer_types")
    if layer_types is None:
        return ["linear_attention"] * num_layers
    if not isinstance(layer_types, list):
        return layer_types
    names = {"mamba": "linear_attention", "attention": _ATTENTION}
    return [names.get(kind, kind) if isinstance(kind, str) else kind for kind in layer_types]


def _is_unlimited(limit: Any) -> bool:
    """Whether a range of steps, as a config states it, bounds none of them."""
    if limit is None:
        return True
    endless = (math.inf, "Infinity", {"__float__": "Infinity"})
    return isinstance(limit, list) and len(limit) == 2 and limit[0] == 0 and limit[1] in endless


def state_layers(config: ConfigFields, layer_types: Any, state_type: str) -> tuple[int, ...]:
    """Return the layers of a type among `layer_types`; all others must have attention."""
    num_layers = config.num_layers
    if num_layers > MAX_LAYERS:
        raise config.invalid_error("num_hidden_layers", f"at most {MAX_LAYERS}")
    if layer_types is None:
        return ()
    kinds = f"{_ATTENTION} or {state_type}"
    if not isinstance(layer_types, list) or len(layer_types) != num_layers:
        raise config.invalid_error("layer_types", f"{kinds} for each of {num_layers} layers")
    unknown = [kind for kind in layer_types if kind not in (_ATTENTION, state_type)]
    if unknown:
        raise config.unsupported_error(f"layers of kind {unknown[0]!r}, not {kinds} (layer_types)")
    if _ATTENTION not in layer_types:
        raise config.unsupported_error(f"none of {num_layers} layers has attention (layer_types)")
    return tuple(layer for layer, kind in enumerate(layer_types) if kind == state_type)


def _types_by_index(config: ConfigFields) -> list[str]:
    """Return each layer's type from `full_attn_idxs`, which lists those with attention."""
    indices = config.get("full_attn_idxs")
    if not isinstance(indices, list) or not all(type(index) is int for index in indices):
        raise config.invalid_error("full_attn_idxs", "a list of whole numbers")
    num_layers = min(config.num_layers, MAX_LAYERS + 1)
    return [_ATTENTION if layer in indices else "conv" for layer in range(num_layers)]


def _lfm2_mlp_width(config: ConfigFields) -> int:
    """Return the width of the MLP, which LFM2's configs state before it is adjusted."""
    width = config.positive_int("intermediate_size")
    if not config.get("block_auto_adjust_ff_dim"):
        return width
    width, multiple = int(2 * width / 3), config.positive_int("block_multiple_of")
    if config.get("block_ffn_dim_multiplier") is None:
        return max(1, width)
    width = int(config.positive_float("block_ffn_dim_multiplier", 1.0) * width)
    return max(1, -(-width // multiple)) * multiple

"""Config fields of models with state layers, as `ModelSpec` fields."""

from typing import Any

from kvkeep.models.spec.config_fields import MAX_INTEGER, ConfigFields
from kvkeep.models.spec.config_layers import MAX_LAYERS
from kvkeep.models.spec.config_mamba import (
    ATTENTION,
    falcon_h1_fields,
    mamba_fields,
    nemotron_h_fields,
    require_silu,
    state_layers,
)
from kvkeep.models.spec.family import Family
from kvkeep.models.spec.state_layers import StateLayers

# In configs of converted GGUF files; see `StateLayers.tiled_output`.
TILED_OUTPUT_FIELD = "kvkeep_tiled_output"


def state_fields(config: ConfigFields, family: Family) -> dict[str, Any]:
    """Return `states`, and what else these configs state in a way of their own; may be empty.

    Raises BadModelFile, and UnsupportedModel for unknown kinds of layers.
    """
    match family.state_rule:
        case "lfm2":
            return _lfm2_fields(config)
        case "delta_net":
            return _delta_net_fields(config)
        case "mamba2":
            return mamba_fields(config)
        case "falcon_h1":
            return falcon_h1_fields(config)
        case "nemotron_h":
            return nemotron_h_fields(config)
    return {}


def _lfm2_fields(config: ConfigFields) -> dict[str, Any]:
    layer_types = config.get("layer_types")
    if layer_types is None and config.get("full_attn_idxs") is not None:
        layer_types = _types_by_index(config)
    layers = state_layers(config, layer_types, "conv")
    require_silu(config, "hidden_act")  # transformers has it in any case
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
        layer_types = ["linear_attention" if flag else ATTENTION for flag in is_state]
    layers = state_layers(config, layer_types, "linear_attention")
    if not layers:
        return {}
    require_silu(config, "hidden_act")
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


def _types_by_index(config: ConfigFields) -> list[str]:
    """Return each layer's type from `full_attn_idxs`, which lists those with attention."""
    indices = config.get("full_attn_idxs")
    if not isinstance(indices, list) or not all(type(index) is int for index in indices):
        raise config.invalid_error("full_attn_idxs", "a list of whole numbers")
    num_layers = min(config.num_layers, MAX_LAYERS + 1)
    return [ATTENTION if layer in indices else "conv" for layer in range(num_layers)]


def _lfm2_mlp_width(config: ConfigFields) -> int:
    """Return the width of the MLP, which LFM2's configs state before it is adjusted."""
    width = config.positive_int("intermediate_size")
    if not config.get("block_auto_adjust_ff_dim"):
        return width
    width, multiple = int(2 * width / 3), config.positive_int("block_multiple_of")
    if config.get("block_ffn_dim_multiplier") is None:
        return max(1, width)
    multiplier = config.positive_float("block_ffn_dim_multiplier", 1.0)
    width = int(min(multiplier * width, MAX_INTEGER))
    return max(1, -(-width // multiple)) * multiple

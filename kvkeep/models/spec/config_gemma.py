"""Config fields that only Gemma 3n and Gemma 4 have.

The functions return `ModelSpec` fields as keyword arguments.
"""

from collections.abc import Mapping
from typing import Any

from kvkeep.errors import BadModelFile
from kvkeep.models.spec.config_fields import ConfigFields, is_valid_integer
from kvkeep.models.spec.config_layers import expert_counts

_MAX_STREAMS = 64
# The first layers are sparse where a Gemma 3n config does not say which.
_DEFAULT_SPARSE_LAYERS, _DEFAULT_SPARSITY = 10, 0.95
# In Gemma 4's config: the field of local layers to the field with the same of global layers.
_GLOBAL_FIELDS = {
    "head_dim": "global_head_dim",
    "num_key_value_heads": "num_global_key_value_heads",
}


def gemma3n_fields(config: ConfigFields, local_layers: tuple[int, ...]) -> dict[str, Any]:
    """Return the fields that only Gemma 3n has, and its MLP widths. Raises BadModelFile."""
    num_inputs = config.positive_int("altup_num_inputs")
    active_index = config.non_negative_int("altup_active_idx", default=0)
    if not active_index < num_inputs <= _MAX_STREAMS:
        expected = f"at most {_MAX_STREAMS} and more than altup_active_idx ({active_index})"
        raise config.invalid_error("altup_num_inputs", expected)
    per_layer_vocab = config.positive_int("vocab_size_per_layer_input")
    return {
        "altup_inputs": num_inputs,
        "altup_active": active_index,
        "laurel_rank": config.positive_int("laurel_rank"),
        "activation_sparsity": _activation_sparsity(config),
        **_mlp_widths(config),
        "shared_kv_layers": _shared_kv_layers(config, local_layers),
        "per_layer_size": config.positive_int("hidden_size_per_layer_input"),
        "per_layer_vocab": 0 if per_layer_vocab == config.get("vocab_size") else per_layer_vocab,
    }


def _mlp_widths(config: ConfigFields) -> dict[str, Any]:
    """Return the largest width as intermediate_size, and mlp_widths if layers differ."""
    widths, num_layers = config.get("intermediate_size"), config.num_layers
    if not isinstance(widths, list):
        return {"intermediate_size": config.positive_int("intermediate_size")}
    if len(widths) != num_layers or not all(is_valid_integer(width, minimum=1) for width in widths):
        expected = f"a whole number of at least 1 for each of {num_layers} layers, or one for all"
        raise config.invalid_error("intermediate_size", expected)
    widths_differ = len(set(widths)) > 1
    return {"intermediate_size": max(widths), "mlp_widths": tuple(widths) if widths_differ else ()}


def _activation_sparsity(config: ConfigFields) -> tuple[float, ...]:
    """Return the share of gate values that each layer zeroes; empty if no layer zeroes any."""
    field, num_layers = "activation_sparsity_pattern", config.num_layers
    pattern = config.get(field)
    if pattern is None:
        num_sparse = _DEFAULT_SPARSE_LAYERS if num_layers > _DEFAULT_SPARSE_LAYERS else 0
        pattern = [_DEFAULT_SPARSITY] * num_sparse + [0.0] * (num_layers - num_sparse)
    if (
        not isinstance(pattern, list)
        or len(pattern) != num_layers
        or any(type(share) not in (int, float) or not 0 <= share < 1 for share in pattern)
    ):
        expected = f"a share from 0 to below 1 for each of {num_layers} layers"
        raise config.invalid_error(field, expected)
    return tuple(map(float, pattern)) if any(pattern) else ()


def gemma4_fields(
    config: ConfigFields, local_layers: tuple[int, ...]
) -> tuple[ConfigFields, dict[str, Any]]:
    """Return a Gemma 4 config as it holds for global layers, and the fields that only Gemma 4 has.

    In the file, `head_dim` and `num_key_value_heads` are those of local layers. transformers states
    those of global layers in `per_layer_config`, files on the hub in two fields of their own.
    Raises BadModelFile, UnsupportedModel.
    """
    per_layer_size = config.non_negative_int("hidden_size_per_layer_input", default=256)
    per_layer_vocab = config.get("vocab_size_per_layer_input", 262144)
    if per_layer_size and per_layer_vocab != config.get("vocab_size"):
        raise config.unsupported_error(
            "some tokens have no per-layer embeddings (vocab_size_per_layer_input)"
        )
    fields = {
        "local_head_dim": config.positive_int("head_dim"),
        "local_kv_heads": config.positive_int("num_key_value_heads"),
        "shared_kv_layers": _shared_kv_layers(config, local_layers),
        "wide_shared_mlp": bool(config.get("use_double_wide_mlp")),
        "keys_as_values": bool(config.get("attention_k_eq_v")),
        "per_layer_size": per_layer_size,
    }
    if config.get("enable_moe_block"):  # Gemma 4 26B-A4B has experts beside each MLP
        fields |= {
            **expert_counts(config, "num_experts", "top_k_experts"),
            "expert_size": config.positive_int("moe_intermediate_size"),
            "norm_topk": True,
            "experts_beside": True,
        }
    overrides: Any = {local: config.get(stated) for local, stated in _GLOBAL_FIELDS.items()}
    if not fields["keys_as_values"]:
        del overrides["num_key_value_heads"]
    if "per_layer_config" in config.values:  # replaces the two fields; empty where no layer differs
        overrides = _global_layer_config(config, local_layers)
    global_values = {field: value for field, value in overrides.items() if value is not None}
    return config.updated(global_values), fields


def _global_layer_config(config: ConfigFields, local_layers: tuple[int, ...]) -> Mapping[str, Any]:
    """Return the fields that `per_layer_config` states, alike, for every global layer."""
    layer_configs = config.get("per_layer_config") or {}
    is_dict = isinstance(layer_configs, dict)
    first, *others = layer_configs.values() if is_dict and layer_configs else [{}]
    if (
        not is_dict
        or not isinstance(first, dict)
        or not first.keys() <= _GLOBAL_FIELDS.keys()
        or others.count(first) != len(others)
    ):
        raise config.unsupported_error("global layers have different settings (per_layer_config)")
    global_layers = [layer for layer in range(config.num_layers) if layer not in local_layers]
    # transformers pads the layer numbers of models with ten layers or more: "05".
    if layer_configs and global_layers != sorted(
        int(layer_number) if layer_number.isdecimal() else -1 for layer_number in layer_configs
    ):
        raise config.unsupported_error(
            f"per_layer_config must list the global layers ({', '.join(map(str, global_layers))}), "
            f"found {', '.join(map(str, layer_configs))}"
        )
    return first


def _shared_kv_layers(config: ConfigFields, local_layers: tuple[int, ...]) -> int:
    """Return how many of the last layers attend to earlier ones' cells. Raises BadModelFile."""
    field, num_layers = "num_kv_shared_layers", config.num_layers
    num_shared = config.non_negative_int(field, default=0)
    if num_shared and not local_layers:
        raise config.unsupported_error(
            f"{num_shared} layers share cells of others ({field}), but none has a window "
            "(layer_types)"
        )
    is_local = [layer in local_layers for layer in range(num_layers)]
    first_shared = max(0, num_layers - num_shared)
    if num_shared and set(is_local[first_shared:]) - set(is_local[:first_shared]):
        raise BadModelFile(
            f"{config.path}: {field} ({num_shared}) leaves layers without cells to attend to; "
            "fetch the model again"
        )
    return num_shared

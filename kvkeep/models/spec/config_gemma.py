"""Config fields that only Gemma 3n and Gemma 4 have.

`merge_widths` (Gemma 3n) and `split_head_sizes` (Gemma 4) rewrite a config so that the common code
can read it; `gemma3n_fields` and `gemma4_fields` return `ModelSpec` fields as keyword arguments.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvkeep.errors import BadModelFile, UnsupportedModel
from kvkeep.models.spec.config_fields import LARGEST, non_negative_int, positive_int
from kvkeep.models.spec.config_layers import expert_counts

_MOST_STREAMS = 64
# The first layers are sparse where a Gemma 3n config does not say which.
_DEFAULT_SPARSE_LAYERS, _DEFAULT_SPARSITY = 10, 0.95
# For Gemma 4: the field of local layers to the field that holds the same for global layers.
_GLOBAL_FIELDS = {
    "head_dim": "global_head_dim",
    "num_key_value_heads": "num_global_key_value_heads",
}


def merge_widths(config: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """Return a Gemma 3n config with one MLP width, and with the attention scale that is in effect.

    `intermediate_size` becomes the widest of the layers; where layers differ, "mlp_widths" holds
    each layer's. Published files state an attention scale (query_pre_attn_scalar) that the forward
    ignores: it becomes 1.

    Raises BadModelFile, and UnsupportedModel for capped attention.
    """
    if config.get("attn_logit_softcapping") is not None:
        raise UnsupportedModel(
            f"{path} is a Gemma 3n that caps attention (attn_logit_softcapping), which is not "
            "supported and no published one does: use one of these"
        )
    widths, layer_widths = config.get("intermediate_size"), ()
    if isinstance(widths, list):
        _check_widths(widths, positive_int(config, "num_hidden_layers", path), path)
        layer_widths = tuple(widths) if len(set(widths)) > 1 else ()
        widths = max(widths)
    return {
        **config,
        "intermediate_size": widths,
        "mlp_widths": layer_widths,
        "query_pre_attn_scalar": 1,
    }


def gemma3n_fields(
    config: Mapping[str, Any], layers: int, local_layers: tuple[int, ...], path: Path
) -> dict[str, Any]:
    """Return the fields that only Gemma 3n has.

    config: as `merge_widths` returns it.

    Raises BadModelFile, and UnsupportedModel for variants that are not supported.
    """
    if not config.get("altup_correct_scale", True):
        raise UnsupportedModel(
            f"{path} is a Gemma 3n without altup_correct_scale, which is not supported and no "
            "published one is: use one of these"
        )
    inputs = positive_int(config, "altup_num_inputs", path)
    active = non_negative_int(config, "altup_active_idx", path, default=0)
    if inputs > _MOST_STREAMS or active >= inputs:
        raise BadModelFile(
            f"{path}: altup_num_inputs ({inputs}) must be at most {_MOST_STREAMS} and more than "
            f"altup_active_idx ({active}); fetch the model again"
        )
    per_layer_vocab = positive_int(config, "vocab_size_per_layer_input", path)
    return {
        "altup_inputs": inputs,
        "altup_active": active,
        "laurel_rank": positive_int(config, "laurel_rank", path),
        "activation_sparsity": _sparsity(config.get("activation_sparsity_pattern"), layers, path),
        "mlp_widths": config["mlp_widths"],
        "shared_kv_layers": _shared_kv_layers(config, layers, local_layers, path),
        "values_normed": True,
        "per_layer_size": positive_int(config, "hidden_size_per_layer_input", path),
        "per_layer_vocab": 0 if per_layer_vocab == config.get("vocab_size") else per_layer_vocab,
    }


def _check_widths(widths: list[Any], layers: int, path: Path) -> None:
    if len(widths) != layers or any(
        type(width) is not int or not 1 <= width <= LARGEST for width in widths
    ):
        raise BadModelFile(
            f"{path}: intermediate_size must be a whole number of at least 1 for each of {layers} "
            "layers, or one for all; fetch the model again"
        )


def _sparsity(pattern: object, layers: int, path: Path) -> tuple[float, ...]:
    """Return the share of gate values that each layer zeroes; empty if no layer zeroes any."""
    if pattern is None:
        sparse = _DEFAULT_SPARSE_LAYERS if layers > _DEFAULT_SPARSE_LAYERS else 0
        pattern = [_DEFAULT_SPARSITY] * sparse + [0.0] * (layers - sparse)
    if (
        not isinstance(pattern, list)
        or len(pattern) != layers
        or any(type(share) not in (int, float) or not 0 <= share < 1 for share in pattern)
    ):
        raise BadModelFile(
            f"{path}: activation_sparsity_pattern must be a share from 0 to below 1 for each of "
            f"{layers} layers; fetch the model again"
        )
    return tuple(map(float, pattern)) if any(pattern) else ()


def split_head_sizes(
    config: Mapping[str, Any], path: Path
) -> tuple[Mapping[str, Any], dict[str, int]]:
    """Return a Gemma 4 config as it holds for global layers, and local_head_dim, local_kv_heads.

    In the file, `head_dim` and `num_key_value_heads` are those of local layers. transformers states
    the global layers' under each of these layers (`per_layer_config`), files on the hub in two
    fields of their own.

    Raises BadModelFile, and UnsupportedModel if the global layers differ among themselves.
    """
    local_fields = {
        "local_head_dim": positive_int(config, "head_dim", path),
        "local_kv_heads": positive_int(config, "num_key_value_heads", path),
    }
    overrides: Any = {key: config.get(global_key) for key, global_key in _GLOBAL_FIELDS.items()}
    if not config.get("attention_k_eq_v"):
        del overrides["num_key_value_heads"]
    if "per_layer_config" in config:  # replaces the two fields; empty where no layer differs
        overrides = _global_layer_config(config["per_layer_config"] or {}, path)
    stated = {key: value for key, value in overrides.items() if value is not None}
    return {**config, **stated}, local_fields


def _global_layer_config(per_layer: Any, path: Path) -> Mapping[str, Any]:
    """Return the fields that `per_layer_config` states alike for every layer that it names.

    Raises UnsupportedModel where they differ.
    """
    first, *others = per_layer.values() if isinstance(per_layer, dict) and per_layer else [{}]
    if (
        not isinstance(per_layer, dict)
        or not isinstance(first, dict)
        or not first.keys() <= _GLOBAL_FIELDS.keys()
        or others.count(first) != len(others)
    ):
        raise UnsupportedModel(
            f"{path}: layers that see everything differ among themselves (per_layer_config), "
            "which no published Gemma 4 does: use one of these"
        )
    return first


def gemma4_fields(
    config: Mapping[str, Any], layers: int, local_layers: tuple[int, ...], path: Path
) -> dict[str, Any]:
    """Return the fields that only Gemma 4 has.

    Raises BadModelFile, and UnsupportedModel for variants that are not supported.
    """
    _check_per_layer_config(config, layers, local_layers, path)
    size = non_negative_int(config, "hidden_size_per_layer_input", path, default=256)
    if size and config.get("vocab_size_per_layer_input", 262144) != config.get("vocab_size"):
        raise UnsupportedModel(
            f"{path}: tokens without embeddings of each layer (vocab_size_per_layer_input) are not "
            "supported; use a published Gemma 4, in which all have some"
        )
    return {
        "shared_kv_layers": _shared_kv_layers(config, layers, local_layers, path),
        "wide_shared_mlp": bool(config.get("use_double_wide_mlp")),
        "keys_as_values": bool(config.get("attention_k_eq_v")),
        "values_normed": True,
        "per_layer_size": size,
        "layer_scales": True,
        **_parallel_experts(config, path),
    }


def _check_per_layer_config(
    config: Mapping[str, Any], layers: int, local_layers: tuple[int, ...], path: Path
) -> None:
    """Check that `per_layer_config` names exactly the global layers."""
    per_layer = config.get("per_layer_config")
    global_layers = [layer for layer in range(layers) if layer not in local_layers]
    # transformers pads the layer numbers of models with ten layers or more: "05".
    if per_layer and global_layers != sorted(
        int(key) if key.isdecimal() else -1 for key in per_layer
    ):
        raise UnsupportedModel(
            f"{path}: per_layer_config must name the layers that see everything "
            f"({', '.join(map(str, global_layers))}), found {', '.join(map(str, per_layer))}; use "
            "a published Gemma 4"
        )


def _shared_kv_layers(
    config: Mapping[str, Any], layers: int, local_layers: tuple[int, ...], path: Path
) -> int:
    """Return how many of the last layers attend to the cells of earlier ones, as in ModelSpec.

    Raises BadModelFile where no earlier layer of the same kind has cells, and UnsupportedModel
    where no layer is local.
    """
    shared = non_negative_int(config, "num_kv_shared_layers", path, default=0)
    if shared and not local_layers:
        raise UnsupportedModel(
            f"{path}: {shared} layers look at the cells of others (num_kv_shared_layers) and none "
            "slides (layer_types), which is not supported and no published model does: use one of "
            "these"
        )
    is_local = [layer in local_layers for layer in range(layers)]
    if shared and set(is_local[layers - shared :]) - set(is_local[: max(0, layers - shared)]):
        raise BadModelFile(
            f"{path}: num_kv_shared_layers ({shared}) leaves layers without cells that they could "
            "look at; fetch the model again"
        )
    return shared


def _parallel_experts(config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the fields of the experts beside each MLP (Gemma 4 26B-A4B); empty without them."""
    if not config.get("enable_moe_block"):
        return {}
    return {
        **expert_counts(config, "num_experts", "top_k_experts", path),
        "expert_size": positive_int(config, "moe_intermediate_size", path),
        "norm_topk": True,
        "experts_beside": True,
    }

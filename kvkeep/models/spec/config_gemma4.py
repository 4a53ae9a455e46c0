"""What a config says of Gemma 4 alone."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvkeep.errors import BadModelFile, UnsupportedModel
from kvkeep.models.spec.config_experts import how_many
from kvkeep.models.spec.config_numbers import count, whole

_HEADS = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}


def heads_apart(config: Mapping[str, Any], path: Path) -> tuple[Mapping[str, Any], dict[str, int]]:
    """The config as it is for layers that see everything, and what of ModelSpec local ones have
    otherwise.

    transformers writes it for each layer that differs, the hub's files in two fields.

    Raises BadModelFile, and UnsupportedModel where these differ among themselves.
    """
    local = {
        "local_head_dim": count(config, "head_dim", path),
        "local_kv_heads": count(config, "num_key_value_heads", path),
    }
    said: Any = {ours: config.get(theirs) for ours, theirs in _HEADS.items()}
    if not config.get("attention_k_eq_v"):
        del said["num_key_value_heads"]
    if "per_layer_config" in config:  # in their place, and empty where no layer differs
        said = _of_whole_layers(config["per_layer_config"] or {}, path)
    return {**config, **{key: value for key, value in said.items() if value is not None}}, local


def _of_whole_layers(each: Any, path: Path) -> Mapping[str, Any]:
    """The fields that `per_layer_config` gives alike to every layer that it names.

    Raises UnsupportedModel where these differ.
    """
    said, *others = each.values() if isinstance(each, dict) and each else [{}]
    if (
        not isinstance(each, dict)
        or not isinstance(said, dict)
        or not said.keys() <= _HEADS.keys()
        or others.count(said) != len(others)
    ):
        raise UnsupportedModel(
            f"{path}: layers that see everything differ among themselves (per_layer_config), "
            "which no published Gemma 4 does: use one of these"
        )
    return said


def _require_whole_layers(
    config: Mapping[str, Any], layers: int, local_layers: tuple[int, ...], path: Path
) -> None:
    """That `per_layer_config` names the layers that see everything, and no others."""
    each = config.get("per_layer_config")
    whole = [layer for layer in range(layers) if layer not in local_layers]
    # transformers pads the numbers of ten layers and more: "05".
    if each and sorted(int(key) if key.isdecimal() else -1 for key in each) != whole:
        raise UnsupportedModel(
            f"{path}: per_layer_config must name the layers that see everything "
            f"({', '.join(map(str, whole))}), found {', '.join(map(str, each))}; use a "
            "published Gemma 4"
        )


def gemma4_fields(
    config: Mapping[str, Any], layers: int, local_layers: tuple[int, ...], path: Path
) -> dict[str, Any]:
    """Those of ModelSpec's fields that Gemma 4 alone has.

    Raises BadModelFile, and UnsupportedModel for what is not run of it.
    """
    _require_whole_layers(config, layers, local_layers, path)
    size = whole(config, "hidden_size_per_layer_input", path, default=256)
    if size and config.get("vocab_size_per_layer_input", 262144) != config.get("vocab_size"):
        raise UnsupportedModel(
            f"{path}: tokens without embeddings of each layer (vocab_size_per_layer_input) are not "
            "supported; use a published Gemma 4, in which all have some"
        )
    return {
        "shared_kv_layers": shared_kv_layers(config, layers, local_layers, path),
        "wide_shared_mlp": bool(config.get("use_double_wide_mlp")),
        "keys_as_values": bool(config.get("attention_k_eq_v")),
        "values_normed": True,
        "per_layer_size": size,
        "layer_scales": True,
        **_experts(config, path),
    }


def shared_kv_layers(
    config: Mapping[str, Any], layers: int, local_layers: tuple[int, ...], path: Path
) -> int:
    """How many of the last layers look at the cells of others, as in ModelSpec.

    Raises BadModelFile where there are no such others, UnsupportedModel where no layer is local.
    """
    shared = whole(config, "num_kv_shared_layers", path, default=0)
    if shared and not local_layers:
        raise UnsupportedModel(
            f"{path}: {shared} layers look at the cells of others (num_kv_shared_layers) and none "
            "slides (layer_types), which is not supported and no published model does: use one of "
            "these"
        )
    kinds = [layer in local_layers for layer in range(layers)]
    if shared and set(kinds[layers - shared :]) - set(kinds[: max(0, layers - shared)]):
        raise BadModelFile(
            f"{path}: num_kv_shared_layers ({shared}) leaves layers without cells that they could "
            "look at; fetch the model again"
        )
    return shared


def _experts(config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Of those beside its MLPs, where it has some (26B-A4B)."""
    if not config.get("enable_moe_block"):
        return {}
    return {
        **how_many(config, "num_experts", "top_k_experts", path),
        "expert_size": count(config, "moe_intermediate_size", path),
        "norm_topk": True,
        "experts_beside": True,
    }

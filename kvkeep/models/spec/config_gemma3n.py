"""What a config says of Gemma 3n alone."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvkeep.errors import BadModelFile, UnsupportedModel
from kvkeep.models.spec.config_gemma4 import shared_kv_layers
from kvkeep.models.spec.config_numbers import LARGEST, count, whole

_MOST_STREAMS = 64
_SPARSE, _SPARSITY = 10, 0.95  # layers that are sparse where the config does not say which


def one_width(config: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """The config with one width of MLPs, the widest, and as "mlp_widths" that of each layer's where
    they differ; and with the scale of attention that there is.

    Files say the width of each layer, and a scale (query_pre_attn_scalar) that no forward heeds.

    Raises BadModelFile, and UnsupportedModel for what is not run of it.
    """
    if config.get("attn_logit_softcapping") is not None:
        raise UnsupportedModel(
            f"{path} is a Gemma 3n that caps attention (attn_logit_softcapping), which is not "
            "supported and no published one does: use one of these"
        )
    widths, each = config.get("intermediate_size"), ()
    if isinstance(widths, list):
        _require_widths(widths, count(config, "num_hidden_layers", path), path)
        each = tuple(widths) if len(set(widths)) > 1 else ()
        widths = max(widths)
    return {
        **config,
        "intermediate_size": widths,
        "mlp_widths": each,
        "query_pre_attn_scalar": 1,
    }


def gemma3n_fields(
    config: Mapping[str, Any], layers: int, local_layers: tuple[int, ...], path: Path
) -> dict[str, Any]:
    """Those of ModelSpec's fields that Gemma 3n has.

    config: as `one_width` gives it. Raises BadModelFile, and UnsupportedModel for what is not run.
    """
    if not config.get("altup_correct_scale", True):
        raise UnsupportedModel(
            f"{path} is a Gemma 3n without altup_correct_scale, which is not supported and no "
            "published one is: use one of these"
        )
    inputs = count(config, "altup_num_inputs", path)
    active = whole(config, "altup_active_idx", path, default=0)
    if inputs > _MOST_STREAMS or active >= inputs:
        raise BadModelFile(
            f"{path}: altup_num_inputs ({inputs}) must be at most {_MOST_STREAMS} and more than "
            f"altup_active_idx ({active}); fetch the model again"
        )
    vectors = count(config, "vocab_size_per_layer_input", path)
    return {
        "altup_inputs": inputs,
        "altup_active": active,
        "laurel_rank": count(config, "laurel_rank", path),
        "activation_sparsity": _sparsity(config.get("activation_sparsity_pattern"), layers, path),
        "mlp_widths": config["mlp_widths"],
        "shared_kv_layers": shared_kv_layers(config, layers, local_layers, path),
        "values_normed": True,
        "per_layer_size": count(config, "hidden_size_per_layer_input", path),
        "per_layer_vocab": 0 if vectors == config.get("vocab_size") else vectors,
    }


def _require_widths(widths: list[Any], layers: int, path: Path) -> None:
    if len(widths) != layers or any(
        type(width) is not int or not 1 <= width <= LARGEST for width in widths
    ):
        raise BadModelFile(
            f"{path}: intermediate_size must be a whole number of at least 1 for each of {layers} "
            "layers, or one for all; fetch the model again"
        )


def _sparsity(said: object, layers: int, path: Path) -> tuple[float, ...]:
    """The share of the numbers of each layer's gate that are nothing; none where all have all."""
    if said is None:
        sparse = _SPARSE if layers > _SPARSE else 0
        said = [_SPARSITY] * sparse + [0.0] * (layers - sparse)
    if (
        not isinstance(said, list)
        or len(said) != layers
        or any(type(share) not in (int, float) or not 0 <= share < 1 for share in said)
    ):
        raise BadModelFile(
            f"{path}: activation_sparsity_pattern must be a share from 0 to below 1 for each of "
            f"{layers} layers; fetch the model again"
        )
    return tuple(map(float, said)) if any(said) else ()

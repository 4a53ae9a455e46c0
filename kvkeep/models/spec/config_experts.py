"""What a config says of a mixture of experts."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvkeep.errors import BadModelFile
from kvkeep.models.spec.config_numbers import count
from kvkeep.models.spec.family import Family


def experts(config: Mapping[str, Any], family: Family, layers: int, path: Path) -> dict[str, Any]:
    """Those of ModelSpec's fields that speak of experts; none where the family has none.

    Raises BadModelFile.
    """
    mixture = family.mixture
    if mixture is None:
        return {}
    # The one name is that of transformers 4, the other of 5, or the other way round.
    name = "num_experts" if config.get("num_experts") is not None else "num_local_experts"
    normed = mixture.norm_topk
    return {
        **how_many(config, name, "num_experts_per_tok", path),
        "expert_size": count(config, mixture.width, path),
        "shared_expert_size": count(config, mixture.shared, path) if mixture.shared else 0,
        "norm_topk": bool(config.get("norm_topk_prob", False)) if normed is None else normed,
        "clamped_experts": mixture.clamped,
        **(_alternation(config, layers, path) if mixture.alternating else {}),
    }


def how_many(config: Mapping[str, Any], every: str, some: str, path: Path) -> dict[str, int]:
    """How many experts there are, and how many a token goes through. every, some: fields.

    Raises BadModelFile.
    """
    there, chosen = count(config, every, path), count(config, some, path)
    if chosen > there:
        raise BadModelFile(
            f"{path}: {some} ({chosen}) must be at most {every} ({there}); fetch the model again"
        )
    return {"experts": there, "experts_per_token": chosen}


def _alternation(config: Mapping[str, Any], layers: int, path: Path) -> dict[str, Any]:
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(index) is int for index in dense):
        raise BadModelFile(
            f"{path}: mlp_only_layers must be a list of whole numbers, found {dense!r}; fetch the "
            "model again"
        )
    return {
        "sparse_step": count(config, "decoder_sparse_step", path, default=1),
        "dense_layers": tuple(sorted({index for index in dense if 0 <= index < layers})),
    }

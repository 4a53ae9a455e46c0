"""The rows of query and key in the half layout, in which the cache rotates.

There the i-th number of a head is rotated with the one half a head further on, all of them. Where a
family pairs them in another way, or rotates a part of each head, its rows are put in that order:

    stored     0 1 2 3 4 5 6 7    of which 0 1 2 3 are rotated, side by side (interleaved)
    here       0 2 4 5 1 3 6 7    0 with 1, 2 with 3; 4 with 6 and 5 with 7 by frequency 0

Queries and keys are in the same order, so that their products stay what they are. Values are left
as they are stored.
"""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from kvkeep.models.spec.families import FAMILIES
from kvkeep.models.spec.model_spec import ModelSpec

_ROTATED = re.compile(r"model\.layers\.\d+\.self_attn\.([qk])_(?:proj|norm)\.(?:weight|bias)")


def arranged(spec: ModelSpec, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A model's tensors, those of query and key with their rows in the half layout.

    They are copied where the order is another one, and else left where they lie.
    """
    return {
        name: tensor if (rows := half_layout(spec, name, len(tensor))) is None else tensor[rows]
        for name, tensor in tensors.items()
    }


def half_layout(spec: ModelSpec, name: str, count: int) -> Tensor | None:
    """Which of a tensor's `count` stored rows each of its rows is here; None for every its own."""
    if spec.rope.kind == "proportional":  # pairs lie half a head apart, the unrotated ones, too
        return None
    if not _ROTATED.fullmatch(name) or (order := _of_a_head(spec)) == list(range(spec.head_dim)):
        return None
    heads = torch.arange(count, dtype=torch.int64, device="cpu").view(-1, spec.head_dim)
    return heads[:, order].flatten()


def _of_a_head(spec: ModelSpec) -> list[int]:
    half, pairs = spec.head_dim // 2, sum(map(bool, spec.rope.inverse_frequencies))
    rotated, rest = list(range(2 * pairs)), list(range(2 * pairs, spec.head_dim))
    if FAMILIES[spec.architecture].interleaved:
        first, second = rotated[::2], rotated[1::2]
    else:
        first, second = rotated[:pairs], rotated[pairs:]
    return [*first, *rest[: half - pairs], *second, *rest[half - pairs :]]

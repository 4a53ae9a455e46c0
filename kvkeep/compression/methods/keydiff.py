"""Method `keydiff`: keys unlike the others (Park et al., arXiv:2504.15364)."""

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from kvkeep.compression.methods.base import Candidates, Eviction

EPSILON = 1e-12  # length below which a key has no direction


class KeyDiff(Eviction):
    """Keeps the cells whose keys, as they are stored, are least like the mean of all directions."""

    name: ClassVar[str] = "keydiff"

    def score(self, candidates: Candidates) -> Tensor:
        return unlikeness(candidates.keys, inverse_lengths(candidates.keys))


def inverse_lengths(x: Tensor) -> Tensor:
    """x: `[..., n, width]` to `[..., n]`."""
    lengths: Tensor = x.norm(dim=-1)
    return 1 / lengths.clamp(min=EPSILON)


def unlikeness(x: Tensor, shortened: Tensor) -> Tensor:
    """x: `[..., n, width]` to `[..., n]`: minus the cosine with the mean direction.

    shortened: the inverse lengths of x.
    """
    anchor = F.normalize(shortened.unsqueeze(-2) @ x, dim=-1)
    likeness: Tensor = (x @ anchor.transpose(-1, -2)).squeeze(-1) * shortened
    return -likeness

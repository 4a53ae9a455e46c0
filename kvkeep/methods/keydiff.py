"""Method `keydiff`: keys unlike the others (Park et al., arXiv:2504.15364)."""

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from kvkeep.methods.base import Candidates, Eviction


class KeyDiff(Eviction):
    """Keeps the cells whose keys, as they are stored, are least like the mean of all directions."""

    name: ClassVar[str] = "keydiff"

    def score(self, candidates: Candidates) -> Tensor:
        return unlikeness(candidates.cells.keys.float())


def unlikeness(x: Tensor) -> Tensor:
    """x: `[..., n, width]` to `[..., n]`: minus the cosine with the mean direction."""
    directions = F.normalize(x, dim=-1)
    anchor = F.normalize(directions.mean(-2, keepdim=True), dim=-1)
    return -(directions @ anchor.transpose(-1, -2)).squeeze(-1)

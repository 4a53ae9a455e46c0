"""Method `snapkv`: what the last queries look at (Li et al., arXiv:2404.14469)."""

from typing import ClassVar

from torch import Tensor

from kvkeep.compression.methods.attended import attention
from kvkeep.compression.methods.base import Candidates, Eviction
from kvkeep.compression.methods.observed import observed, smoothed

QUERIES = 32
POOL = 7  # cells


class SnapKV(Eviction):
    """Keeps the cells that the last 32 queries attended to most, and their neighbours."""

    name: ClassVar[str] = "snapkv"
    observes: ClassVar[bool] = True

    def score(self, candidates: Candidates) -> Tensor:
        shares = attention(candidates, observed(candidates, QUERIES))
        return smoothed(shares.mean(2), POOL)

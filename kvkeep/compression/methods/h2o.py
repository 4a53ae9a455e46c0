"""Method `h2o`: heavy hitters (Zhang et al., arXiv:2306.14048)."""

from typing import ClassVar

from torch import Tensor

from kvkeep.cache.observer import MAX_QUERIES
from kvkeep.compression.methods.attended import attention
from kvkeep.compression.methods.base import Candidates, Eviction
from kvkeep.compression.methods.observed import observed


class H2O(Eviction):
    """Keeps the cells that attention added up on.

    Over the newest 128 queries: the paper adds up over all, which takes the shares of every
    prefill step from a kernel that never has them as a whole.
    """

    name: ClassVar[str] = "h2o"
    observes: ClassVar[bool] = True

    def score(self, candidates: Candidates) -> Tensor:
        return attention(candidates, observed(candidates, MAX_QUERIES)).sum(2)

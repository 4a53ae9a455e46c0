"""Methods that score cells by the attention of the newest, observed queries."""

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from kvkeep.cache import Queries
from kvkeep.cache.observer import MAX_QUERIES
from kvkeep.compression.methods.attention import attention
from kvkeep.compression.methods.base import Candidates, Eviction

SNAPKV_QUERIES = 32
SNAPKV_POOL = 7  # cells


def observed(candidates: Candidates, count: int) -> Queries:
    """Return the last `count` queries. Raises ValueError if none were observed."""
    if candidates.queries is None:
        raise ValueError("this method decides by queries, and none were observed")
    return candidates.queries.newest(count)


def max_pooled(score: Tensor, width: int) -> Tensor:
    """Return the largest score among neighbours, so that neighbours are kept together."""
    layers, kv_heads, count = score.shape
    flat = F.max_pool1d(score.flatten(0, 1), width, stride=1, padding=width // 2)
    return flat.view(layers, kv_heads, count)


class SnapKV(Eviction):
    """Keeps the cells that the last 32 queries attended to most, and their neighbours.

    Li et al., arXiv:2404.14469.
    """

    name: ClassVar[str] = "snapkv"
    uses_queries: ClassVar[bool] = True

    def score(self, candidates: Candidates) -> Tensor:
        weights = attention(candidates, observed(candidates, SNAPKV_QUERIES))
        return max_pooled(weights.mean(2), SNAPKV_POOL)


class H2O(Eviction):
    """Keeps heavy hitters, the cells with the largest sum of attention (Zhang et al., 2306.14048).

    Sums over the newest 128 queries. The paper sums over all, which needs the attention weights of
    every prefill step; the kernels never have these as a whole.
    """

    name: ClassVar[str] = "h2o"
    uses_queries: ClassVar[bool] = True

    def score(self, candidates: Candidates) -> Tensor:
        return attention(candidates, observed(candidates, MAX_QUERIES)).sum(2)


class TOVA(Eviction):
    """Keeps the cells that the newest query attends to most, the same ones in all KV heads.

    Oren et al., arXiv:2401.06104.
    """

    name: ClassVar[str] = "tova"
    uses_queries: ClassVar[bool] = True

    def score(self, candidates: Candidates) -> Tensor:
        weights = attention(candidates, observed(candidates, 1)).squeeze(2)
        return weights.mean(1, keepdim=True).expand(candidates.shape)

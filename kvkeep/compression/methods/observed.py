"""What methods that decide by attention have in common."""

import torch.nn.functional as F
from torch import Tensor

from kvkeep.cache import Queries
from kvkeep.compression.methods.base import Candidates


def observed(candidates: Candidates, count: int) -> Queries:
    """The last `count` queries. Raises ValueError where none were observed."""
    if candidates.queries is None:
        raise ValueError("this method decides by queries, and none were observed")
    return candidates.queries.newest(count)


def smoothed(score: Tensor, width: int) -> Tensor:
    """The greatest score among neighbours, so that what stands together stays together."""
    layers, kv_heads, count = score.shape
    flat = F.max_pool1d(score.flatten(0, 1), width, stride=1, padding=width // 2)
    return flat.view(layers, kv_heads, count)

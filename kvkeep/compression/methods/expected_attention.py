"""Method `expected_attention`: the expected attention of future queries (arXiv:2510.00636)."""

from typing import ClassVar

import torch
from torch import Tensor

from kvkeep.cache.observer import MAX_QUERIES
from kvkeep.compression.methods.attention import by_kv_head
from kvkeep.compression.methods.base import Candidates, Eviction
from kvkeep.compression.methods.observed_attention import observed
from kvkeep.compression.methods.statistics import Statistics

AHEAD = 512  # future positions that the expectation is taken over
EPSILON = 1e-2


class ExpectedAttention(Eviction):
    """Keeps the cells with the highest expected attention, times the norm of their values.

    Devoto et al. Queries are modelled as normally distributed, with the mean and covariance of the
    observed ones or of a calibration; their rotation as the mean over the next 512 positions.
    """

    name: ClassVar[str] = "expected_attention"
    uses_queries: ClassVar[bool] = True

    def needs_queries(self, statistics: Statistics | None) -> bool:
        return statistics is None

    def score(self, candidates: Candidates) -> Tensor:
        mean, covariance = _distribution(candidates)
        rotation = _mean_rotation(candidates)
        mean = (rotation @ mean.unsqueeze(-1)).squeeze(-1)
        covariance = rotation @ covariance @ rotation.mT
        keys = candidates.cells.keys.float() * candidates.scale
        logits = (keys @ mean.unsqueeze(-1)).squeeze(-1)
        logits = logits + ((keys @ covariance) * keys).sum(-1) / 2 + candidates.bias
        norms: Tensor = candidates.cells.values.float().norm(dim=-1)
        return (logits.softmax(-1) + EPSILON) * norms


def _distribution(candidates: Candidates) -> tuple[Tensor, Tensor]:
    """Mean `[layers, kv_heads, head_dim]` and covariance `[..., head_dim, head_dim]`."""
    statistics = candidates.statistics
    if statistics is not None:
        outer = statistics.mean.unsqueeze(-1) * statistics.mean.unsqueeze(-2)
        return statistics.mean, statistics.moment - outer
    samples = by_kv_head(observed(candidates, MAX_QUERIES).values, candidates.shape[1])
    mean = samples.mean(2)
    centred = samples - mean.unsqueeze(2)
    return mean, centred.transpose(-1, -2) @ centred / samples.shape[2]


def _mean_rotation(candidates: Candidates) -> Tensor:
    """The mean rotation matrix over the future positions, `[head_dim, head_dim]`.

    `[layers, 1, head_dim, head_dim]` if some layers do not rotate.
    """
    first = int(candidates.positions.max()) + 1
    rotation = candidates.rope.at(range(first, first + AHEAD))
    width = rotation.cosine.shape[-1]
    matrix = torch.diag(rotation.cosine.mean((0, 1)))
    swap = torch.eye(width, dtype=torch.float32, device=matrix.device).roll(width // 2, 1)
    matrix = matrix + rotation.sine.mean((0, 1)).unsqueeze(-1) * swap
    if not candidates.rope.unrotated:
        return matrix
    layers = matrix.expand(candidates.shape[0], 1, -1, -1).clone()
    layers[list(candidates.rope.unrotated)] = torch.eye(
        width, dtype=torch.float32, device=matrix.device
    )
    return layers

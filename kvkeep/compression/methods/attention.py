"""Attention of queries to cells, and the methods that score cells by it."""

import math
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kvkeep.cache import Cells, Queries, softcapped
from kvkeep.cache.observer import MAX_QUERIES
from kvkeep.compression.methods.base import Candidates, Eviction
from kvkeep.compression.methods.statistics import Statistics

SNAPKV_QUERIES = 32
SNAPKV_POOL_CELLS = 7  # neighbours that share their highest score, the cell itself included
FUTURE_POSITIONS = 512  # of future queries, over which `ExpectedAttention` averages
_QUADRATURE_POINTS = 16  # of its expectations where logits have a softcap
EXPECTED_FLOOR = 1e-2  # added to expected attention, so that the norms of values always count


class SnapKV(Eviction):
    """Keeps the cells that the last 32 queries attended to most, and their neighbours.

    Li et al., arXiv:2404.14469.
    """

    name: ClassVar[str] = "snapkv"
    uses_queries: ClassVar[bool] = True

    def score(self, candidates: Candidates) -> Tensor:
        weights = attention_weights(candidates, newest_queries(candidates, SNAPKV_QUERIES))
        return max_pool(weights.mean(2), SNAPKV_POOL_CELLS)


class H2O(Eviction):
    """Keeps heavy hitters, the cells with the largest sum of attention (Zhang et al., 2306.14048).

    Sums over the newest 128 queries. The paper sums over all, but the kernels never hold the
    attention weights of a whole prefill step.
    """

    name: ClassVar[str] = "h2o"
    uses_queries: ClassVar[bool] = True

    def score(self, candidates: Candidates) -> Tensor:
        return attention_weights(candidates, newest_queries(candidates, MAX_QUERIES)).sum(2)


class TOVA(Eviction):
    """Keeps the cells that the newest query attends to most, the same ones in all KV heads.

    Oren et al., arXiv:2401.06104.
    """

    name: ClassVar[str] = "tova"
    uses_queries: ClassVar[bool] = True

    def score(self, candidates: Candidates) -> Tensor:
        weights = attention_weights(candidates, newest_queries(candidates, 1)).squeeze(2)
        return weights.mean(1, keepdim=True).expand(candidates.shape)


class ExpectedAttention(Eviction):
    """Keeps the cells with the highest expected attention, times the norm of their values.

    Devoto et al., arXiv:2510.00636. Future queries are modelled as normally distributed, with the
    mean and covariance of the observed queries or of a calibration, and with the mean rotation of
    the next 512 positions. With a softcap of logits, the expectation is integrated numerically.
    """

    name: ClassVar[str] = "expected_attention"
    uses_queries: ClassVar[bool] = True

    def needs_queries(self, statistics: Statistics | None) -> bool:
        return statistics is None

    def score(self, candidates: Candidates) -> Tensor:
        mean, covariance = _query_distribution(candidates)
        rotation = _mean_rotation(candidates)
        mean = (rotation @ mean.unsqueeze(-1)).squeeze(-1)
        covariance = rotation @ covariance @ rotation.mT
        keys = candidates.keys * candidates.scale
        mean_logits = (keys @ mean.unsqueeze(-1)).squeeze(-1)
        variances = ((keys @ covariance) * keys).sum(-1)
        log_weights = _log_mean_exp(mean_logits, variances, candidates.softcap) + candidates.bias
        norms: Tensor = candidates.cells.values.float().norm(dim=-1)
        return (log_weights.softmax(-1) + EXPECTED_FLOOR) * norms


def _log_mean_exp(means: Tensor, variances: Tensor, softcap: float) -> Tensor:
    """Return `log E[exp(x)]` of normally distributed logits, which a softcap may bound."""
    if not softcap:
        return means + variances / 2
    points, weights = np.polynomial.hermite_e.hermegauss(_QUADRATURE_POINTS)
    spread, total = variances.clamp_min(0).sqrt(), torch.full_like(means, -torch.inf)
    for point, weight in zip(points.tolist(), (weights / weights.sum()).tolist(), strict=True):
        capped = softcapped(means + point * spread, softcap)
        total = torch.logaddexp(total, capped + math.log(weight))
    return total


def newest_queries(candidates: Candidates, count: int) -> Queries:
    """Return the last `count` observed queries. Raises ValueError if none were observed."""
    if candidates.queries is None:
        raise ValueError("this method needs observed queries, and there are none")
    return candidates.queries.newest(count)


def max_pool(scores: Tensor, width: int) -> Tensor:
    """Return the maximum of the `width` scores around each of `[layers, kv_heads, n]`."""
    pooled = F.max_pool1d(scores.flatten(0, 1), width, stride=1, padding=width // 2)
    return pooled.view_as(scores)


def group_by_kv_head(queries: Tensor, kv_heads: int) -> Tensor:
    """Map `[layers, heads, m, head_dim]` to `[layers, kv_heads, groups * m, head_dim]` float32."""
    return queries.float().reshape(len(queries), kv_heads, -1, queries.shape[-1])


def attention_weights(candidates: Candidates, queries: Queries) -> Tensor:
    """Return attention weights, averaged over query groups: `[layers, kv_heads, queries, n]`."""
    return logits(candidates, candidates.cells, queries).softmax(-1).nan_to_num_().mean(2)


def logits(candidates: Candidates, cells: Cells, queries: Queries) -> Tensor:
    """Return attention logits with bias, `[layers, kv_heads, groups, queries, n]` float32.

    They are -inf for cells at later positions than the query's time.
    """
    kv_heads, rope = cells.keys.shape[1], candidates.rope
    rotation = rope.rotation_at(queries.times)
    rotated = rope.rotate_layers(queries.vectors.float().unsqueeze(-2), rotation).squeeze(-2)
    grouped_queries = group_by_kv_head(rotated, kv_heads)
    products = (grouped_queries @ cells.keys.float().transpose(-1, -2)) * candidates.scale
    products = softcapped(products, candidates.softcap)
    result = products.view(*products.shape[:2], -1, len(queries), len(cells))
    if cells.bias is not None:
        result += cells.bias[:, :, None, None]
    if int(queries.times[0]) < int(cells.positions.max()):
        positions = cells.positions.expand(*result.shape[:2], -1)[:, :, None, None]
        is_later = positions > queries.times[:, None]
        result.masked_fill_(is_later.to(result.device), -torch.inf)
    return result


def output_error(candidates: Candidates, remaining: Cells, queries: Queries) -> Tensor:
    """Return the relative squared error of attention output over the remaining cells only.

    The candidates are part of a longer context, for which a second copy of them stands: so a change
    of their softmax mass counts as well. Returns `[layers, kv_heads]`.
    """

    def weighted_sums(cells: Cells, max_logits: Tensor) -> Tensor:
        """Return the sum of weighted values, and in the last column the sum of weights."""
        weights = (logits(candidates, cells, queries) - max_logits).exp()
        values = cells.values.float().unsqueeze(2)
        return torch.cat((weights @ values, weights.sum(-1, keepdim=True)), -1)

    max_logits = logits(candidates, candidates.cells, queries).amax(-1, keepdim=True)
    sums = weighted_sums(candidates.cells, max_logits)
    expected = sums[..., :-1] / sums[..., -1:]
    sums_with_context = weighted_sums(remaining, max_logits) + sums
    output = sums_with_context[..., :-1] / sums_with_context[..., -1:]
    return (output - expected).square().sum((2, 3, 4)) / expected.square().sum((2, 3, 4))


def _query_distribution(candidates: Candidates) -> tuple[Tensor, Tensor]:
    """Return the mean `[layers, kv_heads, head_dim]` and covariance `[..., head_dim, head_dim]`."""
    statistics = candidates.statistics
    if statistics is not None:
        mean, moment = (x.to(candidates.bias.device) for x in (statistics.mean, statistics.moment))
        outer = mean.unsqueeze(-1) * mean.unsqueeze(-2)
        return mean, moment - outer
    samples = group_by_kv_head(newest_queries(candidates, MAX_QUERIES).vectors, candidates.shape[1])
    mean = samples.mean(2)
    centred = samples - mean.unsqueeze(2)
    return mean, centred.transpose(-1, -2) @ centred / samples.shape[2]


def _mean_rotation(candidates: Candidates) -> Tensor:
    """Return the mean rotation matrix over the future positions.

    `[head_dim, head_dim]`, or `[layers, 1, head_dim, head_dim]` if some layers do not rotate.
    """
    first_position = int(candidates.positions.max()) + 1
    rotation = candidates.rope.rotation_at(range(first_position, first_position + FUTURE_POSITIONS))
    head_dim, unrotated = rotation.cosine.shape[-1], list(candidates.rope.unrotated_layers)
    identity = torch.eye(head_dim, dtype=torch.float32, device=rotation.cosine.device)
    # Rotation multiplies element i by its cosine, and adds element i + head_dim / 2 times the sine.
    matrix = torch.diag(rotation.cosine.mean((0, 1)))
    matrix = matrix + rotation.sine.mean((0, 1)).unsqueeze(-1) * identity.roll(head_dim // 2, 1)
    if not unrotated:
        return matrix
    layer_matrices = matrix.expand(candidates.shape[0], 1, -1, -1).clone()
    layer_matrices[unrotated] = identity
    return layer_matrices

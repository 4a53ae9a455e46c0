"""Residual cells fitted to queries: they get the attention and the output of evicted cells."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvkeep.cache import softcapped
from kvkeep.compression.methods.clusters import MIN_SHARE, Clusters, HeadCells, MeanCells

RIDGE = 1e-2  # penalty of a fitted value's distance from the mean, relative to the mean square


@dataclass(frozen=True)
class QueriedCells:
    """One run's cells in some KV heads, and the queries that attend to them.

    queries: `[heads, rows, head_dim]` float32, rotated and scaled.
    """

    cells: HeadCells
    queries: Tensor

    def logits(self, keys: Tensor, bias: Tensor, softcap: float) -> Tensor:
        """Return the logits of keys with biases, `[heads, rows, n]` float32."""
        bias = bias.unsqueeze(1)
        if not softcap:
            return torch.baddbmm(bias, self.queries, keys.float().mT)
        return softcapped(self.queries @ keys.float().mT, softcap) + bias

    def evicted_rows(self) -> Tensor:
        """Return the values of evicted cells and a 1, `[heads, n, head_dim + 1]`; 0 of others."""
        values, evicted = self.cells.values, self.cells.evicted.unsqueeze(-1).float()
        rows = values.new_empty(*values.shape[:2], values.shape[2] + 1)
        torch.mul(values, evicted, out=rows[..., :-1])
        rows[..., -1:] = evicted
        return rows


@dataclass(frozen=True)
class _Attention:
    """Attention of queries to the cells of all runs.

    log_sums: `[heads, rows, 1]`. output, kept_output: `[heads, rows, head_dim]`, over all cells and
    over those that stay. evicted_share: `[heads, rows, 1]`. shares: for each run that evicts
    `[heads, n]`, each cell's mean weight.
    """

    log_sums: Tensor
    output: Tensor
    kept_output: Tensor
    evicted_share: Tensor
    shares: tuple[Tensor, ...]

    @classmethod
    def of(
        cls, parts: Sequence[QueriedCells], num_evicting: int, softcap: float, sinks: Tensor | None
    ) -> "_Attention":
        """Compute attention; the first `num_evicting` parts evict cells."""
        evicting = parts[:num_evicting]
        logits = [part.logits(part.cells.keys, part.cells.bias, softcap) for part in parts]
        largest = torch.cat([x.amax(-1, keepdim=True) for x in logits], -1).amax(-1, keepdim=True)
        weights = [x.sub_(largest).exp_() for x in logits]
        totals = _total(x.sum(-1, keepdim=True) for x in weights)
        if sinks is not None:
            column = sinks.float().repeat_interleave(largest.shape[1] // sinks.shape[1], 1)
            totals = totals + (column.unsqueeze(-1) - largest).exp()
        output = _total(x @ part.cells.values for x, part in zip(weights, parts, strict=True))
        evicted = _total(
            x @ part.evicted_rows() for x, part in zip(weights, evicting, strict=False)
        )
        row_shares = 1 / totals.mT / totals.shape[1]
        return cls(
            largest + totals.log(),
            output / totals,
            (output - evicted[..., :-1]) / totals,
            evicted[..., -1:] / totals,
            tuple((row_shares @ x).squeeze(1) for x in weights[:num_evicting]),
        )


def fitted_cells(
    parts: Sequence[QueriedCells],
    clusters: Sequence[Clusters],
    dtype: torch.dtype,
    softcap: float,
    sinks: Tensor | None,
) -> list[MeanCells]:
    """Return the cells of each part's clusters, fitted to what the queries got from evicted cells.

    parts: all cells that the queries attend to; first those with clusters. sinks: `[heads,
    groups]`.

    With p a query's attention weights over all cells, E the evicted ones and w the weights that it
    would give to the residual cells: means are weighted by each cell's mean p; the bias of all is
    chosen so that the sum of w over queries is that of p over E; and the values v are those that
    bring (sum of p v over cells that stay + sum of w v) / (1 - p(E) + sum of w) closest to the
    output over all cells.
    """
    attention = _Attention.of(parts, len(clusters), softcap, sinks)
    means, residual_weights = [], []
    for part, cluster, shares in zip(parts, clusters, attention.shares, strict=False):
        cells = cluster.mean_cells(shares, dtype)
        means.append(cells)
        logits = part.logits(cells.keys, cells.bias, softcap)
        residual_weights.append((logits - attention.log_sums).exp())
    weights, evicted_share = torch.cat(residual_weights, -1), attention.evicted_share
    evicted_total, residual_total = (
        x.sum((1, 2), keepdim=True).clamp(min=MIN_SHARE) for x in (evicted_share, weights)
    )
    correction = evicted_total / residual_total
    weights = weights * correction
    share = 1 - evicted_share + weights.sum(-1, keepdim=True)
    mean_values = torch.cat([cells.values for cells in means], 1)
    target = attention.output - attention.kept_output / share
    values = _ridge(weights / share, target, mean_values)
    values_by_part = torch.split(values, [cells.keys.shape[1] for cells in means], 1)
    shift = correction.log().squeeze(-1)
    return [
        replace(cells, values=part_values, bias=cells.bias + shift)
        for cells, part_values in zip(means, values_by_part, strict=True)
    ]


def _total(parts: Iterator[Tensor]) -> Tensor:
    return torch.stack(list(parts)).sum(0)


def _ridge(weights: Tensor, target: Tensor, means: Tensor) -> Tensor:
    """Return values v for which `weights @ v` is near the target, and v near the means; float32.

    weights: `[heads, rows, count]`. target: `[heads, rows, head_dim]`. A cluster without
    cells has weights of 0.
    """
    if not means.shape[1]:
        return means
    matrices, right_sides = weights.mT @ weights, weights.mT @ (target - weights @ means)
    diagonals = matrices.diagonal(dim1=-2, dim2=-1)
    num_used = (diagonals > 0).sum(-1).clamp(min=1)
    diagonals += RIDGE * (diagonals.sum(-1) / num_used).clamp(min=MIN_SHARE).unsqueeze(-1)
    return means + torch.cholesky_solve(right_sides, torch.linalg.cholesky_ex(matrices).L)

"""Clusters of the cells that KV heads evict, and the mean cell of each cluster."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvkeep.cache import NO_TOKEN, Cells

ITERATIONS = 4  # of k-means
POINTS = 8  # cells per cluster that k-means looks at before it assigns all
VALUE_WEIGHT = 0.5  # of values in distances between cells, relative to keys
MIN_SHARE = 1e-30  # of attention, so that a cell without any still has a place in a mean
MAX_PRODUCTS = 2**20  # of cells and clusters at a time


@dataclass(frozen=True)
class HeadCells:
    """The cells of one run in some KV heads, and which of them are evicted.

    keys, values: `[heads, n, head_dim]` float32, keys rotated. positions: `[heads, n]`.
    bias: `[heads, n]` float32; -inf where a head has fewer cells than others. evicted:
    `[heads, n]` bool.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    bias: Tensor
    evicted: Tensor


@dataclass(frozen=True)
class MeanCells:
    """One cell for each cluster of some KV heads.

    keys, values: `[heads, count, head_dim]`, keys in the cells' data type. positions, bias:
    `[heads, count]`. used: `[heads, count]` bool; the others are of clusters without cells.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    bias: Tensor
    used: Tensor

    @classmethod
    def join(cls, parts: "Sequence[MeanCells]", layers: int) -> tuple[Cells, Tensor]:
        """Return the cells of all KV heads, `[layers, kv_heads, count, ...]`, and which are used.

        parts: of groups of heads, those of layer 0 first.
        """
        rows = (
            torch.cat([getattr(part, name) for part in parts])
            for name in ("keys", "values", "positions", "bias", "used")
        )
        keys, values, positions, bias, used = (
            x.view(layers, len(x) // layers, *x.shape[1:]) for x in rows
        )
        serials = torch.full((keys.shape[2],), NO_TOKEN, dtype=torch.int64, device="cpu")
        return Cells(keys, values.to(keys.dtype), positions, serials, bias), used


@dataclass(frozen=True)
class Clusters:
    """Clusters of evicted cells, at most `count` in each KV head.

    labels: `[heads, n]`, `0 ... count - 1`; without a meaning for cells that stay.
    """

    cells: HeadCells
    labels: Tensor
    count: int

    @classmethod
    def of(cls, cells: HeadCells, count: int, key_scales: Tensor) -> "Clusters":
        """Cluster evicted cells by k-means.

        key_scales: `[heads, head_dim]`, the weight of each element of a key in distances.
        """
        evicted = cells.evicted
        if not count or not evicted.any():
            return cls(cells, torch.zeros_like(evicted, dtype=torch.int64), count)
        features = _features(cells, key_scales)
        # The first clusters are runs of neighbours; there are no more of them than cells.
        ranks, counts = evicted.cumsum(-1) - 1, evicted.sum(-1, keepdim=True)
        first_labels = (ranks * counts.clamp(max=count) // counts.clamp(min=1)).clamp(min=0)
        masses = cells.bias.exp() * evicted
        return cls(cells, _k_means(features, masses, first_labels, count), count)

    def mean_cells(self, shares: Tensor, dtype: torch.dtype) -> MeanCells:
        """Return each cluster's mean cell, with the log of its mass as bias.

        shares: `[heads, n]`, the weights of cells in the means of keys, values and positions.
        """
        cells = self.cells
        weights = shares.clamp(min=MIN_SHARE) * cells.evicted
        totals = _totals(self.labels, weights, self.count)
        weights = (
            weights / totals.gather(1, self.labels).clamp(min=MIN_SHARE) if self.count else weights
        )
        both = torch.cat((cells.keys, cells.values), -1)
        means = _weighted_sums(self.labels, weights, both, self.count)
        keys, values = means.chunk(2, -1)
        positions = weights.cpu().double() * cells.positions
        positions = _totals(self.labels.cpu(), positions, self.count).round().long()
        bias = _totals(self.labels, cells.bias.exp() * cells.evicted, self.count).log()
        return MeanCells(keys.to(dtype), values, positions, bias, (totals > 0).cpu())


def _totals(labels: Tensor, weights: Tensor, count: int) -> Tensor:
    """Return the sum of each cluster's weights, `[heads, count]`."""
    totals = weights.new_zeros(len(labels), count)
    return totals.scatter_add_(1, labels, weights) if count else totals


def _weighted_sums(labels: Tensor, weights: Tensor, x: Tensor, count: int) -> Tensor:
    """Return the weighted sums over clusters of `x: [heads, n, width]`."""
    heads, _, width = x.shape
    sums = x.new_zeros(heads * count, width)
    if count:
        first_rows = torch.arange(heads, dtype=torch.int64, device=x.device).unsqueeze(1) * count
        rows = (x * weights.unsqueeze(-1)).view(-1, width)
        sums.index_add_(0, (labels + first_rows).view(-1), rows)
    return sums.view(heads, count, width)


def _parts(products: int, n: int) -> list[slice]:
    """Return slices of `n` cells, each with a bounded number of products in all."""
    step = max(1, MAX_PRODUCTS // products)
    return [slice(start, start + step) for start in range(0, n, step)]


def _features(cells: HeadCells, key_scales: Tensor) -> Tensor:
    """Return what cells are clustered by: scaled keys, centred values, and a one.

    Returns `[heads, n, 2 head_dim + 1]`.
    """
    evicted = cells.evicted.unsqueeze(-1).float()
    shares = evicted / evicted.sum(1, keepdim=True).clamp(min=1)
    keys, values = cells.keys * key_scales.unsqueeze(1), cells.values
    values = values - shares.mT @ values
    key_norm, value_norm = (
        shares.mT @ torch.linalg.vector_norm(x, dim=-1, keepdim=True) for x in (keys, values)
    )
    value_scale = VALUE_WEIGHT * key_norm / value_norm.clamp(min=1e-9)
    return torch.cat((keys, values * value_scale, torch.ones_like(keys[..., :1])), -1)


def _k_means(features: Tensor, masses: Tensor, labels: Tensor, count: int) -> Tensor:
    """Return each cell's cluster, `[heads, n]`.

    features: `[heads, n, width]`, the last element 1. masses: `[heads, n]`, the weights of
    cells in means, 0 for those that stay. labels: the first clusters.
    """
    stride = max(1, features.shape[1] // (POINTS * count))
    some, some_masses, labels_of_some = (x[:, ::stride] for x in (features, masses, labels))
    sums = _weighted_sums(labels, masses, features, count)
    # The nearest centre c of x has the least |c|^2 - 2 x c. Clusters without cells are never near.
    centres = torch.zeros_like(sums)
    centres[..., -1] = -torch.inf
    for iteration in range(ITERATIONS):
        totals = sums[..., -1:]
        means = sums[..., :-1] / totals
        offsets = -means.square().sum(-1, keepdim=True) / 2
        centres = torch.where(totals > 0, torch.cat((means, offsets), -1), centres)
        if iteration == ITERATIONS - 1:
            break
        labels_of_some = _nearest(some, centres)
        sums = _weighted_sums(labels_of_some, some_masses, some, count)
    return _nearest(features, centres)


def _nearest(features: Tensor, centres: Tensor) -> Tensor:
    """Return the index of the centre with the largest product with each row, `[heads, n]`."""
    parts = _parts(len(features) * centres.shape[1], features.shape[1])
    return torch.cat([(features[:, part] @ centres.mT).argmax(-1) for part in parts], -1)

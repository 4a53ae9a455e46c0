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
        return cls(cells, _k_means(cells, count, key_scales), count)

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
        members = _memberships(self.labels, weights, self.count)
        keys, values = members @ cells.keys, members @ cells.values
        positions = weights.cpu().double() * cells.positions
        positions = _totals(self.labels.cpu(), positions, self.count).round().long()
        bias = _totals(self.labels, cells.bias.exp() * cells.evicted, self.count).log()
        return MeanCells(keys.to(dtype), values, positions, bias, (totals > 0).cpu())


def _totals(labels: Tensor, weights: Tensor, count: int) -> Tensor:
    """Return the sum of each cluster's weights, `[heads, count]`."""
    totals = weights.new_zeros(len(labels), count)
    return totals.scatter_add_(1, labels, weights) if count else totals


def _memberships(labels: Tensor, weights: Tensor, count: int) -> Tensor:
    """Return each cell's weight in its cluster and 0 in others, `[heads, count, n]`.

    A product with it sums over clusters, several times as fast as `index_add_`.
    """
    clusters = torch.arange(count, dtype=torch.int64, device=labels.device).unsqueeze(1)
    return (labels.unsqueeze(1) == clusters) * weights.unsqueeze(1)


def _parts(products: int, n: int) -> list[slice]:
    """Return slices of `n` cells, each with a bounded number of products in all."""
    step = max(1, MAX_PRODUCTS // products)
    return [slice(start, start + step) for start in range(0, n, step)]


def _element_weights(cells: Tensor, key_scales: Tensor) -> Tensor:
    """Return how much the square of each element's difference counts, `[heads, 1, 2 head_dim]`.

    cells: `[heads, n, 2 head_dim]`, keys and values. Values are scaled so that the distance from
    their mean is on average `VALUE_WEIGHT` times the norm of the scaled keys.
    """
    keys, values = cells.chunk(2, -1)
    scales = key_scales.unsqueeze(1)
    key_norm, value_norm = (
        torch.linalg.vector_norm(x, dim=-1).mean(1)[:, None, None]
        for x in (keys * scales, values - values.mean(1, keepdim=True))
    )
    value_scale = VALUE_WEIGHT * key_norm / value_norm.clamp(min=1e-9)
    return torch.cat((scales, value_scale.expand_as(scales)), -1).square()


def _evenly_spaced(cells: HeadCells, num: int) -> tuple[Tensor, Tensor]:
    """Return `num` of the evicted cells of each head, keys and values: `[heads, num, 2 head_dim]`.

    Also their masses, `[heads, num]`. A head that evicts fewer has some of them twice.
    """
    ends = cells.evicted.cumsum(-1)
    ranks = torch.arange(num, dtype=torch.int64, device=ends.device) * ends[:, -1:] // num + 1
    columns = torch.searchsorted(ends, ranks).clamp(max=ends.shape[1] - 1)
    rows = torch.arange(len(ends), dtype=torch.int64, device=ends.device).unsqueeze(1)
    keys_and_values = torch.cat((cells.keys[rows, columns], cells.values[rows, columns]), -1)
    return keys_and_values, (cells.bias.exp() * cells.evicted)[rows, columns]


def _k_means(cells: HeadCells, count: int, key_scales: Tensor) -> Tensor:
    """Return each evicted cell's cluster, `[heads, n]`.

    The first clusters are runs of neighbours.
    """
    num = min(cells.keys.shape[1], POINTS * count)
    some, masses = _evenly_spaced(cells, num)
    weights = _element_weights(some, key_scales)
    labels = torch.arange(num, dtype=torch.int64, device=some.device) * count // num
    labels = labels.expand_as(masses)
    # The nearest centre c of x has the largest w c x - w c^2 / 2, with the elements' weights w.
    # Clusters without cells are never near.
    centres = some.new_zeros(len(some), count, some.shape[2])
    offsets = some.new_full((len(some), 1, count), -torch.inf)
    for iteration in range(ITERATIONS):
        members = _memberships(labels, masses, count)
        totals = members.sum(-1, keepdim=True)
        means = members @ some / totals
        scaled = means * weights
        centres = torch.where(totals > 0, scaled, centres)
        squares = (scaled * means).sum(-1).unsqueeze(1)
        offsets = torch.where(totals.mT > 0, -squares / 2, offsets)
        if iteration < ITERATIONS - 1:
            labels = torch.baddbmm(offsets, some, centres.mT).argmax(-1)
    key_centres, value_centres = (x.mT for x in centres.chunk(2, -1))
    products = (
        torch.baddbmm(offsets, cells.keys[:, part], key_centres).baddbmm_(
            cells.values[:, part], value_centres
        )
        for part in _parts(len(labels) * count, cells.keys.shape[1])
    )
    return torch.cat([each.argmax(-1) for each in products], -1)

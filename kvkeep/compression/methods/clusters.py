"""Clusters of the cells that a KV head evicts, and the mean cell of each cluster."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvkeep.cache import NO_TOKEN, Cells

ITERATIONS = 8  # of k-means
VALUE_WEIGHT = 0.5  # of values in distances between cells, relative to keys
MIN_SHARE = 1e-30  # of attention, so that a cell without any still has a place in a mean


@dataclass(frozen=True)
class Clusters:
    """Evicted cells of one KV head, and the cluster that each belongs to.

    keys, values: `[n, head_dim]` float32, keys rotated. positions: `[n]`. masses: `[n]` float32,
    how many tokens a cell stands for. labels: `[n]`, `0 ... count - 1`; no cluster is empty.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    masses: Tensor
    labels: Tensor
    count: int

    @classmethod
    def of(cls, cells: Cells, count: int, key_scales: Tensor) -> "Clusters":
        """Cluster the compressed cells `[1, 1, n, ...]` of one head into at most `count` clusters.

        key_scales: `[head_dim]`, the weight of each element of a key in distances.
        """
        count = min(count, len(cells))
        if not count:
            cells = cells.part(slice(0, 0))
        keys, values = (x[0, 0].float() for x in (cells.keys, cells.values))
        masses = cells.to_compressed_format().bias[0, 0].exp()  # type: ignore[index]
        labels = torch.zeros(0, dtype=torch.int64, device=keys.device)
        if count:
            labels = _k_means(_features(keys, values, key_scales), masses, count)
        used, labels = torch.unique(labels, return_inverse=True)
        return cls(keys, values, cells.positions[0, 0], masses, labels, len(used))

    def sums(self, x: Tensor) -> Tensor:
        """Return the sums over clusters of `[n, ...]`."""
        return x.new_zeros(self.count, *x.shape[1:]).index_add_(0, self.labels, x)

    def mean_cells(self, shares: Tensor, dtype: torch.dtype) -> Cells:
        """Return one cell `[1, 1, count, ...]` for each cluster, with the log of its mass as bias.

        shares: `[n]`, the weights of cells in the means of keys, values and positions.
        """
        shares = shares.clamp(min=MIN_SHARE)
        totals = self.sums(shares)
        weights = (shares / totals[self.labels]).unsqueeze(-1)
        means = (self.sums(x * weights).to(dtype) for x in (self.keys, self.values))
        keys, values = (mean[None, None] for mean in means)
        weights = weights[:, 0].cpu().double()
        positions = self.positions.new_zeros(self.count, dtype=torch.float64)
        positions.index_add_(0, self.labels.cpu(), self.positions.double() * weights)
        serials = torch.full((self.count,), NO_TOKEN, dtype=torch.int64, device="cpu")
        bias = self.sums(self.masses).log()[None, None]
        return Cells(keys, values, positions.round().long()[None, None], serials, bias)


def _features(keys: Tensor, values: Tensor, key_scales: Tensor) -> Tensor:
    """Return what cells are clustered by, `[n, 2 head_dim]`: scaled keys, and centred values."""
    keys, values = keys * key_scales, values - values.mean(0)
    value_scale = VALUE_WEIGHT * keys.norm(dim=-1).mean() / values.norm(dim=-1).mean().clamp(1e-9)
    return torch.cat((keys, values * value_scale), -1)


def _k_means(features: Tensor, masses: Tensor, count: int) -> Tensor:
    """Return each row's cluster, `[n]`. The first clusters are runs of neighbours.

    features: `[n, width]`. masses: `[n]`, the weights of rows in means.
    """
    n = len(features)
    labels = torch.arange(n, dtype=torch.int64, device=features.device) * count // n
    weighted = torch.cat((features, features.new_ones(n, 1)), -1) * masses.unsqueeze(-1)
    centres = features.new_zeros(count, features.shape[1])
    for _ in range(ITERATIONS):
        sums = weighted.new_zeros(count, weighted.shape[1]).index_add_(0, labels, weighted)
        totals = sums[:, -1:]
        centres = torch.where(totals > 0, sums[:, :-1] / totals, centres)  # empty ones stay
        # The nearest centre c of x has the least |c|^2 - 2 x c.
        products = torch.addmm(-centres.square().sum(-1) / 2, features, centres.T)
        labels = products.argmax(-1)
    return labels

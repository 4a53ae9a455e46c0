"""Simple methods for comparison: random choice, key norms and directions, and merging of runs."""

from abc import abstractmethod
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from kvkeep.cache import NO_TOKEN, Cells
from kvkeep.compression.methods.base import (
    Candidates,
    CellwiseEviction,
    CompressionResult,
    Eviction,
    Method,
)

EPSILON = 1e-12  # norm below which a key has no direction


class Random(Eviction):
    """Keeps random cells, different ones in each KV head: the baseline for all other methods."""

    name: ClassVar[str] = "random"

    def score(self, candidates: Candidates) -> Tensor:
        generator = torch.Generator("cpu").manual_seed(candidates.seed % 2**64)
        score = torch.rand(candidates.shape, generator=generator, dtype=torch.float32, device="cpu")
        return score.to(candidates.cells.keys.device)


class KNorm(CellwiseEviction):
    """Keeps the cells whose keys have the smallest norm, which attention was found to favour.

    Devoto et al., arXiv:2406.11430.
    """

    name: ClassVar[str] = "knorm"

    def cell_score(self, candidates: Candidates) -> Tensor:
        norms: Tensor = candidates.cells.keys.float().norm(dim=-1)
        return -norms


class KeyDiff(Eviction):
    """Keeps the cells whose rotated keys are least similar to the mean of all key directions.

    Park et al., arXiv:2504.15364.
    """

    name: ClassVar[str] = "keydiff"

    def score(self, candidates: Candidates) -> Tensor:
        return dissimilarity(candidates.keys, inverse_norms(candidates.keys))


def inverse_norms(x: Tensor) -> Tensor:
    """Return the inverse norm of each row of `[..., n, width]`."""
    norms: Tensor = x.norm(dim=-1)
    return 1 / norms.clamp(min=EPSILON)


def dissimilarity(x: Tensor, inverse_norms: Tensor) -> Tensor:
    """Return minus the cosine of each row of x, `[..., n, width]`, with their mean direction."""
    mean_direction = F.normalize(inverse_norms.unsqueeze(-2) @ x, dim=-1)
    cosines: Tensor = (x @ mean_direction.transpose(-1, -2)).squeeze(-1) * inverse_norms
    return -cosines


class RunMerging(Method):
    """Splits the cells into equal runs of neighbours, and merges each run to one cell.

    Keys are first rotated to the position of the run's last cell, which the merged cell takes.
    All three kinds are from llama.cpp's pull request 5719, which reports that they fail: averaging
    blurs distinct keys. If a key stands out by a logit gap D, its average with another keeps
    2 e^(-D/2) / (1 + e^-D) of its share of attention: 27% at a gap of 4.

    A merged cell's bias is the log of the mean mass of its cells, by the same weights: 0, unless
    some of them have biases of an earlier compression.
    """

    @abstractmethod
    def cell_weights(self, candidates: Candidates, run_indices: Tensor, sizes: Tensor) -> Tensor:
        """Return the weight of each cell in its merged cell, `[kv_heads, n]`.

        run_indices: `[n]`, each cell's run. sizes: `[runs]`, the number of cells in each run.
        """

    def compress(self, candidates: Candidates, count: int) -> CompressionResult:
        layers, kv_heads, total = candidates.shape
        run_indices = torch.arange(total, dtype=torch.int64, device="cpu") * count // total
        sizes = torch.bincount(run_indices, minlength=count)
        last_cells = sizes.cumsum(0) - 1
        positions = candidates.positions[..., last_cells]
        cells, rope = candidates.cells, candidates.rope
        shifts = cells.key_shifts(rope, positions[..., run_indices] - candidates.positions)
        keys = rope.shift(cells.keys.float(), shifts)
        device = keys.device
        weights = self.cell_weights(candidates, run_indices, sizes.float()).to(device).unsqueeze(-1)

        def merge(x: Tensor) -> Tensor:
            sums = x.new_zeros(layers, kv_heads, count, x.shape[-1])
            return sums.index_add_(2, run_indices.to(device), x * weights)

        merged_keys = merge(keys).to(cells.keys.dtype)
        merged_values = merge(cells.values.float()).to(cells.values.dtype)
        serials = torch.full((count,), NO_TOKEN, dtype=torch.int64, device="cpu")
        masses = candidates.bias.exp().unsqueeze(-1)
        bias = (merge(masses) / merge(torch.ones_like(masses))).log().squeeze(-1)
        merged_cells = Cells(merged_keys, merged_values, positions, serials, bias)
        return CompressionResult(merged_cells, merged=float(total - count))


class Average(RunMerging):
    """The mean key and value of each run."""

    name: ClassVar[str] = "average"

    def cell_weights(self, candidates: Candidates, run_indices: Tensor, sizes: Tensor) -> Tensor:
        return (1 / sizes)[run_indices].expand(candidates.shape[1], -1)


class Sum(RunMerging):
    """The summed keys and values of each run."""

    name: ClassVar[str] = "sum"

    def cell_weights(self, candidates: Candidates, run_indices: Tensor, sizes: Tensor) -> Tensor:
        return torch.ones(candidates.shape[1:], dtype=torch.float32, device="cpu")


class PickHeads(RunMerging):
    """One KV head from the run's first cell, the next head from the second, and so on."""

    name: ClassVar[str] = "pick_heads"

    def cell_weights(self, candidates: Candidates, run_indices: Tensor, sizes: Tensor) -> Tensor:
        kv_heads, count = candidates.shape[1:]
        run_starts = sizes.cumsum(0) - sizes
        indices = torch.arange(count, dtype=torch.int64, device="cpu")
        index_in_run = indices - run_starts[run_indices]
        heads = torch.arange(kv_heads, dtype=torch.int64, device="cpu").unsqueeze(-1)
        return (index_in_run == heads % sizes[run_indices]).float()

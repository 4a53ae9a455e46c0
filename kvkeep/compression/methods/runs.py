"""Merging by place: cells that would share a position of self-extend become one."""

from abc import abstractmethod

import torch
from torch import Tensor

from kvkeep.cache import NO_TOKEN, Cells
from kvkeep.compression.methods.base import Candidates, Compressed, Method


class RunMerging(Method):
    """Cuts the cells into runs of neighbours, as equal as can be, and makes each run one cell.

    Keys are first rotated to one position, the run's last; the cell then stands there.
    """

    @abstractmethod
    def weights(self, candidates: Candidates, run: Tensor, sizes: Tensor) -> Tensor:
        """`[kv_heads, n]`: how much of each cell goes into its run's.

        run: `[n]`, which one each cell is in. sizes: `[runs]`, cells in each.
        """

    def compress(self, candidates: Candidates, count: int) -> Compressed:
        layers, kv_heads, total = candidates.shape
        run = torch.arange(total, dtype=torch.int64, device="cpu") * count // total
        sizes = torch.bincount(run, minlength=count)
        last = sizes.cumsum(0) - 1
        positions = candidates.positions[..., last]
        cells, rope = candidates.cells, candidates.rope
        by = cells.key_shifts(rope, positions[..., run] - candidates.positions)
        keys = rope.shifted(cells.keys.float(), by)
        device = keys.device
        share = self.weights(candidates, run, sizes.float()).to(device).unsqueeze(-1)

        def merged(x: Tensor) -> Tensor:
            into = x.new_zeros(layers, kv_heads, count, x.shape[-1])
            return into.index_add_(2, run.to(device), x * share)

        return Compressed(
            Cells(
                merged(keys).to(candidates.cells.keys.dtype),
                merged(candidates.cells.values.float()).to(candidates.cells.values.dtype),
                positions,
                torch.full((count,), NO_TOKEN, dtype=torch.int64, device="cpu"),
                torch.zeros(layers, kv_heads, count, dtype=torch.float32, device=device),
            ),
            merged=float(total - count),
        )

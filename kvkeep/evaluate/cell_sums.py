"""Sums over cells of passages and the queries that attend to them, which a basis is fitted to."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvkeep.cache import Cells, Layout
from kvkeep.compression.methods.attention import group_by_kv_head
from kvkeep.evaluate.calibrate import Progress
from kvkeep.evaluate.loss_probe import SINKS, STEP_TOKENS
from kvkeep.loaded_model import LoadedModel
from kvkeep.policies import Full
from kvkeep.session.evaluation import evaluate
from kvkeep.session.memory import Memory
from kvkeep.storage.lossy.basis import layer_groups
from kvkeep.storage.lossy.cells import rotate

MAX_GROUP_LAYERS, MAX_WIDTH = 5, 2048  # of a group: layers that are coded together, and numbers
_MIN_WEIGHT = 1e-3  # of a direction of keys, relative to the mean
_MIN_VARIANCE = 1e-12  # of a head's values
_MAX_DISTANCE, _DISTANCES = 1000, 41  # from a query to the keys that it attends to


class CellSums:
    """Sums over the cells of passages, and over the queries that attend to them."""

    def __init__(self, model: LoadedModel):
        self.model = model
        layout = self.layout = model.decoder.new_cache().layout
        self.count = 0
        heads = layout.layers, layout.kv_heads
        self.query_outer = torch.zeros(
            *heads, layout.head_dim, layout.head_dim, dtype=torch.float32, device="cpu"
        )
        self.query_count = 0
        width = layout.kv_heads * layout.head_dim
        sizes = [(g.stop - g.start) * width for g in cell_groups(layout)]
        self.sums = {
            name: [torch.zeros(size, dtype=torch.float32, device="cpu") for size in sizes]
            for name in ("keys", "values")
        }
        self.outers = {
            name: [torch.zeros(size, size, dtype=torch.float32, device="cpu") for size in sizes]
            for name in ("keys", "values")
        }

    def add(self, ids: Sequence[int], frequencies: Tensor, progress: Progress) -> None:
        """Evaluate a passage, and add its cells and queries."""
        memory = Memory(self.model.decoder, Full(len(ids)))
        memory.cache.observe()
        for result in evaluate(memory, ids, STEP_TOKENS):
            assert memory.cache.observer is not None
            queries = memory.cache.observer.queries()
            assert queries is not None
            samples = group_by_kv_head(queries.vectors, self.layout.kv_heads).float().cpu()
            self.query_outer += samples.transpose(-1, -2) @ samples
            self.query_count += samples.shape[2]
            progress(result.hidden.shape[0])
        cells = Cells.concatenate([part for _, part in memory.cache.read(0, memory.cache.cells)])
        keys = rotate(cells.keys.cpu().float(), frequencies, -cells.positions)
        for name, vectors in (("keys", keys), ("values", cells.values.cpu().float())):
            for index, layers in enumerate(cell_groups(self.layout)):
                rows = _rows(vectors[layers, :, SINKS:])
                self.sums[name][index] += rows.sum(0)
                self.outers[name][index] += rows.T @ rows
        self.count += len(ids) - SINKS

    def key_weights(self, frequencies: Tensor) -> Tensor:
        """Return symmetric matrices `[layers, kv_heads, head_dim, head_dim]` that weight keys.

        The root of the second moment of queries, so that an error in a key weighs what it changes
        in logits, times the spread of the head's values, which a changed attention weight moves.
        """
        moments = _turned(self.query_outer / self.query_count, frequencies)
        eigenvalues, eigenvectors = torch.linalg.eigh(moments.double())
        floor = _MIN_WEIGHT * eigenvalues.mean(-1, keepdim=True)
        roots = eigenvalues.clamp(min=floor).sqrt().unsqueeze(-2)
        weights = (eigenvectors * roots) @ eigenvectors.transpose(-1, -2)
        heads, head_dim = self.layout.kv_heads, self.layout.head_dim
        variances = [
            (outer.diagonal() / self.count - (total / self.count).square())
            for outer, total in zip(self.outers["values"], self.sums["values"], strict=True)
        ]
        # Rounding makes the variance of values that do not vary negative.
        variance = torch.cat(variances).view(-1, heads, head_dim).sum(-1)
        spread = variance.clamp(min=_MIN_VARIANCE).sqrt()
        weighted: Tensor = weights * spread[..., None, None]
        return weighted.float()

    def covariance(self, name: str, index: int) -> tuple[Tensor, Tensor]:
        """Return mean and covariance of keys or values of a group of layers, float64."""
        mean = self.sums[name][index].double() / self.count
        return mean, self.outers[name][index].double() / self.count - mean.outer(mean)


def _turned(moments: Tensor, frequencies: Tensor) -> Tensor:
    """Return the mean of second moments of queries, as unrotated keys see them from distances."""
    steps = torch.arange(_DISTANCES, dtype=torch.int64, device="cpu")
    distances = steps * _MAX_DISTANCE // (_DISTANCES - 1)
    turned = torch.zeros_like(moments)
    for distance in distances:
        positions = distance.expand(moments.shape[-1])
        rows = rotate(moments, frequencies, positions)
        turned += rotate(rows.transpose(-1, -2), frequencies, positions)
    return turned / len(distances)


def group_layers(layout: Layout) -> int:
    """Return how many layers are coded together."""
    fitting = max(1, MAX_WIDTH // (layout.kv_heads * layout.head_dim))
    return min(MAX_GROUP_LAYERS, fitting, layout.layers)


def cell_groups(layout: Layout) -> list[slice]:
    return layer_groups(layout.layers, group_layers(layout))


def _rows(cells: Tensor) -> Tensor:
    """Return `[layers, kv_heads, n, head_dim]` as `[n, width]`."""
    return cells.permute(2, 0, 1, 3).flatten(1)

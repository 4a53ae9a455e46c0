"""Measuring a model's queries, and how alike keys must be to be merged without harm."""

import torch
from torch import Tensor

from kvkeep.cache import Cells, KVCache, Layout, Queries
from kvkeep.compression.methods.attention import by_kv_head, output_error
from kvkeep.compression.methods.base import Candidates
from kvkeep.compression.methods.fitted import Fitted
from kvkeep.compression.methods.statistics import Statistics

# Least cosines that are tried; above 1 nothing is merged.
LIKENESSES = (0.7, 0.8, 0.85, 0.9, 0.95, 1.1)
RATIO = 4  # how much is compressed to try them
EVERY = 4  # one query of so many is asked


class Measured:
    """Sums over a text; `statistics` are their means."""

    def __init__(self, layout: Layout):
        heads, width = (layout.layers, layout.kv_heads), layout.head_dim

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float32, device="cpu")

        self._queries = torch.zeros(1, dtype=torch.int64, device="cpu")
        self._sum = zeros(*heads, width)
        self._outer = zeros(*heads, width, width)
        self._errors = zeros(len(LIKENESSES), *heads)

    def take(self, cache: KVCache, step: int) -> None:
        """What a cache that observes has read last: the newest `step` cells and the ones before."""
        assert cache.observer is not None
        queries = cache.observer.queries()
        assert queries is not None
        samples = by_kv_head(queries.values, cache.layout.kv_heads).cpu()
        self._queries += samples.shape[2]
        self._sum += samples.sum(2)
        self._outer += samples.transpose(-1, -2) @ samples
        first = cache.cells - 2 * step
        if first >= 0:
            parts = [cells for segment, cells in cache.read(first, step) if not segment.anchor]
            some = queries.every(EVERY)
            self._try(Candidates(Cells.concatenate(parts), cache.rope, cache.scale), some)

    def _try(self, candidates: Candidates, queries: Queries) -> None:
        for errors, likeness in zip(self._errors, LIKENESSES, strict=True):
            fewer = Fitted(likeness).compress(candidates, len(candidates) // RATIO).cells
            errors += output_error(candidates, fewer, queries).cpu()

    def statistics(self) -> Statistics:
        """All that was measured; each KV head's tolerance is what did least harm there."""
        tried = torch.tensor(LIKENESSES, dtype=torch.float32, device="cpu")
        moment = self._outer / self._queries
        return Statistics(
            self._sum / self._queries,
            (moment + moment.transpose(-1, -2)) / 2,  # to the bit: a file keeps one half
            tried[self._errors.argmin(0)],
        )

    def tensors(self) -> dict[str, Tensor]:
        return {
            "sum": self._sum,
            "outer": self._outer,
            "errors": self._errors,
            "queries": self._queries,
        }

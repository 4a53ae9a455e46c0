"""Steps of several next tokens of one cache in one forward, and taking back the last of them."""

from collections.abc import Iterator
from contextlib import contextmanager

from kvkeep.cache.cache import KVCache
from kvkeep.cache.segment import Segment
from kvkeep.cache.shallow_copy import shallow_copy
from kvkeep.cache.step import DecodeStep


def row_capacity(cache: KVCache) -> int:
    """Return the most tokens that `row_steps` takes: as many as have slots of their own."""
    local_window = None if cache.local_cache is None else cache.local_cache.window.capacity
    limit = cache.segments[-1].limit
    return limit if local_window is None else min(limit, local_window)


class RowSteps:
    """The steps of a cache's next tokens in one forward (`row_steps`), oldest first."""

    def __init__(self, cache: KVCache):
        local = cache.local_cache
        self.steps: list[DecodeStep] = []
        self._caches = [cache] if local is None else [cache, local]
        # Of the cache and of that of local layers, after each token.
        self._segments: list[list[list[Segment]]] = []

    def add(self, step: DecodeStep, revertible: bool) -> None:
        """Add the step of the next token, whose cells the cache has just counted."""
        self.steps.append(step)
        if revertible:
            segments = [[shallow_copy(s) for s in cache.segments] for cache in self._caches]
            self._segments.append(segments)

    def keep(self, count: int) -> None:
        """Take back all tokens but the first `count`, at least 1, in a revertible context.

        The cells that they have overwritten are restored. Called after the forward.
        """
        dropped_count = len(self.steps) - count
        for index, cache in enumerate(self._caches):
            for row in range(count, len(self.steps)):
                step = self.steps[row].local_step if index else self.steps[row]
                if isinstance(step, DecodeStep) and step.overwritten is not None:
                    slots = step.newest_segment.block.slots
                    slots.write(
                        slice(step.slot, step.slot + 1), step.overwritten.part(slice(row, row + 1))
                    )
            cache.segments = self._segments[count - 1][index]
            cache.time -= dropped_count
            cache.serial -= dropped_count
            for segment in cache.segments:  # without the copies of cells that are not evicted
                segment.length -= segment.arriving_count
                segment.arriving_count = 0
            cache.drop_empty_segments()  # one that was opened for such copies alone
        self.steps = self.steps[:count]


@contextmanager
def row_steps(
    cache: KVCache, count: int, sampled: bool = False, revertible: bool = False
) -> Iterator[RowSteps]:
    """Open steps of the next `count` tokens, one of each, for one forward (`GroupStep`).

    The result is that of as many calls of `KVCache.step`, one after another: each token sees the
    cells of those before it. Only the compiled kernels compute such a forward. Cells count as
    committed when the context begins; after an exception the cache must not be used, as in
    `KVCache.step`.

    count: at most `row_capacity`; the last segment is open for as many. revertible: whether
        `RowSteps.keep` may be called in the context, to keep only the first of the tokens.
    """
    overwritten = cache.segments[-1].prepare_slots(count)
    local, local_overwritten = cache.local_cache, None
    if local is not None:
        local_overwritten = local.open_local_window().prepare_slots(count)
    rows = RowSteps(cache)
    for index in range(count):
        step = cache.open_step(1, sampled)
        for each, cells in ((step, overwritten), (step.local_step, local_overwritten)):
            if isinstance(each, DecodeStep):
                each.follows, each.overwritten = index > 0, cells
        assert isinstance(step, DecodeStep)
        step.keeps_states = revertible or index == count - 1
        cache.take_cells(step)
        rows.add(step, revertible)
    yield rows
    for step in rows.steps:
        cache.take_results(step)

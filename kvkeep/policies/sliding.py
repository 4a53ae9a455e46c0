"""Policy `sliding`: attention sinks and a rotating window (StreamingLLM, arXiv:2309.17453)."""

from typing import ClassVar

from kvkeep.cache import KVCache, PositionMap, Segment, runs
from kvkeep.errors import InvalidArgument


class Sliding:
    """The first `keep` cells stay as anchors; a ring of `max_kv_size - keep` holds the newest.

    Every query sees exactly the cells that StreamingLLM would, at the same distances: those of
    their places in the cache, not in the text. Instead of moving all keys down at each token, a
    query looks at an anchor from where it would stand in a full cache (`_anchor_map`).

    Anchors come first in the cache and the window comes last: one ring, or after a fork the
    frozen cells of before and a ring that takes over from them. Until `keep` cells are anchored
    there is no window.
    """

    name: ClassVar[str] = "sliding"

    def __init__(self, max_kv_size: int, keep: int):
        self.max_kv_size = max_kv_size
        self.keep = keep
        self._check(keep)

    def room(self, cache: KVCache) -> int | None:
        return None

    def open(self, cache: KVCache, wanted: int) -> int:
        missing = self.keep - cache.cells
        if missing > 0:
            self._anchor(cache, self.keep, cache.time, cache.cells)
            return min(wanted, missing)
        newest = cache.segments[-1] if cache.segments else None
        if newest is None or newest.window is None or newest.frozen:
            cache.segments.append(self._ring(cache, self.keep))
        cache.segments[-1].reserve(cache.segments[-1].length + wanted)
        return wanted

    def settings(self) -> dict[str, int]:
        return {"max_kv_size": self.max_kv_size, "keep": self.keep}

    def set_keep(self, cache: KVCache, keep: int) -> None:
        """A larger `keep` pins the oldest cells still held; a smaller one lets the newest go.

        Cells let go return to the window where it follows on them without a gap. Cells are
        copied to their new places as they are: no key is rotated again.
        """
        self._check(keep)
        held, cells, unbroken = cache.segments, cache.cells, cache.rewindable
        cache.segments = []
        anchored = min(keep, cells)
        for segment, first, count in runs(held, 0, anchored):
            run = segment.read(first, count)
            self._anchor(cache, keep, int(run[2][0]), cache.cells).append(*run)
        in_window = min(unbroken, cells - anchored)
        if in_window:
            ring = self._ring(cache, keep)
            for segment, first, count in runs(held, cells - in_window, in_window):
                ring.append(*segment.read(first, count))
            cache.segments.append(ring)
        self.keep = keep

    def _check(self, keep: int) -> None:
        if not 0 <= keep < self.max_kv_size:
            raise InvalidArgument(
                f"keep must leave room for a window: expected 0 to {self.max_kv_size - 1} "
                f"for a budget of {self.max_kv_size} cells, found {keep}; "
                "keep fewer tokens or raise max_kv_size"
            )

    def _anchor(self, cache: KVCache, keep: int, position: int, index: int) -> Segment:
        """The anchor for a cell at `position` with `index` cells before it: the last, or new.

        In a full cache the newest query stands at `max_kv_size - 1` and the cell at `index`; the
        query keeps that distance for ever once it has reached it.
        """
        position_map = PositionMap(ceiling=self.max_kv_size - 1 + position - index)
        newest = cache.segments[-1] if cache.segments else None
        if newest is None or newest.map != position_map or newest.frozen:
            newest = Segment(cache.layout, position_map, keep - index)
            cache.segments.append(newest)
        return newest

    def _ring(self, cache: KVCache, keep: int) -> Segment:
        window = self.max_kv_size - keep
        return Segment(cache.layout, PositionMap(), limit=window, window=window)

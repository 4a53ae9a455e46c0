"""Policy `self_extend`: longer than trained, without training (LongLM, arXiv:2401.01325)."""

from collections.abc import Set
from typing import ClassVar

import torch

from kvkeep.cache import Cells, KVCache, PositionMap, Segment, Window
from kvkeep.errors import InvalidArgument
from kvkeep.methods import Compression

GROUP, WINDOW = 4, 1024


class SelfExtend:
    """Remembers everything: the newest `window` tokens exactly, older ones in groups of positions.

    A query at time t sees a cell at position p as it is while t - p < window. From then on the
    cell is at p // group, and the query looks at it from t // group + window - window // group,
    so that the two ranges of distances join and none exceeds the trained length.

    Cells leave the window for the far segment one by one; a far key was rotated once more, when it
    went there, and never again.
    """

    name: ClassVar[str] = "self_extend"
    observed: ClassVar[int] = 0

    def __init__(self, max_kv_size: int, keep: int = 0, group: int = GROUP, window: int = WINDOW):
        if group < 1 or window < 1 or window % group:
            raise InvalidArgument(
                "self_extend needs a group of 1 or more that divides its window; "
                f"found group {group} and window {window}"
            )
        self.max_kv_size = max_kv_size
        self.keep = max_kv_size
        self.pinned = 0
        self.group = group
        self.window = window

    @classmethod
    def longest(cls, trained: int, group: int = GROUP, window: int = WINDOW) -> int:
        """How many tokens it can take before a distance exceeds the trained length."""
        return max(trained, group * (trained - window) + window)

    @property
    def exact(self) -> int:
        return min(self.window, self.max_kv_size)

    def room(self, cache: KVCache) -> int | None:
        return self.max_kv_size - cache.cells

    def open(self, cache: KVCache, wanted: int, ahead: int = 0) -> int:
        cache.window = Window(self.window, moves=True)
        count = min(wanted, self.window)
        newest = cache.segments[-1] if cache.segments else None
        if newest is None or newest.anchor or not newest.thaw(self.window):
            newest = Segment(cache.layout, self.window)
            cache.segments.append(newest)
        newest.reserve(newest.length + count + ahead)
        near = [segment for segment in cache.segments if not segment.anchor]
        leaving = sum(segment.length for segment in near) + count - self.window
        if leaving > 0:
            self._lend(cache, leaving)
        return count

    def settle(self, cache: KVCache) -> list[Compression]:
        return []

    def settings(self) -> dict[str, int]:
        return {"max_kv_size": self.max_kv_size, "group": self.group, "window": self.window}

    def check(self, **settings: int) -> None:
        if "keep" in settings:
            raise InvalidArgument(
                'keep has no meaning for policy "self_extend", which keeps every token; '
                'use policy="sliding" to keep the first tokens and a window'
            )

    def change(self, cache: KVCache, pins: Set[int], **settings: int) -> None:
        self.check(**settings)

    def _lend(self, cache: KVCache, count: int) -> None:
        """Shows the far segment the oldest window cells, which leave the window in this step."""
        offset = self.window - self.window // self.group
        far = next((s for s in cache.segments if s.anchor and not s.frozen), None)
        if far is None:
            far = Segment(
                cache.far_layout, self.max_kv_size, PositionMap(offset, self.group), anchor=True
            )
            at = sum(segment.anchor for segment in cache.segments)
            cache.segments.insert(at, far)
        far_cells = sum(s.length for s in cache.segments if s.anchor)
        leaving = cache.read(far_cells, count)
        cells = Cells.joined([cells for _, cells in leaving])
        # An edit may have brought some closer: where they are seen counts, not where they were put.
        seen = torch.cat([cells.positions - segment.map.offset for segment, cells in leaving])
        far.append(cells.moved(cache.rope, seen // self.group - cells.positions))
        far.lent = count

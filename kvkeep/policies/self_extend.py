"""Policy `self_extend`: longer than trained, without training (LongLM, arXiv:2401.01325)."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvkeep.cache import Cells, KVCache, PositionMap, Segment, Window
from kvkeep.errors import InvalidArgument
from kvkeep.policies.base import Policy


@dataclass(frozen=True)
class SelfExtend(Policy):
    """Remembers everything: the newest `window` tokens exactly, older ones in groups of positions.

    A query at time t sees a cell at position p as it is while t - p < window. From then on the
    cell is at p // group, and the query looks at it from t // group + window - window // group,
    so that the two ranges of distances join and none exceeds the trained length.

    Cells leave the window for the far segment one by one; a far key was rotated once more, when it
    went there, and never again.
    """

    name: ClassVar[str] = "self_extend"

    group: int = 4
    window: int = 1024

    def check(self, pinned: int = 0) -> None:
        super().check(pinned)
        if self.group < 1 or self.window < 1 or self.window % self.group:
            raise InvalidArgument(
                "self_extend needs a group of 1 or more that divides its window; "
                f"found group {self.group} and window {self.window}"
            )

    @property
    def keep(self) -> int:
        return self.max_kv_size

    def longest(self, trained: int) -> int:
        """How many tokens it can take before a distance exceeds the trained length."""
        return max(trained, self.group * (trained - self.window) + self.window)

    @property
    def exact(self) -> int:
        return min(self.window, self.max_kv_size)

    def group_of(self, segment: Segment) -> int:
        return self.group if segment.anchor else 1

    def most_in_window(self, cache: KVCache) -> int:
        return self.window

    def check_held(self, cache: KVCache) -> None:
        super().check_held(cache)
        anchors = [segment.anchor for segment in cache.segments]
        if anchors != sorted(anchors, reverse=True):
            raise InvalidArgument("no cache of this policy could be so: found the far cells nearer")

    def room(self, cache: KVCache) -> int | None:
        return self.max_kv_size - cache.cells

    def open(self, cache: KVCache, wanted: int, ahead: int = 0) -> int:
        cache.window = Window(self.window, moves=True)
        count = min(wanted, self.window)
        newest = cache.open_window(self.window)
        newest.reserve(newest.length + count + ahead)
        near = [segment for segment in cache.segments if not segment.anchor]
        leaving = sum(segment.length for segment in near) + count - self.window
        if leaving > 0:
            self._leave(cache, leaving)
        return count

    def _leave(self, cache: KVCache, count: int) -> None:
        """Shows the far segment the oldest window cells, which leave the window in this step."""
        offset = self.window - self.window // self.group
        far = next((s for s in cache.segments if s.anchor and not s.frozen), None)
        if far is None:
            far = Segment(
                cache.far_layout, self.max_kv_size, PositionMap(offset, self.group), anchor=True
            )
            far.lazy_growth = True
            at = sum(segment.anchor for segment in cache.segments)
            cache.segments.insert(at, far)
        far_cells = sum(s.length for s in cache.segments if s.anchor)
        leaving = cache.read(far_cells, count)
        cells = Cells.concatenate([cells for _, cells in leaving])
        # An edit may have brought some closer: where they are seen counts, not where they were put.
        seen = torch.cat([cells.positions - segment.map.offset for segment, cells in leaving])
        far.append(cells.shifted(cache.rope, seen // self.group - cells.positions))
        far.leaving = count

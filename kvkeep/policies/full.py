"""Policies that evict nothing: `full` and `self_extend`.

`full` takes as many tokens as the model was trained for; `self_extend` takes more, without training
(LongLM, arXiv:2401.01325).
"""

from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

import torch

from kvkeep.cache import Cells, KVCache, PositionMap, Segment, Window
from kvkeep.errors import InvalidArgument
from kvkeep.policies.base import Policy, require_valid, window_cell_count

_FEW_CELLS = 16  # of the steps that are computed row by row


@dataclass(frozen=True)
class Full(Policy):
    """A memory of everything, which takes no more tokens than `max_kv_size`.

    trained: how many positions the model was trained for; the budget if that is larger.
    """

    name: ClassVar[str] = "full"
    allows_compression: ClassVar[bool] = True  # by `Session.compress`

    trained: int = field(default=0, repr=False)

    def for_model(self, trained_length: int) -> Self:
        return replace(super().for_model(trained_length), trained=trained_length)

    def check_contents(self, cache: KVCache) -> None:
        super().check_contents(cache)
        require_valid(cache.window.size is None, f"a window of {cache.window.size} cells")

    def room(self, cache: KVCache) -> int | None:
        """Return how many more tokens fit the budget and the model's trained distance.

        The n-th new token sees the oldest cell from `reach + n - 1` positions away, and the model
        was trained for distances up to `trained - 1`. The two bounds differ after
        compression, which leaves fewer cells at the same distances.
        """
        max_reach = max(self.trained, self.max_kv_size)
        return min(self.max_kv_size - cache.cells, max_reach - cache.reach)

    def open(self, cache: KVCache, token_count: int, following_count: int = 0) -> int:
        newest = cache.segments[-1] if cache.segments else None
        limit = self.max_kv_size - cache.cells + (newest.length if newest else 0)
        if newest is None or not newest.reopen(limit):
            newest = cache.begin_segment(self.max_kv_size - cache.cells)
        newest.reserve(newest.length + token_count + following_count)
        return token_count


@dataclass(frozen=True)
class SelfExtend(Policy):
    """A memory of everything: the newest `window` tokens exactly, older ones by grouped positions.

    A query at time t sees a cell at position p as it is while t - p < window. From then on the
    cell is at p // group, and the query sees it from t // group + window - window // group, so that
    the two ranges of distances join and none exceeds the trained length. With window 8 and group 4:

        t - p     0 ... 7    8 ... 11    12 ... 15
        seen at   0 ... 7    8           9              (for a p that is a multiple of 4)

    Cells move from the window to the far segment one by one. A far key is rotated once more when it
    moves there, and never again.
    """

    name: ClassVar[str] = "self_extend"

    group: int = 4
    window: int = 1024

    def check(self, pinned_count: int = 0) -> None:
        super().check(pinned_count)
        if self.group < 1 or self.window < 1 or self.window % self.group:
            raise InvalidArgument(
                "self_extend needs a group of 1 or more that divides its window; "
                f"found group {self.group} and window {self.window}"
            )

    def max_budget(self, trained_length: int) -> int:
        """Return how many tokens fit before a distance exceeds the trained length."""
        return max(trained_length, self.group * (trained_length - self.window) + self.window)

    @property
    def exact_tokens(self) -> int:
        return min(self.window, self.max_kv_size)  # tokens before any is grouped

    def group_of(self, segment: Segment) -> int:
        return self.group if segment.is_anchor else 1

    def window_limit(self, cache: KVCache) -> int:
        return self.window

    def check_contents(self, cache: KVCache) -> None:
        super().check_contents(cache)
        anchors = [segment.is_anchor for segment in cache.segments]
        require_valid(anchors == sorted(anchors, reverse=True), "far cells after window cells")

    def room(self, cache: KVCache) -> int | None:
        return self.max_kv_size - cache.cells

    def open(self, cache: KVCache, token_count: int, following_count: int = 0) -> int:
        cache.window = Window(self.window, moves=True)
        count = min(token_count, self.window)
        newest = cache.open_window(self.window)
        newest.reserve(newest.length + count + following_count)
        evicted_count = window_cell_count(cache) + count - self.window
        if evicted_count > 0:
            self._copy_to_far_segment(cache, evicted_count)
        return count

    def _copy_to_far_segment(self, cache: KVCache, count: int) -> None:
        """Copy the oldest `count` window cells, which the next step evicts."""
        offset = self.window - self.window // self.group
        far_segment = next((s for s in cache.segments if s.is_anchor and not s.frozen), None)
        if far_segment is None:
            cache.merge_complete_segments()
            position_map = PositionMap(offset, self.group)
            far_segment = Segment(cache.far_layout, self.max_kv_size, position_map, is_anchor=True)
            index = sum(segment.is_anchor for segment in cache.segments)
            cache.segments.insert(index, far_segment)
        far_segment.grows_lazily = True  # not in files, so that a restored segment lacks it
        parts = cache.read_window(count)
        cells = Cells.concatenate([cells for _, cells in parts])
        # After an edit, cells are not seen at the positions of their keys.
        seen_at = torch.cat([cells.positions - s.position_map.offset for s, cells in parts])
        shifts = seen_at // self.group - cells.positions
        # Quantising sums in another order for other numbers of cells. Few are moved one by one, so
        # that a small step gives the bits of its tokens one by one.
        is_rounded = cache.layout.quantised or cache.far_layout.quantised
        size = 1 if is_rounded and count <= _FEW_CELLS else count
        for first in range(0, count, size):
            part = slice(first, first + size)
            far_segment.append(cells.part(part).shift(cache.rope, shifts[part]))
        far_segment.arriving_count = count

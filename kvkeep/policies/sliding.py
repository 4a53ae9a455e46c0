"""Policy `sliding`: attention sinks and a rotating window (StreamingLLM, arXiv:2309.17453)."""

from collections.abc import Set
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from kvkeep.cache import KVCache, Window
from kvkeep.errors import InvalidArgument
from kvkeep.policies.base import Policy, open_anchors, pinned_beyond, pinned_cells


@dataclass(frozen=True)
class Sliding(Policy):
    """The first `keep` cells and the pinned ones are anchors; a window holds the newest.

    Every query sees exactly the cells that StreamingLLM would, at the same distances: those of
    their places in the cache, not in the text. Instead of moving all keys down at each token, the
    cache lets queries stand closer to the anchors by the number of cells that went between.

    Until `keep` cells are anchored there is no window.
    """

    name: ClassVar[str] = "sliding"

    keep: int = 4

    @property
    def exact(self) -> int:
        return self.max_kv_size

    def discards(self, cache: KVCache) -> int:
        return 1

    def room(self, cache: KVCache) -> int | None:
        return None

    def open(self, cache: KVCache, wanted: int, ahead: int = 0) -> int:
        size = self.window_size(cache)
        cache.window = Window(size, self.discards(cache))
        anchored = open_anchors(cache, self.keep, wanted)
        if anchored:
            return anchored
        newest = cache.open_window(size)
        newest.lazy_growth = any(not s.anchor for s in cache.segments[:-1])
        newest.reserve(newest.length + wanted + (0 if newest.lazy_growth else ahead))
        return wanted

    def window_size(self, cache: KVCache) -> int:
        """The most cells that are neither kept nor pinned."""
        return self.max_kv_size - self.keep - pinned_cells(cache, self.keep)

    def most_in_window(self, cache: KVCache) -> int:
        return self.window_size(cache)

    def check(self, pinned: int = 0) -> None:
        super().check(pinned)
        if not 0 <= self.keep < self.max_kv_size - pinned:
            pins = f" of which {pinned} are pinned" if pinned else ""
            raise InvalidArgument(
                "keep must leave room for a window: expected 0 to "
                f"{self.max_kv_size - pinned - 1} for a budget of {self.max_kv_size} cells{pins}, "
                f"found {self.keep}; keep or pin fewer tokens, or raise max_kv_size"
            )

    def changed(self, cache: KVCache, pins: Set[int], **settings: Any) -> Self:
        """More `keep` or pins make anchors of cells as they lie; fewer give them to the window."""
        changed = self.with_settings(**settings)
        changed.check(pinned_beyond(cache, changed.keep, pins))
        cache.regroup(lambda rank, serial: rank < changed.keep or serial in pins)
        return changed

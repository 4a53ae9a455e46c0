"""Policy `sliding`: attention sinks and a rotating window (StreamingLLM, arXiv:2309.17453)."""

from collections.abc import Set
from typing import ClassVar

from kvkeep.cache import KVCache, Segment, Window
from kvkeep.errors import InvalidArgument
from kvkeep.methods import Compression
from kvkeep.policies.base import open_anchors


class Sliding:
    """The first `keep` cells and the pinned ones are anchors; a window holds the newest.

    Every query sees exactly the cells that StreamingLLM would, at the same distances: those of
    their places in the cache, not in the text. Instead of moving all keys down at each token, the
    cache lets queries stand closer to the anchors by the number of cells that went between.

    Until `keep` cells are anchored there is no window.
    """

    name: ClassVar[str] = "sliding"
    observed: ClassVar[int] = 0

    def __init__(self, max_kv_size: int, keep: int, pinned: int = 0):
        self.max_kv_size = max_kv_size
        self.keep = keep
        self.pinned = pinned
        self.check()

    @property
    def discard(self) -> int:
        """How many of the oldest cells of the window go at once."""
        return 1

    @property
    def exact(self) -> int:
        return self.max_kv_size

    def room(self, cache: KVCache) -> int | None:
        return None

    def open(self, cache: KVCache, wanted: int, ahead: int = 0) -> int:
        size = self.max_kv_size - self.keep - self.pinned
        cache.window = Window(size, self.discard)
        anchored = open_anchors(cache, self.keep, wanted)
        if anchored:
            return anchored
        newest = cache.segments[-1] if cache.segments else None
        if newest is None or newest.anchor or not newest.thaw(size):
            newest = Segment(cache.layout, size)
            cache.segments.append(newest)
        newest.crowded = any(not (s.anchor or s.block.shared) for s in cache.segments[:-1])
        newest.reserve(newest.length + wanted + (0 if newest.crowded else ahead))
        return wanted

    def settle(self, cache: KVCache) -> list[Compression]:
        return []

    def settings(self) -> dict[str, int]:
        return {"max_kv_size": self.max_kv_size, "keep": self.keep, "pinned": self.pinned}

    def check(self, **settings: int) -> None:
        found = {"keep": self.keep, "pinned": self.pinned} | settings
        keep, pinned = found["keep"], found["pinned"]
        if not 0 <= keep < self.max_kv_size - pinned:
            pins = f" of which {pinned} are pinned" if pinned else ""
            raise InvalidArgument(
                "keep must leave room for a window: expected 0 to "
                f"{self.max_kv_size - pinned - 1} for a budget of {self.max_kv_size} cells{pins}, "
                f"found {keep}; keep or pin fewer tokens, or raise max_kv_size"
            )

    def change(self, cache: KVCache, pins: Set[int], **settings: int) -> None:
        """More `keep` or pins make anchors of cells as they lie; fewer give them to the window."""
        keep = settings.get("keep", self.keep)
        outside = sum(serial in pins for serial in cache.serials()[max(keep, 0) :])
        self.check(**settings | {"pinned": outside})
        cache.regroup(lambda rank, serial: rank < keep or serial in pins)
        self.keep, self.pinned = keep, outside

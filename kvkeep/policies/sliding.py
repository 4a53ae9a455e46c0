"""Policies with attention sinks and a window: `sliding` and `shift`.

`sliding` evicts one cell per token (StreamingLLM, arXiv:2309.17453); `shift` evicts many at once
(llama.cpp's context shift).
"""

from collections.abc import Set
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from kvkeep.cache import KVCache, Window, are_in
from kvkeep.errors import InvalidArgument
from kvkeep.policies.base import Policy, count_cells_to_pin, open_anchors, pinned_cell_count


@dataclass(frozen=True)
class Sliding(Policy):
    """The first `keep` cells and the pinned ones are anchors; a window holds the newest.

    Every query sees exactly the cells that it would see in StreamingLLM, at the same distances,
    which are counted in the cache and not in the text. Instead of moving all keys at each token,
    the cache moves queries closer to the anchors by the number of cells evicted in between.

    There is no window until the first `keep` cells are there.
    """

    name: ClassVar[str] = "sliding"

    keep: int = 4

    def discard_count(self, cache: KVCache) -> int:
        return 1  # one cell per token, once the window is full

    def open(self, cache: KVCache, token_count: int, following_count: int = 0) -> int:
        size = self.window_limit(cache)
        cache.window = Window(size, self.discard_count(cache))
        if anchor_count := open_anchors(cache, self.keep, token_count):
            return anchor_count
        newest = cache.open_window(size)
        newest.grows_lazily = any(not s.is_anchor for s in cache.segments[:-1])
        reserved_count = 0 if newest.grows_lazily else following_count
        newest.reserve(newest.length + token_count + reserved_count)
        return token_count

    def window_limit(self, cache: KVCache) -> int:
        return self.max_kv_size - self.keep - pinned_cell_count(cache, self.keep)

    @property
    def pin_limit(self) -> int:
        return self.max_kv_size - self.keep - 1  # the window has a cell at least

    def check(self, pinned_count: int = 0) -> None:
        super().check(pinned_count)
        if not 0 <= self.keep < self.max_kv_size:
            raise InvalidArgument(
                f"keep must leave room for a window: expected 0 to {self.max_kv_size - 1} for a "
                f"budget of {self.max_kv_size} cells, found {self.keep}; keep fewer tokens, or "
                "raise max_kv_size"
            )
        self.check_pins(pinned_count, self.max_kv_size - self.keep - 1)

    def reconfigure(self, cache: KVCache, pins: Set[int], **settings: Any) -> Self:
        """Turn cells into anchors in place for more `keep` or pins, and back for fewer."""
        policy = self.with_settings(**settings)
        policy.check(count_cells_to_pin(cache, policy.keep, pins))
        cache.reassign_anchors(lambda ranks, serials: (ranks < policy.keep) | are_in(serials, pins))
        return policy


@dataclass(frozen=True)
class Shift(Sliding):
    """A sliding policy that evicts `discard` cells at once when the window is full.

    discard: 0 for half of the cells that are neither kept nor pinned at the time; 1 is `sliding`.
    """

    name: ClassVar[str] = "shift"

    discard: int = 0

    def discard_count(self, cache: KVCache) -> int:
        return self.discard or max(1, self.window_limit(cache) // 2)

    @property
    def pin_limit(self) -> int:
        return self.max_kv_size - self.keep - max(1, self.discard)

    def check(self, pinned_count: int = 0) -> None:
        super().check(pinned_count)
        window = self.max_kv_size - self.keep - pinned_count
        if not 0 <= self.discard <= window:
            raise InvalidArgument(
                f"discard must be 1 to {window}, the cells that are neither kept nor pinned, or 0 "
                f"for half of them; found {self.discard}"
            )

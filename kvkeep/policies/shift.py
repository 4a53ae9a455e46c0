"""Policy `shift`: at the bound, many of the oldest cells go at once (llama.cpp's context shift)."""

from collections.abc import Set
from typing import ClassVar

from kvkeep.cache import KVCache
from kvkeep.errors import InvalidArgument
from kvkeep.policies.sliding import Sliding


class Shift(Sliding):
    """As `sliding`, but `discard` cells go each time that the window is full.

    discard: 0 for half of what is not kept, whatever that is at the time; 1 is `sliding`.
    """

    name: ClassVar[str] = "shift"

    def __init__(self, max_kv_size: int, keep: int, discard: int = 0, pinned: int = 0):
        self._discard = discard
        super().__init__(max_kv_size, keep, pinned)

    @property
    def discard(self) -> int:
        return self._discard or max(1, (self.max_kv_size - self.keep - self.pinned) // 2)

    def settings(self) -> dict[str, int]:
        return {**super().settings(), "discard": self._discard}

    def check(self, **settings: int) -> None:
        super().check(**settings)
        found = {"keep": self.keep, "pinned": self.pinned, "discard": self._discard} | settings
        window = self.max_kv_size - found["keep"] - found["pinned"]
        if not 0 <= found["discard"] <= window:
            raise InvalidArgument(
                f"discard must be 1 to {window}, the cells that are neither kept nor pinned, or 0 "
                f"for half of them; found {found['discard']}"
            )

    def change(self, cache: KVCache, pins: Set[int], **settings: int) -> None:
        super().change(cache, pins, **settings)
        self._discard = settings.get("discard", self._discard)

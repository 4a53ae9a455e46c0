"""Policy `shift`: at the bound, many of the oldest cells go at once (llama.cpp's context shift)."""

from dataclasses import dataclass
from typing import ClassVar

from kvkeep.cache import KVCache
from kvkeep.errors import InvalidArgument
from kvkeep.policies.sliding import Sliding


@dataclass(frozen=True)
class Shift(Sliding):
    """As `sliding`, but `discard` cells go each time that the window is full.

    discard: 0 for half of what is not kept, whatever that is at the time; 1 is `sliding`.
    """

    name: ClassVar[str] = "shift"

    discard: int = 0

    def discards(self, cache: KVCache) -> int:
        return self.discard or max(1, self.window_size(cache) // 2)

    def check(self, pinned: int = 0) -> None:
        super().check(pinned)
        window = self.max_kv_size - self.keep - pinned
        if not 0 <= self.discard <= window:
            raise InvalidArgument(
                f"discard must be 1 to {window}, the cells that are neither kept nor pinned, or 0 "
                f"for half of them; found {self.discard}"
            )

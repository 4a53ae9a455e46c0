"""Policy `full`: every cell is kept, up to the length that the model was trained for."""

from collections.abc import Set
from typing import ClassVar

from kvkeep.cache import KVCache, Segment
from kvkeep.errors import InvalidArgument
from kvkeep.methods import Compression


class Full:
    """Remembers everything, and takes no more tokens than `max_kv_size`."""

    name: ClassVar[str] = "full"
    observed: ClassVar[int] = 0

    def __init__(self, max_kv_size: int, keep: int = 0, pinned: int = 0):
        self.max_kv_size = max_kv_size
        self.keep = max_kv_size
        self.pinned = 0

    @property
    def exact(self) -> int:
        return self.max_kv_size

    def room(self, cache: KVCache) -> int | None:
        return self.max_kv_size - max(cache.cells, cache.reach)

    def open(self, cache: KVCache, wanted: int, ahead: int = 0) -> int:
        newest = cache.segments[-1] if cache.segments else None
        limit = self.max_kv_size - cache.cells + (newest.length if newest else 0)
        if newest is None or not newest.thaw(limit):
            newest = Segment(cache.layout, self.max_kv_size - cache.cells)
            cache.segments.append(newest)
        newest.reserve(newest.length + wanted + ahead)
        return wanted

    def settle(self, cache: KVCache) -> list[Compression]:
        return []

    def settings(self) -> dict[str, int]:
        return {"max_kv_size": self.max_kv_size}

    def check(self, **settings: int) -> None:
        if "keep" in settings:
            raise InvalidArgument(
                'keep has no meaning for policy "full", which keeps every token; '
                'use policy="sliding" to keep the first tokens and a window'
            )

    def change(self, cache: KVCache, pins: Set[int], **settings: int) -> None:
        self.check(**settings)

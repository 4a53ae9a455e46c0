"""Policy `full`: every cell is kept, up to the length that the model was trained for."""

from dataclasses import dataclass
from typing import ClassVar

from kvkeep.cache import KVCache, Segment
from kvkeep.policies.base import Policy


@dataclass(frozen=True)
class Full(Policy):
    """Remembers everything, and takes no more tokens than `max_kv_size`."""

    name: ClassVar[str] = "full"

    @property
    def keep(self) -> int:
        return self.max_kv_size

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

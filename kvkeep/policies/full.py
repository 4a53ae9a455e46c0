"""Policy `full`: every cell is kept, up to the length that the model was trained for."""

from typing import ClassVar

from kvkeep.cache import KVCache, PositionMap, Segment
from kvkeep.errors import InvalidArgument


class Full:
    """Remembers everything, and takes no more tokens than `max_kv_size`."""

    name: ClassVar[str] = "full"

    def __init__(self, max_kv_size: int):
        self.max_kv_size = max_kv_size
        self.keep = max_kv_size

    def room(self, cache: KVCache) -> int | None:
        return self.max_kv_size - cache.cells

    def open(self, cache: KVCache, wanted: int) -> int:
        if not cache.segments or cache.segments[-1].frozen:
            limit = self.max_kv_size - cache.cells
            cache.segments.append(Segment(cache.layout, PositionMap(), limit))
        cache.segments[-1].reserve(cache.segments[-1].length + wanted)
        return wanted

    def settings(self) -> dict[str, int]:
        return {"max_kv_size": self.max_kv_size, "keep": self.keep}

    def set_keep(self, cache: KVCache, keep: int) -> None:
        raise InvalidArgument(
            'keep has no meaning for policy "full", which keeps every token; '
            'use policy="sliding" to keep the first tokens and a window'
        )

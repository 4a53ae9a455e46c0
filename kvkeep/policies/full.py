"""Policy `full`: every cell is kept, up to the length that the model was trained for."""

from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

from kvkeep.cache import KVCache, Segment
from kvkeep.policies.base import Policy


@dataclass(frozen=True)
class Full(Policy):
    """A memory of everything, which takes no more tokens than `max_kv_size`.

    trained: positions that the model was trained for; the budget if that is larger.
    """

    name: ClassVar[str] = "full"

    trained: int = field(default=0, repr=False)

    def for_model(self, trained: int) -> Self:
        return replace(super().for_model(trained), trained=trained)

    @property
    def keep(self) -> int:
        return self.max_kv_size

    @property
    def exact(self) -> int:
        return self.max_kv_size

    @property
    def compresses(self) -> bool:
        return True  # by `Session.compress`

    def most_in_window(self, cache: KVCache) -> int:
        return self.max_kv_size

    def room(self, cache: KVCache) -> int | None:
        """Return what both the budget and the model's trained distance leave.

        The n-th new token sees the oldest cell from `reach + n - 1` positions away, of which the
        model was trained for up to `trained - 1`. The two bounds differ once cells were
        compressed: they are fewer then, at the same distances as before.
        """
        trained = max(self.trained, self.max_kv_size)
        return min(self.max_kv_size - cache.cells, trained - cache.reach)

    def open(self, cache: KVCache, wanted: int, ahead: int = 0) -> int:
        newest = cache.segments[-1] if cache.segments else None
        limit = self.max_kv_size - cache.cells + (newest.length if newest else 0)
        if newest is None or not newest.reopen(limit):
            newest = Segment(cache.layout, self.max_kv_size - cache.cells)
            cache.segments.append(newest)
        newest.reserve(newest.length + wanted + ahead)
        return wanted

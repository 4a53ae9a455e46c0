"""What goes when the window is full."""

from collections.abc import Iterable
from dataclasses import dataclass

from kvkeep.cache.segment import Segment


@dataclass(frozen=True)
class Window:
    """A bound on the cells that are not anchors.

    size: the most of them held; None for no bound.
    discard: how many of the oldest go at once when one more would not fit.
    moves: what goes has been taken over by a segment before; nothing comes closer.
    spare: so many of those that no query sees any more are held all the same: if as many of the
        newest are taken back, the window is whole again.
    """

    size: int | None = None
    discard: int = 1
    moves: bool = False
    spare: int = 0

    def evicted(self, cells: int) -> int:
        """How many of the oldest are no more seen once it has seen `cells`, those included."""
        excess = 0 if self.size is None else cells - self.size
        return -(-excess // self.discard) * self.discard if excess > 0 else 0

    @property
    def held(self) -> int | None:
        """The most cells that are held, seen or not."""
        return None if self.size is None else self.size + self.spare

    def forget(self, segments: Iterable[Segment], count: int) -> None:
        """Drops the oldest `count` window cells. What lies before them is that much closer."""
        before: list[Segment] = []
        for segment in segments:
            if not segment.anchor and count:
                gone = min(count, segment.length)
                segment.drop_oldest(gone)
                count -= gone
                for earlier in before if not self.moves else ():
                    earlier.map = earlier.map.closer(gone)
            before.append(segment)

"""The window: the bound on cells, and what is evicted when it is full."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvkeep.cache.segment import Segment


@dataclass(frozen=True)
class Window:
    """A bound on the cells that are not anchors.

    size: the most of them that queries see; None for no bound.
    discard: how many of the oldest are evicted at once when one more would not fit.
    moves: whether evicted cells move to an earlier segment, so that distances stay as they are.
    spare_cells: how many evicted cells stay in storage, so that the window is full again after as
        many of the newest cells are rewound.
    """

    size: int | None = None
    discard: int = 1
    moves: bool = False
    spare_cells: int = 0

    def evicted_count(self, cell_count: int) -> int:
        """Return how many of the oldest of so many cells queries no longer see.

        With size 4 and discard 2: 0 of 4 cells, 2 of 5, 2 of 6, 4 of 7.
        """
        excess = 0 if self.size is None else cell_count - self.size
        return -(-excess // self.discard) * self.discard if excess > 0 else 0

    @property
    def capacity(self) -> int | None:
        """The most cells in storage, spare ones included; None for no bound."""
        return None if self.size is None else self.size + self.spare_cells

    def evict(self, segments: Sequence[Segment], count: int) -> None:
        """Drop the oldest `count` window cells; queries move as much closer to earlier segments."""
        for index, segment in enumerate(segments):
            if segment.is_anchor or not count:
                continue
            dropped = min(count, segment.length)
            segment.drop_oldest(dropped)
            count -= dropped
            for earlier in segments[:index] if not self.moves else ():
                earlier.position_map = earlier.position_map.closer_by(dropped)

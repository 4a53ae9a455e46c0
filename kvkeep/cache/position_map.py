"""Where a query stands when it looks at a segment."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PositionMap:
    """The position `m(t)` that a query at time `t` takes when it looks at a segment.

    Keys are written once, rotated to the position they had when they were evaluated, and never
    move. RoPE attention depends only on the difference between the query's position and the
    key's, so the distance at which a segment is seen is chosen by moving the query:

        m(t) = t // group + offset

    offset: below 0 where cells between the segment and the query have gone (forgotten, shifted
        out or deleted), above 0 where some were inserted.
    group: positions per step; above 1 for the far cells of self-extend, whose keys are rotated to
        their positions divided by it.
    """

    offset: int = 0
    group: int = 1

    def __call__(self, time: int) -> int:
        return time // self.group + self.offset

    def closer(self, cells: int) -> "PositionMap":
        """The map after `cells` between the segment and the query are gone (or came, if < 0)."""
        return PositionMap(self.offset - cells, self.group)

"""Where a query stands when it looks at a segment."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PositionMap:
    """The position `m(t)` that a query at time `t` takes when it looks at a segment.

    Keys are written once, rotated to the position they had when they were evaluated, and never
    move. RoPE attention depends only on the difference between the query's position and the
    key's, so the distance at which a segment is seen is chosen by moving the query:

        m(t) = min(t, ceiling)

    ceiling: the last position that a query takes towards this segment; None for a segment that
        time runs away from (the window). A segment that stays while the window moves on is an
        anchor: from the ceiling on, every later query sees it at the same distance.
    """

    ceiling: int | None = None

    def __call__(self, time: int) -> int:
        return time if self.ceiling is None else min(time, self.ceiling)

"""Named stretches of tokens, which follow what happens to the tokens around them."""

from dataclasses import dataclass
from typing import Literal

from kvkeep.cache import Segment

# A token is "kept" with the first ones or "pinned" for ever, "grouped" with others at one position
# for as long, or in the "window" until newer ones push it out. Then it is "forgotten", or in a
# session with compressed cells "compressed": it may live on in cells that it shares with others.
Standing = Literal["kept", "pinned", "grouped", "window", "compressed", "forgotten"]
Place = tuple[int, int]  # a span's first token, and the one behind its last
GONE: frozenset[Standing] = frozenset(("compressed", "forgotten"))  # no cell of its own


@dataclass(frozen=True)
class Span:
    """Tokens `start ... end - 1` of a session.

    remembered: how many of them are still held.
    """

    name: str
    start: int
    end: int
    remembered: int

    @property
    def partly_forgotten(self) -> bool:
        return self.remembered < self.end - self.start


def after_edit(span: Place, start: int, end: int, added: int) -> Place:
    """Where a span lies once tokens `start ... end - 1` were replaced by `added` others.

    What is put in the place of tokens of a span belongs to it; what is put in at its border does
    not.
    """
    first, last = span
    change = added - (end - start)
    if first >= end:
        first += change
    elif first > start:
        first = start + added
    if last >= end and last > start:
        last += change
    elif last > start:
        last = start
    return first, max(first, last)


def after_rewind(span: Place, tokens: int) -> Place:
    """Where a span lies once only the first `tokens` are left."""
    return min(span[0], tokens), min(span[1], tokens)


def standing_in(segment: Segment, kept: bool, pinned: bool) -> Standing:
    """How a held cell stands."""
    if segment.map.group > 1:
        return "grouped"
    if segment.anchor and kept:
        return "kept"
    return "pinned" if pinned else "window"

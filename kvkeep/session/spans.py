"""Named ranges of tokens that move with the tokens around them, and the status of each token."""

from dataclasses import dataclass
from typing import Literal

from kvkeep.session.memory import Memory

# A token is "kept" as one of the first, "pinned", or "grouped" with others at one position, and is
# then never evicted; or it is in the "window" until newer ones evict it. After that it is
# "forgotten", or in a session with compressed cells "compressed": it may be part of cells that it
# shares with others.
TokenStatus = Literal["kept", "pinned", "grouped", "window", "compressed", "forgotten"]
TokenRange = tuple[int, int]  # the index of the first token, and the one after the last
WITHOUT_CELL: frozenset[TokenStatus] = frozenset(("compressed", "forgotten"))


@dataclass(frozen=True)
class Span:
    """Tokens `start ... end - 1` of a session. remembered: how many of them are still held."""

    name: str
    start: int
    end: int
    remembered: int

    @property
    def partly_forgotten(self) -> bool:
        return self.remembered < self.end - self.start


def span_after_edit(span: TokenRange, start: int, end: int, added_count: int) -> TokenRange:
    """Return a span's range after tokens `start ... end - 1` were replaced by others.

    Tokens that replace tokens of a span belong to it; tokens inserted at its border do not. With
    span (4, 8) and one token added: replacing 5 ... 6 gives (4, 7), inserting at 4 gives (5, 9).
    """
    new_start, new_end = span
    shift = added_count - (end - start)
    if new_start >= end:
        new_start += shift
    elif new_start > start:
        new_start = start + added_count
    if new_end >= end and new_end > start:
        new_end += shift
    elif new_end > start:
        new_end = start
    return new_start, max(new_start, new_end)


def token_statuses(memory: Memory) -> list[TokenStatus]:
    """Return the status of each token of a session, in order."""
    status_by_serial: dict[int, TokenStatus] = {}
    status_without_cell: TokenStatus = "forgotten"
    for segment in memory.cache.segments:
        if segment.compressed:
            status_without_cell = "compressed"
            continue
        for serial in segment.serials():
            if segment.position_map.group > 1:
                status: TokenStatus = "grouped"
            elif segment.is_anchor and len(status_by_serial) < memory.policy.keep:
                status = "kept"
            else:
                status = "pinned" if serial in memory.pins else "window"
            status_by_serial[serial] = status
    return [status_by_serial.get(serial, status_without_cell) for serial in memory.serials]

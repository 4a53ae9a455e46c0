"""Named ranges of tokens that move with the tokens around them, and the status of each token."""

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch

from kvkeep.cache import are_in
from kvkeep.session.memory import Memory

# A token is "kept" as one of the first, "pinned", or "grouped" with others at one position, and is
# then never evicted; or it is in the "window" until newer ones evict it. After that it is
# "forgotten", or in a session with compressed cells "compressed": it may be part of cells that it
# shares with others.
TokenStatus = Literal["kept", "pinned", "grouped", "window", "compressed", "forgotten"]
_STATUSES: tuple[TokenStatus, ...] = get_args(TokenStatus)
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
    segments = [segment for segment in memory.cache.segments if not segment.compressed]
    is_compressed = len(segments) < len(memory.cache.segments)
    serials = np.frombuffer(memory.serials.array(), dtype=np.int64)
    numbers = np.full(len(serials), _STATUSES.index("compressed" if is_compressed else "forgotten"))
    if num_cells := sum(segment.length for segment in segments):
        cell_serials = torch.cat([segment.live_serials().cpu() for segment in segments])
        cell_numbers = np.where(
            are_in(cell_serials, memory.pins).numpy(),
            _STATUSES.index("pinned"),
            _STATUSES.index("window"),
        )
        start = 0
        for segment in segments:
            end = start + segment.length
            if segment.position_map.group > 1:
                cell_numbers[start:end] = _STATUSES.index("grouped")
            elif segment.is_anchor:
                cell_numbers[start : min(end, memory.policy.keep)] = _STATUSES.index("kept")
            start = end
        held_serials = cell_serials.numpy()
        order = np.argsort(held_serials, kind="stable")
        places = np.searchsorted(held_serials, serials, sorter=order)
        cells = order[np.minimum(places, num_cells - 1)]
        has_cell = held_serials[cells] == serials
        numbers[has_cell] = cell_numbers[cells[has_cell]]
    return [_STATUSES[number] for number in numbers.tolist()]

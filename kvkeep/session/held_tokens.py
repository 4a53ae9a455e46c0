"""Finds the tokens of a text that still have cells, by comparing serials."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from kvkeep.cache import KVCache, Segment
from kvkeep.session.history import History


def count_newest_held(segments: Sequence[Segment], serials: History) -> int:
    """Return how many of the newest tokens are held without a gap, outside self-extend's groups.

    serials: of all tokens so far, evicted ones included.
    """
    parts = [s.live_serials().cpu() for s in segments if s.position_map.group == 1]
    if not parts:
        return 0
    held = torch.cat(parts).numpy()
    newest = np.frombuffer(serials.last(len(held)), dtype=np.int64)
    count = len(newest)
    differing = np.flatnonzero(held[len(held) - count :] != newest)
    return int(count - 1 - differing[-1]) if len(differing) else count


def exact_serials(segments: Sequence[Segment]) -> NDArray[np.int64]:
    """Return the serials of the uncompressed cells, which are in the order of the tokens."""
    parts = [s.live_serials() for s in segments if not s.compressed]
    return torch.cat(parts).numpy() if parts else np.empty(0, np.int64)


def count_exact(segments: Sequence[Segment], serials: History, start: int, end: int) -> int:
    """Return how many of tokens `start ... end - 1` have a cell of their own."""
    held = exact_serials(segments)
    return _count_cells_before(held, serials, end) - _count_cells_before(held, serials, start)


def _count_cells_before(held: NDArray[np.int64], serials: History, index: int) -> int:
    """Return how many of the cells with serials `held` are of tokens before token `index`.

    A cell of that token or of the one before it is found by one comparison with each serial.
    """
    for neighbour, offset in ((index, 0), (index - 1, 1)):
        if 0 <= neighbour < len(serials):
            (ranks,) = np.nonzero(held == serials[neighbour])
            if len(ranks):
                return int(ranks[0]) + offset
    earlier = np.frombuffer(serials.first(index).array(), dtype=np.int64)
    return int(np.count_nonzero(np.isin(held, earlier)))


def is_edited_in_place(cache: KVCache, serials: History) -> bool:
    """Whether some cells may have been computed with other earlier tokens than they have now.

    The clock counts tokens as they came, and those that were put between others have newer
    serials than the ones after them. Where as many were removed as inserted, the cells in
    between are seen at another distance; after an eviction, all anchors are.
    """
    numbers = np.frombuffer(serials.array(), dtype=np.int64)
    if cache.time != len(numbers) or bool((np.diff(numbers) < 0).any()):
        return True
    maps = [segment.position_map for segment in cache.segments]
    is_moved = any(each.group == 1 and each.offset for each in maps)
    return is_moved and cache.cells == len(numbers)

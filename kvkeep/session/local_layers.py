"""Re-evaluation of local layers' cells after changes that leave their window incomplete.

Local layers have evicted what lies before their window. If tokens are removed, or an edit reaches
into the window, the tokens that they must see next are evaluated again; the cells of the other
layers stay as they are.
"""

from collections.abc import Sequence

import torch

from kvkeep.cache import KVCache, Segment, Window
from kvkeep.models.layers.decoder import Decoder
from kvkeep.models.layers.primitives import require_finite

STEP = 512  # tokens evaluated at a time
REACH = 2  # windows that an edit in place re-evaluates: the first starts without earlier cells


def local_cells(decoder: Decoder, cache: KVCache, ids: Sequence[int]) -> list[Segment]:
    """Return the segments of local layers after evaluating tokens, without cells before these.

    cache: its newest cells are those of `ids`; it does not change. Raises NonFiniteLogits.
    """
    again = cache.fork()
    again.observer, again.window = None, Window()
    again.drop_newest(len(ids))
    again.serial -= len(ids)  # the tokens get the same serials again
    assert again.local is not None
    again.local.segments = []
    again.segments.append(Segment(again.layout, len(ids)))
    with torch.inference_mode():
        for first in range(0, len(ids), STEP):
            step_ids = ids[first : first + STEP]
            chunk = torch.tensor(step_ids, dtype=torch.int64, device=again.layout.device)
            with again.step(len(chunk)) as step:
                require_finite(decoder.hidden(chunk, step))
    return again.local.segments


def sees_whole_window(cache: KVCache, tokens: int, taken: int) -> bool:
    """Whether local layers hold a whole window after `taken` of the last tokens are removed.

    tokens: count of all tokens.
    """
    local = cache.local
    if local is None or local.window.size is None:
        return True
    return local.cells - taken >= min(local.window.size - 1, tokens - taken)


def newest_together(cache: KVCache, serials: Sequence[int]) -> int:
    """Return how many of the last tokens are held without a gap, outside self-extend's groups.

    serials: of all tokens, in order.
    """
    held = 0
    exact = [s for segment in cache.segments if segment.map.group == 1 for s in segment.serials()]
    for cell, token in zip(reversed(exact), reversed(serials), strict=False):
        if cell != token:
            break
        held += 1
    return held

"""The cells of local layers, made anew where a change has left them without some.

Local layers have forgotten what lies before their window. Where tokens are taken back, or an edit
reaches into the window, what they are to see next is evaluated once more; the cells of the other
layers stay as they are.
"""

from collections.abc import Sequence

import torch

from kvkeep.cache import KVCache, Segment, Window
from kvkeep.models.layers.decoder import Decoder
from kvkeep.models.layers.primitives import require_finite

STEP = 512  # tokens evaluated at a time
REACH = 2  # windows that an edit in place evaluates anew: the first begins with nothing before it


def local_cells(decoder: Decoder, cache: KVCache, ids: Sequence[int]) -> list[Segment]:
    """What local layers hold once these tokens are read, of which nothing before is known to them.

    cache: whose newest cells are of `ids`; it stays as it is. Raises NonFiniteLogits.
    """
    again = cache.fork()
    again.observer, again.window = None, Window()
    again.drop_newest(len(ids))
    again.serial -= len(ids)  # no greater than those that were given
    assert again.local is not None
    again.local.segments = []
    again.segments.append(Segment(again.layout, len(ids)))
    with torch.inference_mode():
        for first in range(0, len(ids), STEP):
            some = ids[first : first + STEP]
            chunk = torch.tensor(some, dtype=torch.int64, device=again.layout.device)
            with again.step(len(chunk)) as step:
                require_finite(decoder.hidden(chunk, step))
    return again.local.segments


def sees_whole_window(cache: KVCache, tokens: int, taken: int) -> bool:
    """Whether local layers hold all that a token sees once `taken` of so many are taken back."""
    local = cache.local
    if local is None or local.window.size is None:
        return True
    return local.cells - taken >= min(local.window.size - 1, tokens - taken)


def newest_together(cache: KVCache, serials: Sequence[int]) -> int:
    """How many of the last tokens are held without a gap, and not in groups.

    serials: of the tokens, in their order.
    """
    held = 0
    exact = [s for segment in cache.segments if segment.map.group == 1 for s in segment.serials()]
    for cell, token in zip(reversed(exact), reversed(serials), strict=False):
        if cell != token:
            break
        held += 1
    return held

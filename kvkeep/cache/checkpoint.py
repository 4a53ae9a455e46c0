"""Checkpoints: copies of the parts of a cache that later tokens overwrite.

Cells of global layers stay where they are until they are evicted, so tokens can be taken back by
dropping the newest cells. The windows of local layers move on, and recurrent states change with
each token: to go back to an earlier token, both must have been copied there.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvkeep.cache.block import Storage
from kvkeep.cache.checks import require
from kvkeep.cache.layout import Layout
from kvkeep.cache.rope import PositionMap
from kvkeep.cache.segment import Segment
from kvkeep.cache.state import CacheState
from kvkeep.cache.window import Window


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """The local windows and recurrent states of a cache after some of its tokens.

    num_tokens: how many tokens came before, evicted ones included. time: the cache's clock then;
    the same number of tokens at another time are not the same cells, because of an edit.
    local_segments: of the local layers' cache, in shared storage (copy-on-write).
    recurrent_states: of layers without cells, by name. branches: whether several texts begin with
    these tokens.
    """

    num_tokens: int
    time: int
    local_segments: tuple[Segment, ...]
    recurrent_states: Mapping[str, Tensor]
    branches: bool = False


def checkpoint_nbytes(checkpoints: Iterable[Checkpoint]) -> int:
    """Return the bytes of checkpoints; storage that several share counts once."""
    storages, states = set[Storage](), dict[int, int]()
    for checkpoint in checkpoints:
        storages |= {segment.block.storage for segment in checkpoint.local_segments}
        states |= {id(state): state.nbytes for state in checkpoint.recurrent_states.values()}
    return sum(storage.nbytes for storage in storages) + sum(states.values())


def check_evaluated(checkpoint: Checkpoint, layout: Layout, window: Window | None) -> None:
    """Raise ValueError unless a prompt, evaluated from its beginning, can have left a checkpoint.

    layout: of the cells in its local windows. window: of the local layers, None without any.
    """
    count, segments = checkpoint.num_tokens, checkpoint.local_segments
    require(checkpoint.time == count, "a checkpoint of an edited text")
    states = checkpoint.recurrent_states
    contents = CacheState((), Window(), count, count, None, segments, states)
    contents.check(layout, layout, 1, layout)
    require(len(segments) == (window is not None), f"windows in {len(segments)} pieces")
    for segment in segments:
        require(window is not None and segment.limit == window.capacity, "another window's size")
        require(not (segment.frozen or segment.sealed), "a window that takes no more cells")
        require(segment.position_map == PositionMap(), "a window that was moved")
        require(segment.length == min(count, segment.limit), "an incomplete window")
        expected = torch.arange(count - segment.length, count, dtype=torch.int64, device="cpu")
        live_serials = segment.select_live(segment.block.slots.serials)
        is_in_order = torch.equal(segment.positions(), expected)
        require(is_in_order and torch.equal(live_serials, expected), "a window out of order")

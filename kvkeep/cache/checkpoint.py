"""Checkpoints: copies of the parts of a cache that later tokens overwrite.

Cells of global layers stay where they are until they are evicted, so tokens can be taken back by
dropping the newest cells. The windows of local layers move on, and recurrent states change with
each token: to go back to an earlier token, both must have been copied there.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from kvkeep.cache.block import Storage
from kvkeep.cache.segment import Segment


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

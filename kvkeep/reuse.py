"""Between a memory and a prefix store: what a prompt can take, and what it leaves there."""

from typing import TYPE_CHECKING

import torch

from kvkeep.cache import Bits, Cells
from kvkeep.memory import Memory
from kvkeep.store.prefix import BLOCK, PrefixStore

if TYPE_CHECKING:
    from kvkeep.model import Model


def take_from(
    store: PrefixStore, model: "Model", memory: Memory, ids: list[int]
) -> tuple[int, int | None]:
    """Takes what a store holds of a first prompt into an empty memory.

    One token is left to evaluate, for its logits. Returns how many tokens were taken, and the
    first at which the nearest stored prompt differs.
    """
    most = min(len(ids) - 1, memory.policy.exact)  # more would be forgotten or compressed again
    found = store.find(model.fingerprint, ids[:most])
    if found.tokens:
        keys, values = torch.cat(found.keys, 2), torch.cat(found.values, 2)
        memory.adopt(ids[: found.tokens], keys, values)
    return found.tokens, found.differs_at


def give_to(store: PrefixStore, model: "Model", memory: Memory, stored: int) -> int:
    """Gives a store the whole blocks that came after the first `stored` tokens.

    Only while nothing was forgotten or quantised: after that, cells are no longer what their
    tokens alone would give. Returns how many tokens are stored now.
    """
    tokens, cache = memory.tokens, memory.cache
    compressed = any(segment.compressed for segment in cache.segments)
    if len(tokens) != cache.cells or compressed or memory.bits != Bits():
        return stored
    while stored + BLOCK <= len(tokens):
        cells = Cells.joined([part for _, part in cache.read(stored, BLOCK)])
        stored += BLOCK
        store.add(model.fingerprint, tokens[:stored], cells.keys, cells.values)
    return stored

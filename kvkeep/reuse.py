"""Between a memory and a prefix store: what a prompt can take, and what it leaves there."""

from typing import TYPE_CHECKING

import torch

from kvkeep.cache import Bits, Cells, KVCache, PositionMap
from kvkeep.memory import Memory
from kvkeep.store.prefix import BLOCK, PrefixStore

if TYPE_CHECKING:
    from kvkeep.model import Model


def load_prefix(
    store: PrefixStore, model: "Model", memory: Memory, ids: list[int]
) -> tuple[int, int | None]:
    """Takes what a store holds of a first prompt into an empty memory.

    No more than the policy keeps exact. Some tokens are left to evaluate before the prompt ends,
    or the policy first decides what stays: one for its logits, and as many as it observes, so that
    it decides by the same queries as without a store. Returns how many tokens were taken, and the
    first at which the nearest stored prompt differs.
    """
    policy = memory.policy
    most = min(len(ids), policy.exact + 1) - max(1, policy.observed)
    found = store.find(model.fingerprint, ids[: max(0, most)])
    if found.tokens:
        keys, values = torch.cat(found.keys, 2), torch.cat(found.values, 2)
        memory.append_evaluated(ids[: found.tokens], keys, values)
    return found.tokens, found.differs_at


def store_prefix(store: PrefixStore, model: "Model", memory: Memory, stored: int) -> int:
    """Gives a store the whole blocks that came after the first `stored` tokens of a first prompt.

    Only cells that are what their tokens alone give. Returns how many tokens are stored now.
    """
    if memory.bits != Bits():
        return stored
    exact = min(_plain(memory.cache), memory.policy.exact)
    while stored + BLOCK <= exact:
        cells = Cells.joined([part for _, part in memory.cache.read(stored, BLOCK)])
        stored += BLOCK
        store.add(model.fingerprint, memory.tokens[:stored], cells.keys, cells.values)
    return stored


def _plain(cache: KVCache) -> int:
    """How many of the oldest cells are at positions 0, 1, 2 ..., and are seen from there."""
    count = 0
    for segment in cache.segments:
        if segment.compressed or segment.map != PositionMap():
            break
        slots = segment.slots(0, segment.length)
        positions = torch.cat([segment.block.slots.positions[where] for where in slots])
        wanted = torch.arange(count, count + segment.length, dtype=torch.int64, device="cpu")
        if not torch.equal(positions, wanted):
            break
        count += segment.length
    return count

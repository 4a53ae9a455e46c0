"""Loading a first prompt's evaluated prefix from a prefix store, and storing it there."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvkeep.cache import Bits, Cells, KVCache, PositionMap
from kvkeep.errors import StoreError
from kvkeep.session.memory import Memory
from kvkeep.storage.prefixes.interface import PrefixCache
from kvkeep.storage.prefixes.inventory import BLOCK_TOKENS
from kvkeep.storage.snapshots.fingerprint import Fingerprint

_LOCAL = (
    "some layers of this model see the newest tokens alone, and keep no others: its prompts are "
    "evaluated from the beginning; save a session and restore it instead"
)
_RECURRENT = (
    "some layers of this model keep states of all tokens so far: its prompts are evaluated from "
    "the beginning; save a session and restore it instead"
)


@dataclass
class PromptPrefix:
    """The stored part of a session's first prompt.

    A store only saves work: after a failure it is not used any more.

    store: None without one, or if nothing more is to be stored there. reused: tokens that came from
    it. stored: tokens that it holds now. differs_at: the first token at which the nearest stored
    prompt differs. error: the message of its failure.
    """

    store: PrefixCache | None
    fingerprint: Fingerprint
    reused: int = 0
    stored: int = 0
    differs_at: int | None = None
    error: str | None = None

    def fail(self, error: StoreError) -> None:
        self.error, self.store = str(error), None


def load_prefix(
    store: PrefixCache, fingerprint: Fingerprint, memory: Memory, ids: Sequence[int]
) -> PromptPrefix:
    """Load the stored prefix of a first prompt into an empty memory.

    At most as many tokens as the policy keeps exactly. Some are left to evaluate before the prompt
    ends, or before the policy first evicts or compresses: one for its logits, and as many as the
    policy observes, so that it decides by the same queries as without a store.
    """
    prefix, policy = PromptPrefix(store, fingerprint), memory.policy
    if memory.cache.local is not None or memory.decoder.spec.recurrent:
        prefix.fail(StoreError(_LOCAL if memory.cache.local is not None else _RECURRENT))
        return prefix
    most = min(len(ids), policy.exact + 1) - max(1, policy.observed)
    try:
        match = store.find(fingerprint, ids[: max(0, most)])
    except StoreError as error:
        prefix.fail(error)
        return prefix
    if match.tokens:
        keys, values = torch.cat(match.keys, 2), torch.cat(match.values, 2)
        memory.append_evaluated(ids[: match.tokens], keys, values)
    prefix.reused = prefix.stored = match.tokens
    prefix.differs_at = match.differs_at
    return prefix


def store_prefix(prefix: PromptPrefix, memory: Memory, upcoming: int) -> None:
    """Store the whole blocks of a first prompt that the store does not have yet.

    Only cells that depend on their tokens alone. To amortise finding their place among earlier
    blocks, they are stored once there are as many as the store holds of the prompt; all of them
    before the policy changes them, and at the prompt's end.

    upcoming: how many tokens the next step may evaluate; 0 at the prompt's end.
    """
    count, exact = len(memory.tokens), memory.policy.exact
    pending = min(count, exact) - prefix.stored
    if prefix.store is None or pending < BLOCK_TOKENS or memory.bits != Bits():
        return
    if upcoming and count + upcoming <= exact and pending < prefix.stored:
        return
    end = min(_plain(memory.cache), exact) // BLOCK_TOKENS * BLOCK_TOKENS
    if end <= prefix.stored:
        return
    tokens, blocks = memory.tokens[:end], _cells(memory.cache, prefix.stored, end)
    try:
        prefix.stored = prefix.store.add(prefix.fingerprint, tokens, prefix.stored, blocks)
    except StoreError as error:
        prefix.fail(error)
    if prefix.stored < end:
        prefix.store = None


def _cells(cache: KVCache, start: int, end: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield keys and values block by block, each copied on demand."""
    for first in range(start, end, BLOCK_TOKENS):
        cells = Cells.concatenate([part for _, part in cache.read(first, BLOCK_TOKENS)])
        yield cells.keys, cells.values


def _plain(cache: KVCache) -> int:
    """The count of oldest cells that are at positions 0, 1, 2 ... under the identity map."""
    count = 0
    for segment in cache.segments:
        if segment.compressed or segment.map != PositionMap():
            break
        slots = segment.slots(0, segment.length)
        positions = torch.cat([segment.block.slots.positions[part] for part in slots])
        expected = torch.arange(count, count + segment.length, dtype=torch.int64, device="cpu")
        if not torch.equal(positions, expected):
            break
        count += segment.length
    return count

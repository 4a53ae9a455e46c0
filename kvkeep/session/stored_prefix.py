"""The part of a session's first prompt that a prefix cache holds, and what is stored of it."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvkeep.cache import Cells, KVCache, PositionMap
from kvkeep.cache.checkpoint import Checkpoint, check_evaluated
from kvkeep.errors import StoreError
from kvkeep.loaded_model import LoadedModel
from kvkeep.session.checkpoints import take_checkpoint
from kvkeep.session.memory import Memory
from kvkeep.storage.prefixes.block import CheckpointNeed, PrefixCache, PrefixMatch
from kvkeep.storage.prefixes.inventory import BLOCK_TOKENS, kept_checkpoint_ends


@dataclass
class StoredPrefix:
    """The part of a session's first prompt that a prefix cache holds.

    prefix_cache: None if nothing more is to be stored there, as after an error. num_reused: tokens
    that came from it. num_found: tokens that it had. num_stored: those before the next to store.
    differs_at, error: see `FeedReport`.
    rounded: the codec by which the reused cells were rounded, or "".
    checkpoint_ends: after which tokens of the prompt it keeps a checkpoint, for models with local
    layers or states.
    """

    prefix_cache: PrefixCache | None
    model: LoadedModel
    num_reused: int = 0
    num_found: int = 0
    num_stored: int = 0
    differs_at: int | None = None
    error: str | None = None
    rounded: str = ""
    checkpoint_ends: frozenset[int] = field(default_factory=frozenset)

    def find(self, memory: Memory, ids: Sequence[int]) -> PrefixMatch:
        """Return what the store holds of a prompt, for an empty memory; nothing after an error.

        At most as many tokens as the policy keeps exactly. Some are left to evaluate before the
        prompt ends, or before the policy first evicts or compresses: one for its logits, and as
        many as the policy observes, so that it decides by the same queries as without a store.
        """
        policy, prefix_cache = memory.policy, self.prefix_cache
        assert prefix_cache is not None
        max_tokens = min(len(ids), policy.exact_tokens + 1) - max(1, policy.query_count)
        need = checkpoint_need(memory) if memory.overwrites else None
        try:
            return prefix_cache.find(self.model.fingerprint, ids[: max(0, max_tokens)], need)
        except StoreError as error:
            self._stop_storing(str(error))
            return PrefixMatch([], None)

    def load(
        self, match: PrefixMatch, memory: Memory, ids: Sequence[int], prefill_step: int
    ) -> None:
        """Load what `find` returned of a prompt into an empty memory."""
        if self.prefix_cache is None:
            return
        if match.token_count:
            keys, values = (torch.cat(cells, 2) for cells in zip(*match.blocks, strict=True))
            memory.append_evaluated(ids[: match.token_count], keys, values)
        if match.checkpoint is not None:
            memory.cache.load_checkpoint(match.checkpoint)
            take_checkpoint(memory)
        self.num_reused = self.num_stored = match.token_count
        self.rounded = match.rounded if match.token_count else ""
        self.num_found, self.differs_at = match.stored_tokens, match.differs_at
        if memory.overwrites:
            num_tokens = min(len(ids), memory.policy.exact_tokens)
            self._plan_checkpoints(num_tokens, prefill_step)

    def _plan_checkpoints(self, num_tokens: int, prefill_step: int) -> None:
        """Decide after which tokens to store a checkpoint: at ends of blocks and whole steps.

        One of them is where the nearest stored prompt differs, since more texts may branch there.
        """
        spacing = math.lcm(prefill_step, BLOCK_TOKENS)
        ends = kept_checkpoint_ends(num_tokens, spacing)
        branch = (self.differs_at or 0) // spacing * spacing
        self.checkpoint_ends = frozenset([*ends, branch] if branch > self.num_reused else ends)
        is_long = num_tokens >= max(BLOCK_TOKENS, prefill_step)
        if is_long and not self.checkpoint_ends:
            self._stop_storing(
                f"prompts of this model are stored at common multiples of {BLOCK_TOKENS} tokens "
                f"and the prefill step, {prefill_step}: choose a power of two"
            )

    def store_blocks(self, memory: Memory, next_step_tokens: int) -> None:
        """Store the complete blocks of the prompt that the store does not have yet.

        Only cells that depend on their tokens alone. To amortise the search among earlier blocks,
        as many are stored at once as the store already has; all of them before the policy changes
        them, and at the prompt's end. Of a model with local layers or states those up to each
        checkpoint, with it.

        next_step_tokens: how many tokens the next step may evaluate; 0 at the prompt's end.
        """
        num_tokens, exact = len(memory.tokens), memory.policy.exact_tokens
        num_pending = min(num_tokens, exact) - self.num_stored
        if self.prefix_cache is None or num_pending < BLOCK_TOKENS:
            return
        can_wait = next_step_tokens > 0 and num_tokens + next_step_tokens <= exact
        is_due = not can_wait or num_pending >= self.num_stored
        if not (num_tokens in self.checkpoint_ends if memory.overwrites else is_due):
            return
        end = min(_count_unchanged_cells(memory.cache), exact) // BLOCK_TOKENS * BLOCK_TOKENS
        if end <= self.num_stored:
            return
        if not memory.overwrites:
            self._add(memory, end, None)
        elif end == num_tokens and _is_usable(checkpoint := memory.cache.checkpoint(end), memory):
            self._add(memory, end, checkpoint)

    def _add(self, memory: Memory, end: int, checkpoint: Checkpoint | None) -> None:
        """Store the blocks of the tokens up to `end`, and a checkpoint after them."""
        assert self.prefix_cache is not None
        tokens, blocks = memory.tokens[:end], _read_blocks(memory.cache, self.num_stored, end)
        prompt_part = (self.model.fingerprint, tokens, self.num_stored, blocks)
        try:
            if checkpoint is None:
                self.num_stored = self.prefix_cache.add(*prompt_part)
            else:
                kept_ends = self.checkpoint_ends
                self.num_stored = self.prefix_cache.add(*prompt_part, checkpoint, kept_ends)
        except StoreError as error:
            self._stop_storing(str(error))
        if self.num_stored < end:
            self.prefix_cache = None

    def _stop_storing(self, error: str) -> None:
        self.error, self.prefix_cache = error, None


def checkpoint_need(memory: Memory) -> CheckpointNeed:
    """Return which checkpoints a memory of its kind can continue from."""
    local_cache = memory.cache.local_cache
    local_layout = None if local_cache is None else local_cache.layout
    return CheckpointNeed(local_layout, lambda checkpoint: _check(checkpoint, memory))


def _check(checkpoint: Checkpoint, memory: Memory) -> None:
    """Raise ValueError for a checkpoint that is not of the memory's model, or of an edited text."""
    cache, spec = memory.cache, memory.decoder.spec
    if (local_cache := cache.local_cache) is None:
        check_evaluated(checkpoint, cache.layout, None)
    else:
        check_evaluated(checkpoint, local_cache.layout, local_cache.window)
    states = checkpoint.recurrent_states
    if bool(states) != spec.keeps_states:
        raise ValueError("states are missing, or unexpected")
    if spec.states is not None:
        spec.states.check(states, cache.layout.dtype)


def _is_usable(checkpoint: Checkpoint, memory: Memory) -> bool:
    """Whether a new session could continue from a checkpoint of this memory."""
    try:
        _check(checkpoint, memory)
    except ValueError:
        return False
    return True


def _read_blocks(cache: KVCache, start: int, end: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield keys and values of cells `start ... end - 1`, of `BLOCK_TOKENS` tokens at a time."""
    for first in range(start, end, BLOCK_TOKENS):
        cells = Cells.concatenate([part for _, part in cache.read(first, BLOCK_TOKENS)])
        yield cells.keys, cells.values


def _count_unchanged_cells(cache: KVCache) -> int:
    """Count the oldest cells that are where a prompt puts them: at positions 0, 1, 2 ... ."""
    count = 0
    for segment in cache.segments:
        if segment.compressed or segment.position_map != PositionMap():
            break
        expected = torch.arange(count, count + segment.length, dtype=torch.int64, device="cpu")
        if not torch.equal(segment.positions(), expected):
            break
        count += segment.length
    return count

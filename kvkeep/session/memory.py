"""A session's memory: token ids, and the cells that its policy keeps of them."""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvkeep.cache import Bits, Cells, Segment
from kvkeep.cache.checkpoint import Checkpoints
from kvkeep.cache.restoring import restored_cache, restored_checkpoint
from kvkeep.cache.shallow_copy import shallow_copy
from kvkeep.cache.storage import nbytes as storage_bytes
from kvkeep.errors import ContextFull, InvalidArgument, NonFiniteLogits
from kvkeep.models.layers.decoder import Decoder
from kvkeep.policies import Policy, checked_bits
from kvkeep.session.held_tokens import count_exact, count_newest_held
from kvkeep.session.history import History
from kvkeep.storage.snapshots.memory_state import MemoryState


class Memory:
    """The tokens of a session, their KV cache under a policy, and the last token's hidden state.

    A call that fails may leave half of its work behind: callers change a `successor` or a `fork`.

    decoder: the model's forward. bits: of stored numbers. tokens: all ids so far, evicted ones
    included. serials: the number that each token got when it was evaluated, by which its cell is
    found. pins: serials of pinned tokens. hidden: `[1, hidden_size]` of the last token.
    checkpoints: from which local windows and states of earlier tokens are computed anew.
    """

    def __init__(self, decoder: Decoder, policy: Policy, bits: Bits = Bits()):  # noqa: B008
        """Raises InvalidArgument for bits that the policy cannot store cells in."""
        self.decoder = decoder
        self.policy = policy
        self.bits = checked_bits(policy, bits)
        self.cache = decoder.new_cache(bits, policy.max_kv_size)
        self.tokens = History("i")
        self.serials = History("q")
        self.pins: frozenset[int] = frozenset()
        self.hidden: Tensor | None = None
        self.checkpoints = Checkpoints()
        self._logits: Tensor | None = None  # computed from `hidden` when they are first needed

    def fork(self) -> "Memory":
        """Return a copy that changes independently of this memory; cells are shared."""
        fork = copy.copy(self)
        fork.cache = self.cache.fork()
        return fork

    def successor(self) -> "Memory":
        """Return a copy to change and then use in place of this memory; see `KVCache.successor`."""
        successor = shallow_copy(self)
        successor.cache = self.cache.successor()
        return successor

    def commit(self) -> None:
        """Release the memory before this successor, and storage that only that one used."""
        self.cache.commit()
        self.cache.trim(self.policy.max_kv_size)

    def logits(self) -> Tensor | None:
        """Return `[vocab]` float32 for the last token; None before the first."""
        if self._logits is None and self.hidden is not None:
            with torch.inference_mode():
                self._logits = self.decoder.logits(self.hidden)[0]
        return self._logits

    def state(self) -> MemoryState:
        """Return the state to save. Cells are shared until one side must write to them.

        Without logits, as after a removal, if the model produces NaN or infinity for them.
        """
        try:
            logits = self.logits()
        except NonFiniteLogits:  # raised again by what needs them
            logits = None
        return MemoryState(
            tokens=torch.tensor(self.tokens.array(), dtype=torch.int32, device="cpu"),
            serials=torch.tensor(self.serials.array(), dtype=torch.int64, device="cpu"),
            pins=sorted(self.pins),
            hidden=None if self.hidden is None or logits is None else self.hidden.clone(),
            logits=None if logits is None else logits.clone(),
            cache=self.cache.state(),
            checkpoints=self.checkpoints,
        )

    @classmethod
    def from_state(
        cls, decoder: Decoder, policy: Policy, bits: Bits, state: MemoryState
    ) -> "Memory":
        """Return the memory with a state. Raises ValueError if it is impossible for this model."""
        memory = cls(decoder, policy, bits)
        layout, device = memory.cache.layout.plain, memory.cache.layout.device
        memory.cache = restored_cache(memory.cache, state.cache)
        state.check(decoder.spec, layout)
        policy.check_contents(memory.cache)
        local_cache = memory.cache.local_cache
        local_layout = None if local_cache is None else local_cache.layout
        state.checkpoints.check(state.cache, len(state.tokens), local_layout)
        checkpoints = state.checkpoints.entries
        entries = tuple(restored_checkpoint(memory.cache, each) for each in checkpoints)
        memory.checkpoints = replace(state.checkpoints, entries=entries)
        memory.tokens = memory.tokens.extended(state.tokens.tolist())
        memory.serials = memory.serials.extended(state.serials.tolist())
        memory.pins = frozenset(state.pins)
        if state.hidden is not None and state.logits is not None:
            memory.hidden = state.hidden.to(device, copy=True)
            memory._logits = state.logits.to(device, copy=True)
        return memory

    # Limits

    def require_room(self, count: int) -> None:
        """Raise ContextFull if the policy cannot take `count` more tokens."""
        available = self.policy.room(self.cache)
        if available is not None and count > available:
            raise ContextFull(
                f'policy "{self.policy.name}" holds at most {self.policy.max_kv_size} tokens: '
                f"{self.cache.cells} are in the cache, up to {self.cache.reach} positions back, "
                f'so {count} more cannot be added; policy="sliding" generates indefinitely in a '
                "fixed budget"
            )

    @property
    def overwrites(self) -> bool:
        """Whether tokens overwrite parts of the cache: windows of local layers, or states."""
        return self.cache.local_cache is not None or self.decoder.spec.keeps_states

    def require_no_states(self, operation: str, alternative: str) -> None:
        """Raise InvalidArgument if layers keep states. operation: a participle, as "compressed"."""
        if self.decoder.spec.keeps_states:
            raise InvalidArgument(
                f"this session cannot be {operation}: some layers of the model keep states of all "
                f"tokens instead of cells, which cannot be changed; {alternative}"
            )

    @property
    def num_held(self) -> int:
        """The number of newest tokens held without a gap, outside self-extend's groups."""
        return count_newest_held(self.cache.segments, self.serials)

    def count_exact(self, start: int, end: int) -> int:
        """Return how many of tokens `start ... end - 1` have a cell of their own."""
        return count_exact(self.cache.segments, self.serials, start, end)

    @property
    def holds_all(self) -> bool:
        """Whether all tokens are held; in local layers those of a window."""
        return self.num_held == len(self.tokens) and self.holds_overwritten()

    def holds_overwritten(self, removed_count: int = 0) -> bool:
        """Whether the next token would find whole local windows, and states, after a removal.

        removed_count: of the newest tokens.
        """
        local, remaining = self.cache.local_cache, len(self.tokens) - removed_count
        if self.decoder.spec.keeps_states and remaining:
            return bool(self.cache.recurrent_states) and not removed_count
        if local is None or local.window.size is None:
            return True
        return local.cells - removed_count >= min(local.window.size - 1, remaining)

    # Tokens

    def append(self, ids: Sequence[int], hidden: Tensor | None, logits: Tensor | None) -> None:
        """Append tokens whose cells the cache has just taken.

        hidden: `[1, hidden_size]`, logits: `[vocab]`, of the last token; None if not known.
        """
        self.tokens = self.tokens.extended(ids)
        self.serials = self.serials.extended(range(self.cache.serial - len(ids), self.cache.serial))
        self.hidden, self._logits = hidden, logits

    def append_evaluated(self, ids: Sequence[int], keys: Tensor, values: Tensor) -> None:
        """Append tokens with cells that were evaluated elsewhere, as if they had been just now.

        keys, values: `[layers, kv_heads, n, head_dim]` at the next positions; no logits result.
        """
        start, cache = 0, self.cache
        while start < len(ids):
            count = self.policy.open(cache, len(ids) - start)
            end, offsets = start + count, torch.arange(count, dtype=torch.int64, device="cpu")
            positions, serials = offsets + cache.time, offsets + cache.serial
            cells = Cells(keys[:, :, start:end], values[:, :, start:end], positions, serials)
            cache.segments[-1].append(cells.to(cache.layout.device))
            cache.time += count
            cache.serial += count
            self.policy.enforce_bounds(cache)
            start = end
        self.append(ids, None, None)

    def replace_tokens(
        self, start: int, end: int, ids: Sequence[int], pinned: bool = False
    ) -> None:
        """Replace tokens `start ... end - 1` by `ids`, with the newest serials; no cell changes."""
        serials = range(self.cache.serial - len(ids), self.cache.serial)
        self.pins -= set(self.serials[start:end])
        if pinned:
            self.pins |= set(serials)
        self.tokens = self.tokens.replaced(start, end, ids)
        self.serials = self.serials.replaced(start, end, serials)
        # The clock of earlier tokens moves unless as many are inserted as removed.
        self.checkpoints = self.checkpoints.up_to(start if len(ids) == end - start else 0)

    # Storage

    @property
    def nbytes(self) -> int:
        """Bytes of its cells, states and checkpoints in memory, idle storage included."""
        return memory_bytes([self])

    @property
    def all_segments(self) -> list[Segment]:
        """The segments of its cache and of its checkpoints."""
        checkpoints = self.checkpoints.entries
        return [*self.cache.all_segments, *(s for c in checkpoints for s in c.local_segments)]

    @property
    def all_states(self) -> list[Tensor]:
        """The recurrent states of its cache and of its checkpoints, each tensor once."""
        mappings = [self.cache.recurrent_states]
        mappings += [each.recurrent_states for each in self.checkpoints.entries]
        states = [state for mapping in mappings for state in mapping.values()]
        return list({id(state): state for state in states}.values())

    # Removing the newest tokens

    def drop_newest(self, count: int) -> list[int]:
        """Remove and return the last `count` tokens, all held: cells, pins and logits as well."""
        self.cache.drop_newest(count)
        remaining = len(self.tokens) - count
        if not remaining:
            self.cache.restart_clock()
        removed, lost_pins = self.tokens[remaining:], self.pins & set(self.serials[remaining:])
        self.tokens, self.serials = self.tokens.first(remaining), self.serials.first(remaining)
        self.checkpoints = self.checkpoints.up_to(remaining)
        self.hidden = self._logits = None
        if lost_pins:
            self.pins -= lost_pins
            self.change_policy()
        return removed

    def rewind(self, count: int) -> tuple[list[int], list[int], bool]:
        """Remove the last `count` tokens, all held, and pop the one before them.

        The popped token is to be evaluated again; none is if `count` is 0. Returns the removed
        tokens, and what `pop_last` does.
        """
        return (self.drop_newest(count), *self.pop_last()) if count else ([], [], False)

    def pop_last(self) -> tuple[list[int], bool]:
        """Remove the last token, if any: return its id in a list, and whether it was pinned."""
        last_serials = self.serials[-1:]
        pinned = not self.pins.isdisjoint(last_serials)
        if pinned:  # the token gets another serial
            self.unpin(len(self.serials) - 1, len(self.serials))
        return self.drop_newest(len(last_serials)), pinned

    def clear(self) -> list[int]:
        """Remove and return every token, held or not."""
        removed = list(self.tokens)
        self.pins = frozenset()
        self.checkpoints = self.checkpoints.up_to(0)
        empty = Memory(self.decoder, self.policy, self.bits)
        self.cache, self.hidden, self._logits = empty.cache, None, None
        self.tokens, self.serials = empty.tokens, empty.serials
        return removed

    # Policy and pins

    @torch.inference_mode()
    def change_policy(self, **settings: int) -> None:
        """Change the policy's settings and rearrange the cache, or raise InvalidArgument before."""
        self.policy = self.policy.reconfigure(self.cache, self.pins, **settings)

    def pin(self, start: int, end: int) -> None:
        """Turn tokens `start ... end - 1` into anchors, wherever they lie.

        Raises InvalidArgument if they are not all held, are pinned already, or would not fit.
        """
        serials = set(self.serials[start:end])
        if not serials:
            raise InvalidArgument(f"there are no tokens between {start} and {end} to pin")
        if self.count_exact(start, end) < len(serials):
            raise InvalidArgument(f"tokens {start} to {end} are not all in the cache")
        if serials & self.pins:
            raise InvalidArgument(f"some of tokens {start} to {end} are already pinned")
        self.set_pins(self.pins | serials)

    def unpin(self, start: int, end: int) -> None:
        """Return pinned tokens to the window, as its oldest. Raises InvalidArgument without any."""
        serials = self.pins & set(self.serials[start:end])
        if not serials:
            raise InvalidArgument(f"none of tokens {start} to {end} is pinned")
        self.set_pins(self.pins - serials)

    @torch.inference_mode()
    def set_pins(self, serials: Iterable[int], keep: int | None = None) -> None:
        """Pin the tokens with these serials, all held, and no others.

        keep: the policy's setting from now on; None to leave it. Raises InvalidArgument if they
        would not fit.
        """
        pins, settings = frozenset(serials), {} if keep is None else {"keep": keep}
        if pins != self.pins or keep not in (None, self.policy.keep):
            self.policy = self.policy.reconfigure(self.cache, pins, **settings)
            self.pins = pins


def memory_bytes(memories: Sequence[Memory]) -> int:
    """Return the bytes of several memories; storage and states that they share count once."""
    segments = [segment for memory in memories for segment in memory.all_segments]
    states = {id(state): state.nbytes for memory in memories for state in memory.all_states}
    return storage_bytes(segments) + sum(states.values())

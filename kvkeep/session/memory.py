"""A session's memory: token ids, and the cells that its policy keeps of them."""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvkeep import validation
from kvkeep.cache import Bits, Cells, Segment
from kvkeep.cache.checkpoint import Checkpoint, Checkpoints
from kvkeep.cache.restoring import restored_cache, restored_checkpoint
from kvkeep.cache.shallow_copy import shallow_copy
from kvkeep.cache.storage import nbytes as storage_bytes
from kvkeep.errors import ContextFull, InvalidArgument, NonFiniteLogits
from kvkeep.models.layers.decoder import Decoder
from kvkeep.policies import Policy, checked_bits
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
                f'and {count} more do not fit; policy="sliding" generates indefinitely in a fixed '
                "budget"
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

    def require_rewind(self, count: int) -> None:
        """Raise InvalidArgument if the last `count` tokens cannot be removed by a rewind."""
        if count == 0:
            return
        rewindable, total, maximum = self.num_rewindable, len(self.tokens), self.max_rewind
        if 0 <= count <= maximum:
            return
        if maximum == total:
            raise InvalidArgument(f"rewind takes 0 to {total} tokens; found {count}")
        raise InvalidArgument(
            f"rewind takes 0 to {maximum} tokens, or all {total}; found {count}: only the last "
            f"{rewindable} are in the cache without a gap, and one must remain"
        )

    @property
    def num_held(self) -> int:
        """The number of newest tokens held without a gap, outside self-extend's groups."""
        segments = [s for s in self.cache.segments if s.position_map.group == 1]
        if not segments:
            return 0
        held = torch.cat([segment.live_serials().cpu() for segment in segments]).numpy()
        serials = np.frombuffer(self.serials.last(len(held)), dtype=np.int64)
        count = len(serials)
        differing = np.flatnonzero(held[len(held) - count :] != serials)
        return int(count - 1 - differing[-1]) if len(differing) else count

    def exact_serials(self) -> NDArray[np.int64]:
        """Return the serials of the uncompressed cells, which are in the order of the tokens."""
        parts = [s.live_serials() for s in self.cache.segments if not s.compressed]
        return torch.cat(parts).numpy() if parts else np.empty(0, np.int64)

    def count_exact(self, start: int, end: int) -> int:
        """Return how many of tokens `start ... end - 1` have a cell of their own."""
        held = self.exact_serials()
        return self._count_cells_before(held, end) - self._count_cells_before(held, start)

    def _count_cells_before(self, held: NDArray[np.int64], index: int) -> int:
        """Return how many of the cells with serials `held` are of tokens before token `index`.

        A cell of that token or of the one before it is found by one comparison with each serial.
        """
        for neighbour, offset in ((index, 0), (index - 1, 1)):
            if 0 <= neighbour < len(self.serials):
                (ranks,) = np.nonzero(held == self.serials[neighbour])
                if len(ranks):
                    return int(ranks[0]) + offset
        earlier = np.frombuffer(self.serials.first(index).array(), dtype=np.int64)
        return int(np.count_nonzero(np.isin(held, earlier)))

    @property
    def num_rewindable(self) -> int:
        """The number of newest tokens that can be removed, plus one that is evaluated again.

        Those that are held without a gap. If layers keep states, only those since the oldest
        checkpoint, unless all tokens are held: then states are computed anew from the beginning.
        """
        held, total = self.num_held, len(self.tokens)
        if not self.decoder.spec.keeps_states or held == total:
            return held
        usable = [c.num_tokens for c in self.checkpoints.entries if total - c.num_tokens <= held]
        return total - usable[0] if usable else 0

    @property
    def max_rewind(self) -> int:
        """The number of newest tokens that a rewind can remove, unless it removes all."""
        rewindable = self.num_rewindable
        return rewindable if rewindable == len(self.tokens) else max(0, rewindable - 1)

    @property
    def holds_all(self) -> bool:
        """Whether all tokens are held; in local layers those of a window."""
        return self.num_held == len(self.tokens) and self.holds_overwritten()

    @property
    def was_edited_in_place(self) -> bool:
        """Whether some cells may have been computed with other earlier tokens than they have now.

        The clock counts tokens as they came, and those that were put between others have newer
        serials than the ones after them. Where as many were removed as inserted, the cells in
        between are seen at another distance; after an eviction, all anchors are.
        """
        serials = np.frombuffer(self.serials.array(), dtype=np.int64)
        if self.cache.time != len(serials) or bool((np.diff(serials) < 0).any()):
            return True
        maps = [segment.position_map for segment in self.cache.segments]
        is_moved = any(each.group == 1 and each.offset for each in maps)
        return is_moved and self.cache.cells == len(serials)

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

    # Checkpoints

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

    def take_checkpoint(self, at_answer_end: bool = False) -> None:
        """Copy what later tokens overwrite, if anything, to come back to this token.

        at_answer_end: whether a sampled answer may end here: see `Checkpoints.answer_ends`.

        Drops checkpoints that can no longer be used, since tokens have been evicted or compressed.
        """
        if not (self.overwrites and self.checkpoints.max_bytes > 0 and self.tokens):
            return
        oldest, total = self._oldest_usable(), len(self.tokens)
        self.checkpoints = self.checkpoints.from_(oldest)
        if oldest <= total and self.holds_overwritten():
            checkpoint, present = self.cache.checkpoint(total), self.checkpoints
            add = present.with_answer_end if at_answer_end else present.added
            self.checkpoints = add(checkpoint)

    def drop_unusable_checkpoints(self) -> None:
        """Drop checkpoints that evicted or compressed tokens have made useless."""
        self.checkpoints = self.checkpoints.from_(self._oldest_usable())

    def _oldest_usable(self) -> int:
        """Return after how many tokens, at least, a checkpoint can be used."""
        segments, total = self.cache.segments, len(self.tokens)
        is_changed = any(s.compressed or s.position_map.group > 1 for s in segments)
        if not is_changed and self.cache.cells >= total:
            return 0
        held = self.num_held
        return total - held if self.decoder.spec.keeps_states or held == total else total + 1

    def usable_checkpoint(self, num_tokens: int) -> Checkpoint | None:
        """Return the newest checkpoint after at most `num_tokens` tokens, if it is still true.

        None if later tokens are not held without a gap; and for local windows if any tokens were
        evicted, because these windows may contain what they said.
        """
        checkpoint, total = self.checkpoints.newest(num_tokens), len(self.tokens)
        if checkpoint is None:
            return None
        num_later = total - checkpoint.num_tokens
        # An edit in place moves the clock of the tokens before it.
        is_same_time = checkpoint.time == self.cache.time - num_later
        num_needed = num_later if self.decoder.spec.keeps_states else total
        return checkpoint if is_same_time and num_needed <= self.num_held else None

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

    def take_back(self, count: int) -> None:
        """Remove the last `count` tokens, and the logits, without evaluating any token again.

        Raises InvalidArgument if cells of earlier tokens were evicted, or if there are not as many.
        """
        total = len(self.tokens)
        if not (count := validation.integer("count", count, 0, total)):
            return
        is_held = self.holds_overwritten(count)
        checkpoint = None if is_held else self._checkpoint_at(total - count)
        if not self.holds_beginning(total - count):
            raise InvalidArgument(
                f"the last {count} tokens cannot be removed: earlier cells were evicted, or layers "
                "keep states"
            )
        self.drop_newest(count)
        if checkpoint:
            self.cache.load_checkpoint(checkpoint)

    def clear(self) -> list[int]:
        """Remove and return every token, held or not."""
        removed = list(self.tokens)
        self.pins = frozenset()
        self.checkpoints = self.checkpoints.up_to(0)
        empty = Memory(self.decoder, self.policy, self.bits)
        self.cache, self.hidden, self._logits = empty.cache, None, None
        self.tokens, self.serials = empty.tokens, empty.serials
        return removed

    def holds_beginning(self, count: int) -> bool:
        """Whether all cells, local windows and states are held as they were after `count` tokens.

        Windows and states are held by a checkpoint there, or still in the cache.
        """
        total = len(self.tokens)
        holds_overwritten = self.holds_overwritten(total - count)
        has_them = holds_overwritten or self._checkpoint_at(count) is not None
        return has_them and self.num_held == total

    def beginning(self, count: int) -> "Memory":
        """Return a memory of the first `count` tokens, as if no others had come, without logits.

        Its cells lie as in a memory that was given these tokens alone, so that it continues to the
        bit as that one would; those of a fork do not. They are copied on the first write. Raises
        InvalidArgument if these tokens are not all held.
        """
        held, total = self.num_held, len(self.tokens)
        # The local windows that are held may have been computed anew, in other steps.
        checkpoint = self._checkpoint_at(count)
        if held != total:
            raise InvalidArgument(
                f"the first {count} tokens are not all in the cache: only the last {held} of "
                f"{total} are, without a gap"
            )
        if not (checkpoint or self.holds_overwritten(total - count)):
            ends = ", ".join(str(each.num_tokens) for each in self.checkpoints.entries)
            raise InvalidArgument(
                f"local windows or states after {count} tokens are not held: expected all {total} "
                f"tokens, or as many as a checkpoint has ({ends or 'there is none'})"
            )
        memory = copy.copy(self)
        # Not a fork, which cuts its cells where it begins and so changes the order of sums.
        memory.cache = restored_cache(self.cache, self.cache.state())
        memory.drop_newest(total - count)
        if checkpoint:
            memory.cache.load_checkpoint(checkpoint)
            memory.checkpoints = memory.checkpoints.branched(count)
        memory.cache.unseal()
        return memory

    def _checkpoint_at(self, num_tokens: int) -> Checkpoint | None:
        """Return the checkpoint after so many tokens, if there is one and it is still true."""
        checkpoint = self.usable_checkpoint(num_tokens)
        return checkpoint if checkpoint and checkpoint.num_tokens == num_tokens else None

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

"""A model's memory at work: tokens evaluated into a cache under a policy."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvkeep import validation
from kvkeep.cache import Bits, Cells
from kvkeep.cache.segment import GROWTH
from kvkeep.cache.shallow_copy import shallow_copy
from kvkeep.compression.methods import Compression
from kvkeep.errors import ContextFull, InvalidArgument
from kvkeep.models.layers.decoder import Decoder
from kvkeep.models.layers.primitives import require_finite
from kvkeep.policies import Policy
from kvkeep.session.history import History
from kvkeep.session.local_layers import local_cells, newest_together, sees_whole_window
from kvkeep.storage.snapshots.memory_state import MemoryState


@dataclass(frozen=True)
class Evaluated:
    """One step that is done.

    hidden: `[n, hidden_size]` of its tokens. peak_cells: held in it. compressions: what its end
    brought about.
    """

    hidden: Tensor
    peak_cells: int
    compressions: Sequence[Compression]


class Memory:
    """Token ids in, logits out.

    A call that fails may leave half of its work behind. Whoever must not lose what is there changes
    a `successor` or a `fork` of it, and takes that in its place once the call is through.

    tokens: all ids so far, forgotten ones too. serials: the number that each got when it was
    evaluated, by which its cell is found. bits: of its cells. pins: serials of pinned tokens.
    hidden: `[1, hidden_size]` of the last one.
    """

    def __init__(self, decoder: Decoder, policy: Policy, bits: Bits = Bits()):  # noqa: B008
        self.decoder = decoder
        self.policy = policy
        self.bits = bits
        self.cache = decoder.new_cache(bits, policy.max_kv_size)
        self.tokens = History("i")
        self.serials = History("q")
        self.pins: frozenset[int] = frozenset()
        self.hidden: Tensor | None = None
        self._logits: Tensor | None = None  # made from hidden when first asked for

    def fork(self) -> "Memory":
        """The same memory, going its own way; cells are shared."""
        fork = shallow_copy(self)
        fork.cache = self.cache.fork()
        return fork

    def successor(self) -> "Memory":
        """The same memory, to be changed in place of this one; see `KVCache.successor`."""
        successor = shallow_copy(self)
        successor.cache = self.cache.successor()
        return successor

    def commit(self) -> None:
        """Lets go of the memory before this successor, and of storage that only that one used."""
        self.cache.commit()
        self.cache.trim(self.policy.max_kv_size)

    def logits(self) -> Tensor | None:
        """`[vocab]` float32 for the last token; None before the first."""
        if self._logits is None and self.hidden is not None:
            with torch.inference_mode():
                self._logits = self.decoder.logits(self.hidden)[0]
        return self._logits

    def state(self) -> MemoryState:
        """All that it is. Cells are shared until one side must write to their storage."""
        logits = self.logits()
        return MemoryState(
            tokens=torch.tensor(self.tokens.array(), dtype=torch.int32, device="cpu"),
            serials=torch.tensor(self.serials.array(), dtype=torch.int64, device="cpu"),
            pins=sorted(self.pins),
            hidden=None if self.hidden is None else self.hidden.clone(),
            logits=None if logits is None else logits.clone(),
            cache=self.cache.state(),
        )

    @classmethod
    def from_state(
        cls, decoder: Decoder, policy: Policy, bits: Bits, state: MemoryState
    ) -> "Memory":
        """The memory that was in that state.

        Raises ValueError, saying what is wrong, where none of this model under this policy could be
        in it.
        """
        memory = cls(decoder, policy, bits)
        layout, device = memory.cache.layout.plain, memory.cache.layout.device
        memory.cache = memory.cache.restore(state.cache)
        state.check(decoder.spec, layout)
        policy.check_held(memory.cache)
        memory.tokens = memory.tokens.extended(state.tokens.tolist())
        memory.serials = memory.serials.extended(state.serials.tolist())
        memory.pins = frozenset(state.pins)
        if state.hidden is not None and state.logits is not None:
            memory.hidden = state.hidden.to(device, copy=True)
            memory._logits = state.logits.to(device, copy=True)
        return memory

    def require_room(self, count: int) -> None:
        """Raises ContextFull where the policy cannot take `count` more tokens."""
        room = self.policy.room(self.cache)
        if room is not None and count > room:
            raise ContextFull(
                f'policy "{self.policy.name}" holds at most {self.policy.max_kv_size} tokens: '
                f"{self.cache.cells} are held, seen from up to {self.cache.reach} positions away, "
                f"and {count} more do not fit; "
                'policy="sliding" goes on for ever on a fixed budget'
            )

    def evaluate(self, ids: Sequence[int], prefill_step: int) -> Iterator[Evaluated]:
        """Evaluates ids step by step."""
        done = 0
        while done < len(ids):
            step = self.step(ids, done, prefill_step)
            done += step.hidden.shape[0]
            yield step

    @torch.inference_mode()
    def step(
        self, ids: Sequence[int], done: int, prefill_step: int, sampled: bool = False
    ) -> Evaluated:
        """Evaluates at most `prefill_step` of the ids, of which the first `done` are in memory.

        Steps end at multiples of `prefill_step`, whatever the policy made of those before: two
        prompts that begin alike are evaluated in the same steps for as long as they are alike.

        sampled: the model itself has chosen them; `prefill_step` must be 1 then.
        """
        wanted = min(len(ids) - done, prefill_step - done % prefill_step)
        answer = GROWTH if len(ids) > GROWTH else 0  # or its first token would move all cells
        count = self.policy.open(self.cache, wanted, len(ids) - done - wanted + answer)
        return self.step_opened(ids[done : done + count], done + count == len(ids), sampled)

    def step_opened(
        self, chunk: Sequence[int], last: bool = False, sampled: bool = False
    ) -> Evaluated:
        """Evaluates tokens for which the policy has just opened the cache. last: of all to come."""
        before, count, where = self.cache.cells, len(chunk), self.cache.layout.device
        with self.cache.step(count, sampled) as step:
            taken = torch.tensor(chunk, dtype=torch.int64, device=where)
            hidden = self.decoder.hidden(taken, step)
            logits = self.decoder.logits(hidden[-1:])[0] if last else None
            if logits is None:
                require_finite(hidden)
        self.take_in(chunk, hidden[-1:], logits)
        peak = before + count if count > 1 else self.cache.cells
        return Evaluated(hidden, peak, self.policy.settle(self.cache))

    def take_in(self, ids: Sequence[int], hidden: Tensor | None, logits: Tensor | None) -> None:
        """Lists tokens whose cells the cache has just got, and where the last one stands."""
        self.tokens = self.tokens.extended(ids)
        fresh = range(self.cache.serial - len(ids), self.cache.serial)
        self.serials = self.serials.extended(fresh)
        self.hidden, self._logits = hidden, logits

    def require_no_states(self, what: str) -> None:
        """Raises InvalidArgument where layers keep states, out of which no token can be taken."""
        if self.cache.recurrent:
            raise InvalidArgument(
                f"this memory cannot be {what}: some layers of the model keep states of all tokens "
                "so far in the place of cells, and nothing can be taken out of these; fork or save "
                "the session before what may have to be taken back"
            )

    @property
    def rewindable(self) -> int:
        """How many of the newest tokens are held without a gap, and not in groups.

        None where layers keep states: they go on from the last token alone.
        """
        if self.cache.recurrent:
            return 0
        return newest_together(self.cache, self.serials)

    @property
    def holds_all(self) -> bool:
        """Whether `beginning` can give a copy with all tokens."""
        total = len(self.tokens)
        held = bool(self.cache.recurrent) or self.rewindable == total
        return held and sees_whole_window(self.cache, total, 0)

    def append_evaluated(self, ids: Sequence[int], keys: Tensor, values: Tensor) -> None:
        """Takes in cells that were evaluated elsewhere, as if these ids had been just now.

        keys, values: `[layers, kv_heads, n, head_dim]` at the positions that come next. Logits are
        not known until another token is evaluated.
        """
        done, cache = 0, self.cache
        while done < len(ids):
            upto = done + self.policy.open(cache, len(ids) - done)
            new = torch.arange(upto - done, dtype=torch.int64, device="cpu")
            cells = Cells(
                keys[:, :, done:upto],
                values[:, :, done:upto],
                new + cache.time,
                new + cache.serial,
            )
            cache.segments[-1].append(cells.to(cache.layout.device))
            cache.time += upto - done
            cache.serial += upto - done
            self.policy.settle(cache)
            done = upto
        self.take_in(ids, None, None)

    def require_rewind(self, count: int) -> None:
        """Raises InvalidArgument where the last `count` tokens cannot be taken back."""
        if count == 0:
            return
        self.require_no_states("rewound")
        held, total = self.rewindable, len(self.tokens)
        most = total if held == total else held - 1
        if not 0 <= count <= most:
            raise InvalidArgument(
                f"rewind takes 0 to {most} tokens here, or all {total}; found {count}: the last "
                f"{held} are held without a gap, and one of them must remain to go on from"
            )

    def take_back(self, count: int) -> list[int]:
        """Takes the last `count` tokens back; the one before them is evaluated anew.

        Raises InvalidArgument for a negative count, and where that token is no longer held.
        """
        self.require_rewind(count)
        if count == 0:
            return []
        taken = self.tokens[len(self.tokens) - count :]
        self._drop_newest(count)
        if self.pins - set(self.serials):
            self.pins &= set(self.serials)
            self.change()
        self.evaluate_last()
        return taken

    def drop(self, count: int) -> None:
        """Takes the last `count` tokens back, as if they had not come; there are no logits then.

        Raises InvalidArgument where some of what was there before them is forgotten.
        """
        left = len(self.tokens) - count
        held = self.rewindable == len(self.tokens)
        if not held or not sees_whole_window(self.cache, len(self.tokens), count):
            raise InvalidArgument(
                f"the last {count} tokens cannot be taken back without a trace: what was there "
                "before them is not all held any more, or layers keep states of it"
            )
        self._drop_newest(validation.whole("count", count, 0, left + count))
        if self.pins - set(self.serials):
            self.pins &= set(self.serials)
            self.change()

    def take_all(self) -> list[int]:
        """Takes every token back, held or not: nothing must remain to go on from."""
        taken = list(self.tokens)
        self.pins = frozenset()
        self.change()
        fresh = Memory(self.decoder, self.policy, self.bits)
        self.cache, self.hidden, self._logits = fresh.cache, None, None
        self.tokens, self.serials = fresh.tokens, fresh.serials
        return taken

    def beginning(self, count: int) -> "Memory":
        """A memory of the first `count` tokens, as if no others had come; it has no logits.

        Unlike a fork's, its cells lie as those of a memory that was given these tokens alone, so
        that it goes on to the bit as that one would: it copies them when it first adds to them.

        Raises InvalidArgument where these tokens are not all held.
        """
        if count < len(self.tokens):
            self.require_no_states("rewound")
        held, total = self.rewindable, len(self.tokens)
        if not self.holds_all or not sees_whole_window(self.cache, total, total - count):
            raise InvalidArgument(
                f"the first {count} tokens are not all held: of {total} only the last {held} are, "
                "without a gap, or local layers have gone past them"
            )
        memory = shallow_copy(self)
        memory.cache = self.cache.restored_copy()
        memory._drop_newest(total - count)
        if memory.cache.segments:
            memory.cache.segments[-1].unseal()
        if pins := self.pins - set(memory.serials):
            memory.pins = self.pins - pins
            memory.change()
        return memory

    def evaluate_last(self, most: int | None = None) -> None:
        """Evaluates the last token anew, over the cells that are there now.

        most: as of `refill_local`.

        As a prompt's, whoever chose it: what is evaluated anew comes out as in a session that was
        fed these tokens.
        """
        again, pinned = self.tokens[-1:], bool(self.pins & set(self.serials[-1:]))
        if pinned:  # it comes back under another serial
            self.unpin(len(self.tokens) - 1, len(self.tokens))
        self._drop_newest(len(again))
        self.refill_local(most)
        for _ in self.evaluate(again, 1):
            pass
        if pinned:
            self.pin(len(self.tokens) - 1, len(self.tokens))

    def refill_local(self, most: int | None = None) -> None:
        """Makes the cells of local layers anew where they lack some that the next token sees.

        From as many tokens as are held without a gap, or `most` of them. Of a memory that holds all
        its tokens these are the cells that they had.
        """
        local = self.cache.local
        if local is None or local.window.size is None:
            return
        if local.cells < min(local.window.size - 1, len(self.tokens)):
            count = self.rewindable if most is None else min(most, self.rewindable)
            ids = self.tokens[len(self.tokens) - count :]
            local.segments = local_cells(self.decoder, self.cache, ids)

    def _drop_newest(self, count: int) -> None:
        self.cache.drop_newest(count)
        left = len(self.tokens) - count
        if not left:
            self.cache.time = 0
        self.tokens, self.serials = self.tokens.first(left), self.serials.first(left)
        self.hidden = self._logits = None

    @torch.inference_mode()
    def change(self, **settings: int) -> None:
        """Changes settings of the policy. Raises InvalidArgument before changing anything."""
        self.policy = self.policy.changed(self.cache, self.pins, **settings)

    @torch.inference_mode()
    def pin(self, start: int, end: int) -> None:
        """Makes anchors of tokens `start ... end - 1`, all of them held, wherever they lie.

        Raises InvalidArgument where they are not held, are pinned already, or would not fit.
        """
        wanted = set(self.serials[start:end])
        if not wanted:
            raise InvalidArgument(f"there is no token between {start} and {end} to pin")
        if not wanted <= set(self.cache.serials()):
            raise InvalidArgument(f"tokens {start} to {end} are not all remembered")
        if wanted & self.pins:
            raise InvalidArgument(f"some of tokens {start} to {end} are pinned already")
        self.policy = self.policy.changed(self.cache, self.pins | wanted)
        self.pins |= wanted

    @torch.inference_mode()
    def unpin(self, start: int, end: int) -> None:
        """Lets pinned tokens go, to the window as its oldest. Raises InvalidArgument if none is."""
        wanted = self.pins & set(self.serials[start:end])
        if not wanted:
            raise InvalidArgument(f"no token from {start} to {end} is pinned")
        self.policy = self.policy.changed(self.cache, self.pins - wanted)
        self.pins -= wanted

    def replace(self, start: int, end: int, ids: Sequence[int], pinned: bool) -> None:
        """Lists `ids`, just evaluated, as tokens in the place of `start ... end - 1`."""
        fresh = range(self.cache.serial - len(ids), self.cache.serial)
        self.pins -= set(self.serials[start:end])
        if pinned:
            self.pins |= set(fresh)
        self.tokens = self.tokens.replaced(start, end, ids)
        self.serials = self.serials.replaced(start, end, fresh)

    def strike(self, start: int, end: int) -> None:
        """Takes tokens of which no cell is held off the list."""
        self.tokens = self.tokens.replaced(start, end, ())
        self.serials = self.serials.replaced(start, end, ())

    @torch.inference_mode()
    def log_probabilities(self, hidden: Tensor, targets: Sequence[int]) -> Tensor:
        """`[n]` float64: the natural log of each target's probability after each hidden state."""
        wanted = torch.tensor(targets, dtype=torch.int64, device=hidden.device)
        parts, rows = [torch.empty(0, dtype=torch.float64, device="cpu")], 64  # all would not fit
        for first in range(0, len(targets), rows):
            logits = self.decoder.logits(hidden[first : first + rows])
            chosen = logits.gather(1, wanted[first : first + rows, None])[:, 0]
            # float64 is not on every device.
            parts.append(chosen.cpu().double() - logits.logsumexp(-1).cpu().double())
        return torch.cat(parts)

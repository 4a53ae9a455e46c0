"""What a session holds, to look at."""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from torch import Tensor

from kvkeep import validation
from kvkeep.cache import Bits, KVCache
from kvkeep.loaded_model import LoadedModel
from kvkeep.policies import Policy
from kvkeep.runtime.signals import interrupts_deferred
from kvkeep.runtime.worker import computes, computing
from kvkeep.session.history import History
from kvkeep.session.memory import Memory
from kvkeep.session.spans import Place, Span, Standing, standing_in
from kvkeep.session.state import State


class Held:
    """The tokens and cells of a session, and how it replaces them: all at once."""

    def __init__(
        self,
        model: LoadedModel,
        policy: Policy,
        prefill_step: int,
        bits: Bits = Bits(),  # noqa: B008 (frozen)
    ):
        self.prefill_step = validation.whole("prefill_step", prefill_step, 1)
        self._model = model
        self._text = model.text
        self._state = State(Memory(model.decoder, policy, bits))

    @property
    def _memory(self) -> Memory:
        return self._state.memory

    @contextmanager
    def _changing(self) -> Iterator[State]:
        """What the session is to be: it is so once the block is through, and else as it was.

        Every Ctrl-C waits for that, so that the block should do no more than a step.
        """
        with changing([self]) as (work,):
            yield work

    def _take(self, state: State) -> None:
        """Is from now on what a successor or a fork of a state, or a restored one, has become."""
        self._state = state

    def __repr__(self) -> str:
        spans, pins = self._state.spans, self._memory.pins
        named = f", {len(spans)} spans" if spans else ""
        pinned = f", {len(pins)} pinned" if pins else ""
        return (
            f"<{type(self).__name__} of {self._model.name}: {self.policy}, "
            f"{self.cache.cells:,} of {self.max_kv_size:,} cells "
            f"({self.cache.nbytes / 1e6:,.1f} MB), {len(self.tokens):,} tokens{named}{pinned}>"
        )

    @property
    def cache(self) -> KVCache:
        """The cells as they are now; each call that changes the session brings others.

        `cache.cells` counts them and `cache.nbytes` says what they take.
        """
        return self._memory.cache

    @property
    def tokens(self) -> History:
        """Every token id so far, also those that the policy has forgotten.

        It equals a list of them, costs nothing to look at and never changes.
        """
        return self._memory.tokens

    @property
    @computes
    def logits(self) -> Tensor | None:
        """`[vocab]` float32 for the last token evaluated (a copy); None before the first."""
        current = self._memory.logits()
        return None if current is None else current.clone()

    @property
    def policy(self) -> str:
        return self._memory.policy.name

    @property
    def max_kv_size(self) -> int:
        return self._memory.policy.max_kv_size

    @property
    def settings(self) -> dict[str, Any]:
        """What its policy was made with, its budget included, as far as it has settings."""
        return self._memory.policy.settings()

    @property
    def bits(self) -> Bits:
        """In how many bits its cells are kept."""
        return self._memory.bits

    @property
    def room(self) -> int | None:
        """How many more tokens it can take; None if there is no end."""
        return self._memory.policy.room(self.cache)

    def text(self) -> str:
        """All tokens as text, special tokens included."""
        return self._text.decode(self.tokens)

    @property
    def spans(self) -> dict[str, Span]:
        """Named spans, where they are now, and how much of each is still remembered."""
        held, serials = set(self.cache.serials()), self._memory.serials
        return {
            name: Span(name, start, end, sum(s in held for s in serials[start:end]))
            for name, (start, end) in self._state.spans.items()
        }

    @property
    def places(self) -> Mapping[str, Place]:
        """Where each span is: its first token, and the one behind its last.

        Costs nothing to look at, where `spans` looks at each token of every span.
        """
        return MappingProxyType(self._state.spans)

    def watch(self) -> Callable[[], bool]:
        """Something to ask, at any time, whether the session has changed since now."""
        before = weakref.ref(self._state)
        return lambda: before() is not self._state

    @property
    def standing(self) -> list[Standing]:
        """What became of each token, in order; see `Standing`."""
        held: dict[int, Standing] = {}
        gone: Standing = "forgotten"
        for segment in self.cache.segments:
            if segment.compressed:
                gone = "compressed"
                continue
            for serial in segment.serials():
                kept, pinned = len(held) < self._memory.policy.keep, serial in self._memory.pins
                held[serial] = standing_in(segment, kept, pinned)
        return [held.get(serial, gone) for serial in self._memory.serials]


@contextmanager
def changing(sessions: Sequence[Held]) -> Iterator[list[State]]:
    """What several are to be: all of them are so once the block is through, or none is.

    Every Ctrl-C waits for that, and so does every other thread.
    """
    with computing(), interrupts_deferred():
        before = [session._state for session in sessions]
        works = [state.successor() for state in before]
        try:
            yield works
            for session, work in zip(sessions, works, strict=True):
                session._take(work)
        except BaseException:
            for session, state, work in zip(sessions, before, works, strict=True):
                session._take(state)
                work.memory.cache.rollback()
            raise
        del before  # what looks at storage that only they used would keep it
        for work in works:
            work.memory.commit()

"""Feeding a prompt into a session, step by step."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

from kvkeep.compression.methods import Compression
from kvkeep.runtime.memory import trim
from kvkeep.runtime.signals import interrupts_deferred
from kvkeep.runtime.worker import computes
from kvkeep.session.core import SessionCore
from kvkeep.session.evaluation import evaluate_step
from kvkeep.session.prefixes import PromptPrefix, load_prefix, store_prefix
from kvkeep.session.transaction import session_transaction

_LONG_PROMPT = 0.25  # seconds; beside so many, returning freed memory to the system costs nothing


@dataclass(frozen=True)
class FeedStep:
    """One step of a prompt, which the session has taken as a whole.

    tokens: in this step. done, total: tokens of the prompt. reused: whether they came from a prefix
    store and were not evaluated.
    """

    tokens: int
    done: int
    total: int
    reused: bool = False


@dataclass(frozen=True)
class FeedReport:
    """The result of feeding a prompt.

    tokens: of the prompt. seconds: spent on it. peak_cells: the most cells held at any moment,
    those of the step in progress included. reused: tokens that came from a prefix store and were
    not evaluated. differs_at: the first token at which the nearest stored prompt differs; None
    without a store, or if nothing more could have been reused. compressions: what policy "archive"
    compressed meanwhile. store_error: why the prefix store could not be read or written, if it
    could not; the prompt was evaluated all the same.
    """

    tokens: int
    seconds: float
    peak_cells: int
    reused: int = 0
    differs_at: int | None = None
    compressions: tuple[Compression, ...] = ()
    store_error: str | None = None

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


class Feeding(Iterator[FeedStep]):
    """A prompt on its way into a session: each `next` evaluates one more step of it.

    Between two steps the session is whole and may be used, forked and saved, and other sessions may
    work. The rest of the prompt follows whatever the session is then. A step that fails or is
    interrupted may be tried again.

    total: tokens of the prompt. done: how many of them the session has taken.
    """

    def __init__(self, core: SessionCore, ids: list[int], seconds: float = 0.0):
        """core: of the session. seconds: spent on the prompt before its first step."""
        self.total, self.done = len(ids), 0
        self._core, self._ids = core, ids
        self._seconds, self._closed = seconds, False
        self._prefix: PromptPrefix | None = None
        self._compressions: list[Compression] = []
        self._peak, self._tokens = core.memory.cache.cells, core.memory.tokens

    def __next__(self) -> FeedStep:
        """Evaluate the next step. Raises ContextFull and NonFiniteLogits as `Session.feed`."""
        return self.step()

    @computes
    def step(self, size: int | None = None) -> FeedStep:
        """As `next`, with a step of at most `size` tokens; None for the session's `prefill_step`.

        Steps end at multiples of `size`, counted from the first token of the prompt.
        """
        if self._closed or self.done == self.total:
            raise StopIteration
        started, before = time.perf_counter(), self.done
        try:
            if not self.done:
                self._load_prefix()
            reused = self.done > before
            if not reused:
                size = size or self._core.prefill_step
                self._evaluate(size)
                self._store_prefix(size)
        finally:
            self._seconds += time.perf_counter() - started
        if self.done == self.total and self._seconds > _LONG_PROMPT:
            trim()
        return FeedStep(self.done - before, self.done, self.total, reused)

    def _load_prefix(self) -> None:
        """Take what the prefix store holds of a first prompt; Ctrl-C may interrupt the reading."""
        core = self._core
        if core.store is None or core.memory.tokens:
            return
        state = core.state.successor()
        state.keep_prompt(self.total)
        fingerprint = core.model.fingerprint
        self._prefix = load_prefix(core.store, fingerprint, state.memory, self._ids)
        with interrupts_deferred():
            if self._prefix.reused:
                core.state = state
                self._advance(self._prefix.reused)

    def _evaluate(self, size: int) -> None:
        core = self._core
        if self._prefix and core.memory.tokens is not self._tokens:
            self._prefix.store = None  # the session was changed meanwhile: this is no first prompt
        core.memory.require_room(self.total - self.done)
        with interrupts_deferred():
            with session_transaction([core]) as (state,):
                state.keep_prompt(self.total)
                step = evaluate_step(state.memory, self._ids, self.done, size)
            self._advance(step.hidden.shape[0])
        self._peak = max(self._peak, step.peak_cells)
        self._compressions += step.compressions

    def _advance(self, count: int) -> None:
        self.done += count
        self._tokens = self._core.memory.tokens

    def _store_prefix(self, size: int) -> None:
        if self._prefix:
            upcoming = min(self.total - self.done, size)
            store_prefix(self._prefix, self._core.memory, upcoming)

    def close(self) -> None:
        """Evaluate no more of the prompt. The session stays as it is."""
        self._closed = True

    @property
    def report(self) -> FeedReport:
        """The result so far, and of the whole prompt once all of it is evaluated."""
        prefix = self._prefix
        return FeedReport(
            self.done,
            self._seconds,
            self._peak,
            prefix.reused if prefix else 0,
            prefix.differs_at if prefix else None,
            tuple(self._compressions),
            prefix.error if prefix else None,
        )

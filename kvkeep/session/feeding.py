"""A prompt on its way into a session, step by step."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

from kvkeep.cache import Bits
from kvkeep.compression.methods import Compression
from kvkeep.errors import InvalidArgument
from kvkeep.loaded_model import LoadedModel
from kvkeep.policies import Policy
from kvkeep.runtime.memory import trim
from kvkeep.runtime.signals import interrupts_deferred
from kvkeep.runtime.worker import computes
from kvkeep.session.context import Context
from kvkeep.session.memory import Evaluated
from kvkeep.session.prefixes import PromptPrefix, load_prefix, store_prefix
from kvkeep.session.state import State
from kvkeep.storage.prefixes.interface import PrefixCache

LONG = 0.25  # seconds for a prompt, beside which it is nothing to give back what it took


@dataclass(frozen=True)
class FeedStep:
    """One step, which is in the session whole.

    tokens: in this step. done, total: of the prompt. reused: whether they came from a prefix store
    and were not evaluated.
    """

    tokens: int
    done: int
    total: int
    reused: bool = False


@dataclass(frozen=True)
class FeedReport:
    """What a feed did.

    tokens: of the prompt. seconds: spent on it. peak_cells: the most cells held at any moment,
    those of the step in progress included. reused: tokens that came from a prefix store and were
    not evaluated. differs_at: the first token at which the nearest stored prompt differs; None
    without a store, or where nothing more could have been reused. compressions: what policy
    "archive" compressed meanwhile. store_error: why the prefix store could not be read or written,
    if so; the prompt was evaluated all the same.
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


class Reader(Context):
    """A context that takes prompts in, step by step, and the beginning of the first from a store.

    store: where evaluated beginnings of prompts are looked up and kept; None for none.
    """

    def __init__(
        self,
        model: LoadedModel,
        policy: Policy,
        prefill_step: int,
        store: PrefixCache | None = None,
        bits: Bits = Bits(),  # noqa: B008 (frozen)
    ):
        super().__init__(model, policy, prefill_step, bits)
        self._store = checked_keeper(store)

    def _step(
        self,
        work: State,
        ids: list[int],
        done: int,
        sampled: bool = False,
        size: int | None = None,
    ) -> Evaluated:
        """Evaluates the next step of what comes after the first `done` ids of a prompt.

        size: tokens of a step; None for the session's `prefill_step`.
        """
        work.keep_prompt(len(ids))
        return work.memory.step(ids, done, 1 if sampled else size or self.prefill_step, sampled)

    def _found_prefix(self, ids: list[int]) -> tuple[State, PromptPrefix] | None:
        """The session with what a store holds of a first prompt; None where none is asked."""
        if self._store is None or self._memory.tokens:
            return None
        work = self._state.successor()
        work.keep_prompt(len(ids))
        return work, load_prefix(self._store, self._model.fingerprint, work.memory, ids)


def checked_keeper(store: object) -> PrefixCache | None:
    """Raises InvalidArgument for what keeps no prompts."""
    if store is None or isinstance(store, PrefixCache):
        return store
    raise InvalidArgument(f"store must be a PrefixStore; found {store!r:.200}")


class Feeding(Iterator[FeedStep]):
    """Reads a prompt: each `next` takes one more step of it, and the session stands behind that.

    Between two steps the session may be asked, forked and saved, and other sessions may work. What
    changes it meanwhile changes what the rest of the prompt comes after. A step that fails or is
    interrupted may be asked for again.

    total: tokens of the prompt. done: how many of them the session has taken in.
    """

    def __init__(self, session: Reader, ids: list[int], seconds: float = 0.0):
        """seconds: spent on the prompt before its first step."""
        self.total, self.done = len(ids), 0
        self._session, self._ids = session, ids
        self._seconds, self._closed = seconds, False
        self._prefix: PromptPrefix | None = None
        self._compressions: list[Compression] = []
        self._peak, self._tokens = session.cache.cells, session.tokens

    def __next__(self) -> FeedStep:
        """Raises ContextFull and NonFiniteLogits as `Session.feed` does."""
        return self.step()

    @computes
    def step(self, size: int | None = None) -> FeedStep:
        """As `next`, with a step of at most `size` tokens; None for the session's `prefill_step`.

        Steps end at multiples of `size`, counted from the first token of the prompt.
        """
        if self._closed or self.done == self.total:
            raise StopIteration
        begun, before = time.perf_counter(), self.done
        try:
            if not self.done:
                self._load_prefix()
            reused = self.done > before
            if not reused:
                size = size or self._session.prefill_step
                self._evaluate(size)
                self._store_prefix(size)
        finally:
            self._seconds += time.perf_counter() - begun
        if self.done == self.total and self._seconds > LONG:
            trim()
        return FeedStep(self.done - before, self.done, self.total, reused)

    def _load_prefix(self) -> None:
        """What a store holds of a first prompt is the session's; Ctrl-C need not wait for it."""
        found = self._session._found_prefix(self._ids)
        if found is not None:
            work, self._prefix = found
            with interrupts_deferred():
                if self._prefix.reused:
                    self._session._take(work)
                    self._took(self._prefix.reused)

    def _evaluate(self, size: int) -> None:
        session = self._session
        if self._prefix and session.tokens is not self._tokens:
            self._prefix.store = None  # the session went another way: this is no first prompt
        session._memory.require_room(self.total - self.done)
        with interrupts_deferred():
            with session._changing() as work:
                step = session._step(work, self._ids, self.done, size=size)
            self._took(step.hidden.shape[0])
        self._peak = max(self._peak, step.peak_cells)
        self._compressions += step.compressions

    def _took(self, count: int) -> None:
        self.done += count
        self._tokens = self._session.tokens

    def _store_prefix(self, size: int) -> None:
        if self._prefix:
            upcoming = min(self.total - self.done, size)
            store_prefix(self._prefix, self._session._memory, upcoming)

    def close(self) -> None:
        """Reads no further. The session stays where it is."""
        self._closed = True

    @property
    def report(self) -> FeedReport:
        """What was done so far, and of the whole prompt once all of it is through."""
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

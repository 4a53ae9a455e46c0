"""Feeding a prompt into a session, step by step, and reusing its stored prefix."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from kvkeep.cache import Bits
from kvkeep.compression.methods.apply import Compression
from kvkeep.runtime.memory import trim_memory
from kvkeep.runtime.signals import interrupts_deferred
from kvkeep.runtime.worker import computes_in_worker
from kvkeep.session.core import SessionCore, session_transaction
from kvkeep.session.evaluation import evaluate_prompt_step, step_end
from kvkeep.session.scoring import TokenScores, last_hidden_state, score_tokens
from kvkeep.session.stored_prefix import StoredPrefix
from kvkeep.storage.prefixes.block import PrefixMatch
from kvkeep.storage.prefixes.inventory import BLOCK_TOKENS

_TRIM_AFTER_SECONDS = 0.25  # shorter prompts skip `trim_memory`, which would take a part of that


@dataclass(frozen=True)
class FeedStep:
    """One step of a prompt that is committed to the session.

    tokens: in this step. done, total: of the prompt. reused: whether a prefix store had the tokens.
    scores: the log probabilities of the tokens, if they were asked for.
    """

    tokens: int
    done: int
    total: int
    reused: bool = False
    scores: TokenScores | None = None


@dataclass(frozen=True)
class FeedReport:
    """The result of feeding a prompt.

    tokens: of the prompt. seconds: spent on it. peak_cells: the most cells held at any moment,
    those of the step in progress included. reused: tokens that a prefix store had. differs_at: the
    first token at which the nearest stored prompt differs; None without a store, or if nothing more
    could have been reused. compressions: what policy "archive" compressed meanwhile. store_error:
    why the prefix store failed, if it did; the prompt was evaluated all the same. stored: tokens
    that the store had, more than `reused` if the later ones had no checkpoint that the model needs.
    """

    tokens: int
    seconds: float
    peak_cells: int
    reused: int = 0
    differs_at: int | None = None
    compressions: tuple[Compression, ...] = ()
    store_error: str | None = None
    stored: int = 0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


class Feeding(Iterator[FeedStep]):
    """An iterator that prefills a prompt into a session, one step per `next`.

    Between two steps the session may be used, forked and saved, and other sessions may compute. The
    rest of the prompt follows whatever the session is then. A failed step may be tried again.

    total: tokens of the prompt. done: how many of them are in the session.
    """

    def __init__(
        self,
        core: SessionCore,
        ids: list[int],
        seconds: float = 0.0,
        top_logprobs: int | None = None,
    ):
        """seconds: spent on the prompt before its first step. top_logprobs: see `feeding`."""
        self.total, self.done = len(ids), 0
        self._top_logprobs = top_logprobs
        self._core, self._ids = core, ids
        self._seconds, self._closed = seconds, False
        self._prefix = StoredPrefix(None, core.model)
        self._match: PrefixMatch | None = None  # that a lookup has found, until it is loaded
        self._was_looked_up = False
        self._compressions: list[Compression] = []
        self._peak_cells, self._tokens_after_step = core.memory.cache.cells, core.memory.tokens

    def __next__(self) -> FeedStep:
        """Evaluate the next step. Raises ContextFull and NonFiniteLogits as `Session.feed`."""
        return self.step()

    @property
    def needs_lookup(self) -> bool:
        """Whether `step` begins with a lookup of the prompt in the prefix cache.

        A session that quantises cells does not use the cache, which has unquantised cells that were
        computed from unquantised ones: its results would depend on what is stored.
        """
        core = self._core
        is_first = not (self.done or core.memory.tokens or self._was_looked_up or self._closed)
        has_cache = core.prefix_cache is not None and self._top_logprobs is None
        is_exact = core.memory.bits == Bits()
        return is_first and has_cache and is_exact and self.total > BLOCK_TOKENS

    def lookup(self) -> Callable[[], None]:
        """Return the lookup, whose result the next step loads; see `needs_lookup`.

        It only reads, so that it may run in any thread while sessions compute.
        """
        core, state = self._core, self._core.state.successor()
        state.keep_first_prompt(self.total)

        def look_up() -> None:
            started = time.perf_counter()
            prefix = StoredPrefix(core.prefix_cache, core.model)
            try:
                self._match = prefix.find(state.memory, self._ids)
            finally:
                self._seconds += time.perf_counter() - started
            self._prefix, self._was_looked_up = prefix, True

        return look_up

    def step(self, end: int | None = None) -> FeedStep:
        """Evaluate the next step, which ends after at most `end` tokens of the prompt.

        None for the next multiple of the session's `prefill_step`, from the prompt's first token.
        The first step of a first prompt loads what the prefix cache has of it instead, if anything:
        the lookup is in the calling thread, where Ctrl-C may end it. Raises as `next`.
        """
        if self.needs_lookup:
            self.lookup()()
        return self._step(end)

    @computes_in_worker
    def _step(self, end: int | None) -> FeedStep:
        if self._closed or self.done == self.total:
            raise StopIteration
        started, done_before, scores = time.perf_counter(), self.done, None
        try:
            if self._match is not None:
                self._load_prefix(self._match)
            reused = self.done > done_before
            if not reused:
                size = self._core.prefill_step
                scores = self._evaluate(step_end(self.done, size) if end is None else end)
                self._prefix.store_blocks(self._core.memory, min(self.total - self.done, size))
        finally:
            self._seconds += time.perf_counter() - started
        if self.done == self.total and self._seconds > _TRIM_AFTER_SECONDS:
            trim_memory()
        return FeedStep(self.done - done_before, self.done, self.total, reused, scores)

    def _load_prefix(self, match: PrefixMatch) -> None:
        """Load what a lookup has found of the prompt, unless the session has tokens by now."""
        core, prefix = self._core, replace(self._prefix)
        state = core.state.successor()
        if not core.memory.tokens:
            state.keep_first_prompt(self.total)
            prefix.load(match, state.memory, self._ids, core.prefill_step)
        with interrupts_deferred():
            self._prefix, self._match = prefix, None
            if prefix.num_reused:
                state.rounded = prefix.rounded
                core.state = state
                self._advance(prefix.num_reused)

    def _evaluate(self, end: int) -> TokenScores | None:
        """Evaluate one step, up to `end` tokens of the prompt, and commit it to the session."""
        core, scores, last_hidden = self._core, None, None
        if self._top_logprobs is not None:
            last_hidden = last_hidden_state(core.memory)
        if core.memory.tokens is not self._tokens_after_step:
            self._prefix.prefix_cache = None  # the session was changed meanwhile: no first prompt
        with interrupts_deferred():
            with session_transaction([core]) as (state,):
                state.keep_first_prompt(self.total)
                result = evaluate_prompt_step(state.memory, self._ids, self.done, end)
                if self._top_logprobs is not None:
                    targets = self._ids[self.done : self.done + len(result.hidden)]
                    scored = (last_hidden, result.hidden, targets, self._top_logprobs)
                    scores = score_tokens(state.memory.decoder, *scored)
            self._advance(result.hidden.shape[0])
        self._peak_cells = max(self._peak_cells, result.peak_cells)
        self._compressions += result.compressions
        return scores

    def _advance(self, count: int) -> None:
        """Note that `count` more tokens are in the session, and what its tokens are then."""
        self.done += count
        self._tokens_after_step = self._core.memory.tokens

    def close(self) -> None:
        """Evaluate no more of the prompt. The session stays as it is."""
        self._closed = True

    @property
    def report(self) -> FeedReport:
        """The result so far, and of the whole prompt once all of it is evaluated."""
        prefix, compressions = self._prefix, tuple(self._compressions)
        progress = (self.done, self._seconds, self._peak_cells)
        reuse = (prefix.num_reused, prefix.differs_at)
        return FeedReport(*progress, *reuse, compressions, prefix.error, prefix.num_found)

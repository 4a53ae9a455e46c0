"""Feeding a prompt into a session, step by step, and reusing its stored prefix."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvkeep.cache import Bits, Cells, KVCache, PositionMap
from kvkeep.compression.methods.apply import Compression
from kvkeep.errors import StoreError
from kvkeep.loaded_model import LoadedModel
from kvkeep.runtime.memory import trim_memory
from kvkeep.runtime.signals import interrupts_deferred
from kvkeep.runtime.worker import computes_in_worker
from kvkeep.session.core import SessionCore, session_transaction
from kvkeep.session.evaluation import evaluate_step
from kvkeep.session.memory import Memory
from kvkeep.session.scoring import TokenScores, score_tokens
from kvkeep.storage.prefixes.block import PrefixCache
from kvkeep.storage.prefixes.inventory import BLOCK_TOKENS

_NO_PREFIX_FORMAT = (
    "some layers of this model {}, so a prefix cache cannot be used: save a session and restore it "
    "instead"
)
_LOCAL_ERROR = _NO_PREFIX_FORMAT.format("keep only the newest tokens")
_RECURRENT_ERROR = _NO_PREFIX_FORMAT.format("keep states of all tokens")
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
    why the prefix store failed, if it did; the prompt was evaluated all the same.
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
        self._prefix = _StoredPrefix(None, core.model)
        self._compressions: list[Compression] = []
        self._peak_cells, self._tokens_after_step = core.memory.cache.cells, core.memory.tokens

    def __next__(self) -> FeedStep:
        """Evaluate the next step. Raises ContextFull and NonFiniteLogits as `Session.feed`."""
        return self.step()

    @computes_in_worker
    def step(self, size: int | None = None) -> FeedStep:
        """As `next`, with a step of at most `size` tokens; None for the session's `prefill_step`.

        Steps end at multiples of `size`, counted from the first token of the prompt.
        """
        if self._closed or self.done == self.total:
            raise StopIteration
        started, done_before, scores = time.perf_counter(), self.done, None
        try:
            if not self.done and self._top_logprobs is None:
                self._load_prefix()
            reused = self.done > done_before
            if not reused:
                size = size or self._core.prefill_step
                scores = self._evaluate(size)
                self._prefix.store_blocks(self._core.memory, min(self.total - self.done, size))
        finally:
            self._seconds += time.perf_counter() - started
        if self.done == self.total and self._seconds > _TRIM_AFTER_SECONDS:
            trim_memory()
        return FeedStep(self.done - done_before, self.done, self.total, reused, scores)

    def _load_prefix(self) -> None:
        """Load a first prompt's prefix from the prefix store; Ctrl-C may interrupt the reading."""
        core = self._core
        if core.prefix_cache is None or core.memory.tokens:
            return
        state = core.state.successor()
        state.keep_first_prompt(self.total)
        prefix = _StoredPrefix(core.prefix_cache, core.model)
        prefix.load(state.memory, self._ids)
        with interrupts_deferred():
            self._prefix = prefix
            if prefix.num_reused:
                core.state = state
                self._advance(prefix.num_reused)

    def _evaluate(self, size: int) -> TokenScores | None:
        """Evaluate one step of at most `size` tokens, and commit it to the session."""
        core, scores = self._core, None
        if core.memory.tokens is not self._tokens_after_step:
            self._prefix.prefix_cache = None  # the session was changed meanwhile: no first prompt
        core.memory.require_room(self.total - self.done)
        with interrupts_deferred():
            with session_transaction([core]) as (state,):
                state.keep_first_prompt(self.total)
                last_hidden = state.memory.hidden
                if not self.done:
                    state.memory.take_checkpoint()  # at the boundary of a message
                result = evaluate_step(state.memory, self._ids, self.done, size)
                if not (self.done + len(result.hidden)) % size:
                    state.memory.take_checkpoint()
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
        return FeedReport(*progress, *reuse, compressions, prefix.error)


@dataclass
class _StoredPrefix:
    """The part of a session's first prompt that a prefix store holds.

    prefix_cache: None if nothing more is to be stored there, as after an error. num_reused: tokens
    that came from it. num_stored: tokens that it has. differs_at, error: see `FeedReport`.
    """

    prefix_cache: PrefixCache | None
    model: LoadedModel
    num_reused: int = 0
    num_stored: int = 0
    differs_at: int | None = None
    error: str | None = None

    def load(self, memory: Memory, ids: Sequence[int]) -> None:
        """Load what the store holds of a prompt into an empty memory.

        At most as many tokens as the policy keeps exactly. Some are left to evaluate before the
        prompt ends, or before the policy first evicts or compresses: one for its logits, and as
        many as the policy observes, so that it decides by the same queries as without a store.
        """
        policy, prefix_cache = memory.policy, self.prefix_cache
        has_local_layers = memory.cache.local_cache is not None
        if has_local_layers or memory.decoder.spec.keeps_states:
            self._stop_storing(_LOCAL_ERROR if has_local_layers else _RECURRENT_ERROR)
        elif prefix_cache is not None:
            max_tokens = min(len(ids), policy.exact_tokens + 1) - max(1, policy.query_count)
            try:
                match = prefix_cache.find(self.model.fingerprint, ids[: max(0, max_tokens)])
            except StoreError as error:
                self._stop_storing(str(error))
                return
            if match.token_count:
                keys, values = (torch.cat(cells, 2) for cells in zip(*match.blocks, strict=True))
                memory.append_evaluated(ids[: match.token_count], keys, values)
            self.num_reused = self.num_stored = match.token_count
            self.differs_at = match.differs_at

    def store_blocks(self, memory: Memory, next_step_tokens: int) -> None:
        """Store the complete blocks of the prompt that the store does not have yet.

        Only cells that depend on their tokens alone. To amortise the search among earlier blocks,
        as many are stored at once as the store already has; all of them before the policy changes
        them, and at the prompt's end.

        next_step_tokens: how many tokens the next step may evaluate; 0 at the prompt's end.
        """
        num_tokens, exact = len(memory.tokens), memory.policy.exact_tokens
        num_pending = min(num_tokens, exact) - self.num_stored
        if self.prefix_cache is None or num_pending < BLOCK_TOKENS or memory.bits != Bits():
            return
        can_wait = next_step_tokens > 0 and num_tokens + next_step_tokens <= exact
        if can_wait and num_pending < self.num_stored:
            return
        end = min(_count_unchanged_cells(memory.cache), exact) // BLOCK_TOKENS * BLOCK_TOKENS
        if end <= self.num_stored:
            return
        tokens, blocks = memory.tokens[:end], _read_blocks(memory.cache, self.num_stored, end)
        try:
            fingerprint = self.model.fingerprint
            self.num_stored = self.prefix_cache.add(fingerprint, tokens, self.num_stored, blocks)
        except StoreError as error:
            self._stop_storing(str(error))
        if self.num_stored < end:
            self.prefix_cache = None

    def _stop_storing(self, error: str) -> None:
        self.error, self.prefix_cache = error, None


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

"""A session: one model's live memory, fed and asked for tokens."""

import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NoReturn, SupportsIndex

import torch
from torch import Tensor

from kvkeep import validation
from kvkeep.cache import Bits, KVCache
from kvkeep.cache.shallow_copy import shallow_copy
from kvkeep.compression.calibration.calibration import Calibration
from kvkeep.compression.methods import make_method
from kvkeep.compression.methods.base import Budget
from kvkeep.errors import InvalidArgument
from kvkeep.loaded_model import LoadedModel
from kvkeep.policies import Policy
from kvkeep.runtime.memory import trim_memory
from kvkeep.runtime.worker import computes_in_caller, computes_in_worker
from kvkeep.session import decoding
from kvkeep.session.aligning import align
from kvkeep.session.alignment import (
    DEFAULT_MIN_SAVED,
    DEFAULT_REREAD,
    AlignmentOptions,
    AlignmentReport,
)
from kvkeep.session.compaction import (
    COMPACTION_STEPS,
    PLACEHOLDER,
    CompactionPlan,
    CompactionReport,
    CompactionStep,
    compact_session,
)
from kvkeep.session.compression import (
    CompressionPlan,
    CompressionReport,
    compress_memory,
    default_method_name,
)
from kvkeep.session.core import WHOLE_PROMPT, SessionCore, SessionState, session_transaction
from kvkeep.session.editing import Recompute, SessionEdits
from kvkeep.session.evaluation import reevaluate_last
from kvkeep.session.feeding import Feeding, FeedReport
from kvkeep.session.history import History
from kvkeep.session.memory import Memory
from kvkeep.session.memory_use import MemoryUse, memory_use
from kvkeep.session.sampling import Sampler, Sampling
from kvkeep.session.scoring import score_step
from kvkeep.session.snapshots import restore_state, take_snapshot
from kvkeep.session.spans import Span, TokenRange, TokenStatus, token_statuses
from kvkeep.storage.prefixes.block import PrefixCache
from kvkeep.storage.snapshots.fingerprint import Exactness
from kvkeep.storage.snapshots.snapshot import Snapshot
from kvkeep.types import AlignmentMode

GREEDY = Sampling()


class Session(SessionEdits):
    """One model's live memory of a text: its policy decides which tokens stay in the cache.

    A call that is refused changes nothing. A prompt is evaluated in steps, each committed or rolled
    back as a whole; `tokens` are those of committed steps. Sessions may be used from any thread;
    one computes at a time, and threads that use the same session take turns step by step.

    exactness: whether a restored session continues to the bit as the saved one would have.
    core: its parts, for kvkeep's own modules; not part of the public interface.
    """

    def __init__(
        self,
        model: LoadedModel,
        policy: Policy,
        prefill_step: int,
        store: PrefixCache | None = None,
        bits: Bits = Bits(),  # noqa: B008 (frozen)
    ):
        prefill_step = validation.integer("prefill_step", prefill_step, 1)
        state = SessionState(Memory(model.decoder, policy, bits))
        if store is not None and not isinstance(store, PrefixCache):
            raise InvalidArgument(f"store must be a PrefixStore; found {store!r:.200}")
        self.core = SessionCore(model, state, prefill_step, store)
        self.exactness = Exactness()

    # Feeding and decoding

    def feed(
        self,
        prompt: str | Sequence[int],
        progress: Callable[[int], None] | None = None,
        special: bool = False,
    ) -> FeedReport:
        """Evaluate a prompt and append it to the context.

        Args:
            prompt: text, or token ids, of any length if the policy is bounded; no special token is
                added.
            progress: called after each step with the number of tokens in it.
            special: whether the text of a special token, such as <|im_end|>, becomes that token. By
                default it stays text, as it may come from a user.

        Raises:
            InvalidArgument: the prompt is empty or holds an id outside the vocabulary.
            ContextFull: the policy cannot take as many tokens.
            NonFiniteLogits: the model produced NaN or infinity.
        """
        progress = validation.progress(progress)
        feeding = self.feeding(prompt, special)
        for step in feeding:
            if progress:
                progress(step.tokens)
        return feeding.report

    def feeding(
        self,
        prompt: str | Sequence[int],
        special: bool = False,
        top_logprobs: int | None = None,
    ) -> Feeding:
        """Return an iterator that evaluates a prompt as `feed` does, one step at a time.

            for step in session.feeding(prompt):
                print(step.done, "of", step.total)

        top_logprobs: compute the tokens' log probabilities as `score` does, and those of so many of
            the most likely tokens (`FeedStep.scores`). Nothing is read from the prefix cache then.

        A prompt that `feed` would refuse is refused at once.
        """
        started, ids = time.perf_counter(), self.core.encode_prompt(prompt, special)
        top_logprobs = validation.optional_integer("top_logprobs", top_logprobs, 0)
        return Feeding(self.core, ids, time.perf_counter() - started, top_logprobs)

    def next_token(self, sampling: Sampling = GREEDY) -> int:
        """Sample a token, even an end token, evaluate it and append it to the context.

        Raises ContextFull and NonFiniteLogits as `feed`, and InvalidArgument if nothing was fed.
        """
        validation.instance("sampling", sampling, Sampling)
        return decoding.next_token(self.core, sampling)

    def stream(
        self, max_tokens: int | None = None, sampling: Sampling = GREEDY, ignore_eos: bool = False
    ) -> Iterator[str]:
        """Generate tokens and yield their text: whole characters, without special tokens.

        Ends after `max_tokens` (None: never), at an end token of the model (`end_token_ids`) unless
        `ignore_eos`, if a constraint is complete, or before a stop string; `finish_reason` is then
        "length", "eos" or "stop". The tokens stay in the session, those of a stop string too.

        An error is raised after the text of all tokens in the session was yielded; `finish_reason`
        is "full" for ContextFull, "interrupt" for Ctrl-C, "error" for any other.
        """
        max_tokens = validation.optional_integer("max_tokens", max_tokens, 0)
        validation.instance("sampling", sampling, Sampling)
        ignores_eos = validation.flag("ignore_eos", ignore_eos)
        end_ids = () if ignores_eos else self.core.model.end_token_ids
        return decoding.stream_text(self.core, max_tokens, sampling, end_ids)

    def score(
        self,
        prompt: str | Sequence[int],
        progress: Callable[[int], None] | None = None,
        special: bool = False,
        written: bool = False,
    ) -> Tensor:
        """Evaluate a prompt as `feed` does, and return the log probability of each token.

        written: whether to evaluate tokens one by one, as generation does. The result differs by
            rounding, and more where generation reads weights in fewer bits than prompts do.

        Returns `[n]` float64: natural logs; NaN for the first token of a session.
        """
        progress, ids = validation.progress(progress), self.core.encode_prompt(prompt, special)
        written = validation.flag("written", written)
        done, scores = 0, list[Tensor]()
        while done < len(ids):
            scores.append(score_step(self.core, ids, done, written))
            count = len(scores[-1])
            done += count
            if progress:
                progress(count)
        return torch.cat(scores)

    @computes_in_caller
    def rewind(self, count: int) -> list[int]:
        """Remove and return the last `count` tokens.

        The token before them is evaluated again, as a prompt's, over the cells still held. Evicted
        cells do not come back: the window is shorter until it fills again. All tokens can always be
        removed. Raises InvalidArgument otherwise if the token before them is no longer held.
        """
        with session_transaction([self.core]) as (state,):
            count, memory = validation.integer("count", count), state.memory
            if count == len(memory.tokens) > memory.num_rewindable:
                removed = memory.clear()
            else:
                memory.require_rewind(count)
                removed, last_ids, pinned = memory.rewind(count)
                reevaluate_last(memory, last_ids, pinned)
            state.truncate_spans(len(memory.tokens))
        return removed

    @computes_in_caller
    def align(
        self,
        prompt: str | Sequence[int],
        *,
        mode: AlignmentMode = "in_place",
        min_saved: int = DEFAULT_MIN_SAVED,
        reread: int = DEFAULT_REREAD,
        special: bool = False,
    ) -> AlignmentReport:
        """Make a prompt the session's whole text, reusing the cells that it has of it.

        Where the prompt and the text differ, tokens are deleted, inserted and replaced. With mode
        "in_place" the cells of later equal tokens stay as they were computed, after another text:
        this is cheap, and not exact. "exact" evaluates everything after the first difference again,
        and so does "in_place" where it would save fewer than `min_saved` tokens.

        reread: how many tokens after each edit in place are evaluated again: more cost more, and
            come closer to an exact evaluation.
        special: see `feed`.

        Raises InvalidArgument if it cannot be done, as "in_place" for models with states and for
        sessions whose tokens were evicted or compressed; and ContextFull as `feed`. Nothing is
        changed then, or by Ctrl-C.
        """
        options = AlignmentOptions(mode, min_saved, reread)
        ids = self.core.encode(prompt, special)
        if not ids:
            raise InvalidArgument("the prompt is empty: expected at least one token")
        return align(self.core, ids, options)

    @computes_in_worker
    def take_back(self, count: int) -> None:
        """Remove the last `count` tokens without evaluating any, as speculative decoding does.

        There are no logits until more is fed. Raises InvalidArgument if earlier ones were evicted.
        """
        with session_transaction([self.core]) as (state,):
            state.memory.take_back(validation.integer("count", count, 0))
            state.truncate_spans(len(state.memory.tokens))

    @computes_in_worker
    def draw_anew(self) -> None:
        """Reset the sampler: the next tokens are drawn as in a new session with their seed."""
        with session_transaction([self.core]) as (state,):
            state.sampler = Sampler()

    # Compressing

    @computes_in_caller
    def compress(
        self,
        ratio: float = 2.0,
        method: str | None = None,
        recent: int | None = None,
        seed: int = 0,
        calibration: Calibration | None = None,
        progress: Callable[[int], None] | None = None,
        budget: Budget | None = None,
    ) -> CompressionReport:
        """Compress the cells once, to `ratio` times fewer; each KV head keeps its own.

        The first four, the newest `recent` and pinned tokens stay as they are. Tokens that the
        method keeps, merges or evicts can no longer be edited or named. For policy "full" only:
        "archive" compresses as it goes.

        Args:
            recent: None for 64 if the budget is "uniform". If it is "heads", None for half of the
                remaining cells up to ratio 4, 2 / ratio of them above, and 32 at least.
            method: see `kvkeep.compression.methods`. None: "kvzap" if the calibration has a
                surrogate, otherwise "kvzip", which has the model repeat the text in about the time
                of a prefill; "fitted" if some cells were compressed before.
            seed: for method "random".
            calibration: statistics of the model, for methods that need them.
            progress: called after each chunk with the number of cells that were in it.
            budget: "uniform": each 512 cells become that many fewer in every layer and KV head;
                "heads": the cells with the highest scores stay, in whichever head they are. None:
                the method's default, except that "kvzip" evicts only verbatim repeats if these are
                enough.

        Raises InvalidArgument if that is impossible, before anything is changed.
        """
        ratio = validation.finite_number("ratio", ratio)
        seed = validation.integer("seed", seed, 0)
        progress = validation.progress(progress)
        core = self.core
        if calibration is not None:
            validation.instance("calibration", calibration, Calibration).require(core.model)
        statistics = calibration.statistics if calibration else None
        method = default_method_name(core.memory, statistics) if method is None else method
        recent = validation.optional_integer("recent", recent)
        plan = CompressionPlan(
            make_method(method), ratio, budget, core.model.text, recent, seed, statistics, progress
        )
        memory, report = compress_memory(core.memory, plan)
        core.state = replace(core.state, memory=memory)
        trim_memory()
        return report

    @computes_in_caller
    def compact(
        self,
        target: float = 0.5,
        keep_recent: int = 2,
        keep_results: int = 3,
        placeholder: str = PLACEHOLDER,
        steps: Sequence[CompactionStep] = COMPACTION_STEPS,
        recompute: Recompute = "none",
        calibration: Calibration | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> CompactionReport:
        """Bring the session to `target` cells or fewer, by deleting and compressing what is old.

        Three steps, until the target is reached: the oldest tool results are replaced by a
        placeholder; the oldest reasoning is deleted; what is older than the newest turns is
        compressed, what users said last (policy "full" only). Pinned tokens, the system prompt
        and the newest turns stay exact. A session that is small enough does not change. Spans'
        names say what lies where: see `kvkeep.session.message_spans`.

        Args:
            target: a number of cells, or a part of `max_kv_size` such as 0.5.
            keep_recent: how many of the newest turns stay, as far as they take no more than half
                of the target.
            keep_results: how many of the newest tool results stay.
            placeholder: the text that takes the place of a tool result.
            steps: which of "results", "reasoning" and "compress" are allowed, in this order.
            recompute: of the first two steps, as of `delete`. Models with states need "suffix".
            calibration: as of `compress`.
            progress: called with numbers of cells as the work goes on.

        A step that is impossible is left out, which the report says. Raises InvalidArgument for
        arguments that are out of range. Nothing is changed then, or by Ctrl-C.
        """
        if calibration is not None:
            validation.instance("calibration", calibration, Calibration).require(self.core.model)
        plan = CompactionPlan.checked(
            target,
            self.max_kv_size,
            keep_recent=keep_recent,
            keep_results=keep_results,
            placeholder=placeholder,
            steps=tuple(steps),
            recompute=recompute,
            calibration=calibration,
            progress=validation.progress(progress),
        )
        report = compact_session(self.core, plan)
        trim_memory()
        return report

    def compact_before(
        self,
        new_tokens: int,
        threshold: float,
        calibration: Calibration | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> CompactionReport | None:
        """Compact the session if `new_tokens` more would exceed a part of `max_kv_size`.

        The target is half of `max_kv_size`, or less for a long text. Returns None if there is room.
        """
        limit = int(validation.finite_number("threshold", threshold) * self.max_kv_size)
        if self.cache.cells + new_tokens <= limit:
            return None
        target = max(1, min(self.max_kv_size // 2, limit - new_tokens))
        return self.compact(target, calibration=calibration, progress=progress)

    # Names and pins

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Name the tokens that are added within the block; see `spans`.

        A name is free again once all tokens of its span are forgotten or compressed, or if the
        block raises; the tokens stay then.
        """
        core, name = self.core, validation.text("name", name)
        if name in core.state.spans and not core.is_forgotten(core.state.spans[name]):
            raise InvalidArgument(f"span {name!r} already exists")
        try:
            first = len(self.tokens)
            core.set_span(name, (first, first))
            yield
            total = len(self.tokens)
            first, _ = core.state.spans.get(name, (total, total))
            core.set_span(name, (first, total))
        except BaseException:
            core.set_span(name, None)
            raise

    @computes_in_worker
    def name(self, name: str, start: int, end: int) -> None:
        """Name a range of existing tokens; a name in use moves to it."""
        token_range = self.core.token_range(start, end)
        self.core.set_span(validation.text("name", name), token_range)

    def remembered(self, start: int | str, end: int | None = None) -> int:
        """Return how many tokens of a range or a named span are still held."""
        start_index, end_index = self.core.token_range(start, end)
        held = set(self.cache.serials())
        return sum(serial in held for serial in self.core.memory.serials[start_index:end_index])

    def pin(self, start: int | str, end: int | None = None) -> None:
        """Exempt a range or a named span from eviction until it is unpinned.

        Raises InvalidArgument if some of it is not held or pinned already, or no window is left.
        """
        with session_transaction([self.core]) as (state,):
            state.memory.pin(*self.core.token_range(start, end))

    def unpin(self, start: int | str, end: int | None = None) -> None:
        """Unpin a range: it is evicted as the window moves on."""
        with session_transaction([self.core]) as (state,):
            state.memory.unpin(*self.core.token_range(start, end))

    # Snapshots and forks

    @computes_in_worker
    def snapshot(self) -> Snapshot:
        """Return a snapshot. Cheap: cells are shared until they would be overwritten."""
        return take_snapshot(self.core)

    @classmethod
    @computes_in_worker
    def restored(
        cls,
        model: LoadedModel,
        snapshot: Snapshot,
        store: PrefixCache | None = None,
        calibration: Calibration | None = None,
    ) -> "Session":
        """Return the session that a snapshot was taken of; see `Model.restore`."""
        state = restore_state(model, snapshot, calibration)
        memory, prefill_step = state.memory, snapshot.settings["prefill_step"]
        session = cls(model, memory.policy, prefill_step, store, memory.bits)
        session.core.state = state
        session.exactness = Exactness.of(snapshot.arithmetic, model.arithmetic, snapshot.codec)
        return session

    @computes_in_worker
    def fork(self, at: int | None = None) -> "Session":
        """Return a session that starts as this one is, or as it was after its first `at` tokens.

        Cells are shared copy-on-write. Raises InvalidArgument if tokens up to `at` are not held.
        """
        core, total = self.core, len(self.tokens)
        at = validation.optional_integer("at", at)
        if at is not None and not 0 <= at <= total:
            raise InvalidArgument(f"fork must be at 0 to {total} tokens; found {at}")
        fork = self._with_state(core.state.fork())
        if at is not None:
            fork.rewind(total - at)
        return fork

    def __copy__(self, memo: dict[int, Any] | None = None) -> "Session":
        """Return a fork: the model is never copied, and neither session sees the other's tokens."""
        return self.fork()

    __deepcopy__ = __copy__

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise InvalidArgument(
            "a session cannot be pickled, as it belongs to a model in this process: save it with "
            "session.snapshot().save(path), and load it with model.restore(Snapshot.load(path))"
        )

    @computes_in_worker
    def beginning(self, count: int) -> "Session":
        """Return a session that holds the first `count` tokens of this one, to be fed others.

        As `fork(at)`, but without logits until more is fed; and it continues to the bit as a
        session that was fed these tokens alone, in the same steps. Raises InvalidArgument if they
        are not all held, each in a cell of its own.
        """
        core = self.core
        count = validation.integer("count", count, 0, len(self.tokens))
        spans, whole_prompt = core.state.spans, core.state.keep_whole_prompt
        state = SessionState(core.memory.beginning(count), Sampler(), spans, whole_prompt)
        state.truncate_spans(count)
        return self._with_state(state)

    def _with_state(self, state: SessionState) -> "Session":
        session, session.core = shallow_copy(self), shallow_copy(self.core)
        session.core.state = state
        return session

    @property
    def holds_all(self) -> bool:
        """Whether each token is held, in a cell of its own; in local layers those of a window."""
        return self.core.memory.holds_all

    # State and settings

    @property
    def prefill_step(self) -> int:
        """The most tokens of a prompt that are evaluated at once."""
        return self.core.prefill_step

    @prefill_step.setter
    def prefill_step(self, size: int) -> None:
        self.core.prefill_step = size

    @property
    def checkpoint_bytes(self) -> int:
        """The most bytes that its checkpoints take; 0 for none.

        A checkpoint is a copy of what later tokens overwrite: windows of local layers, and states.
        With it, `beginning` works for models with such layers; and `rewind`, `fork(at)` and edits
        with recompute="suffix" evaluate the tokens since a checkpoint again for these, instead of
        all. See `kvkeep.cache.checkpoint` for which are kept.
        """
        return self.core.memory.checkpoints.max_bytes

    @checkpoint_bytes.setter
    def checkpoint_bytes(self, size: int) -> None:
        size = validation.integer("checkpoint_bytes", size, 0)
        with session_transaction([self.core]) as (state,):
            state.memory.checkpoints = state.memory.checkpoints.limited(size)

    @property
    def checkpoints(self) -> list[int]:
        """After how many tokens it has a checkpoint, in increasing order."""
        return [each.num_tokens for each in self.core.memory.checkpoints.entries]

    def branch_at(self, num_tokens: int) -> None:
        """Keep a checkpoint after `num_tokens` tokens, at which another text differs from this one.

        If there is none yet, it is taken if a prefill step ends there.
        """
        if not self.core.memory.overwrites:
            return
        with session_transaction([self.core]) as (state,):
            state.memory.checkpoints = state.memory.checkpoints.branched(num_tokens)

    @property
    def nbytes(self) -> int:
        """Bytes of its cells, states and checkpoints in memory, idle storage included."""
        return self.core.memory.nbytes

    @property
    def memory_use(self) -> MemoryUse:
        """The bytes of its parts in memory, and how many tokens a rewind would evaluate again."""
        return memory_use(self.core.memory)

    @property
    def finish_reason(self) -> str | None:
        """Why the last stream ended; see `stream`."""
        return self.core.finish_reason

    @property
    def keep(self) -> int:
        """The count of first tokens that are never evicted; -1 until the first prompt is known.

        A larger number keeps the oldest cells still held; a smaller one lets them be evicted. -1
        keeps the whole first prompt; it can be set before the first token.
        """
        return self.core.state.keep

    @keep.setter
    def keep(self, keep: int) -> None:
        keep = validation.integer("keep", keep)
        if keep == WHOLE_PROMPT:
            self.core.memory.policy.with_settings(keep=0)  # refused by policies without kept tokens
        with session_transaction([self.core]) as (state,):
            state.keep_whole_prompt = keep == WHOLE_PROMPT and not state.memory.tokens
            if not state.keep_whole_prompt:
                state.memory.change_policy(keep=keep)

    @property
    def discard(self) -> int:
        """The count of oldest cells that are evicted at once at the budget; 0 without eviction.

        It can be set for policy "shift"; 0 stands for half of what is neither kept nor pinned.
        """
        return self.core.memory.policy.discard_count(self.cache)

    @discard.setter
    def discard(self, discard: int) -> None:
        if "discard" not in self.settings:
            raise InvalidArgument(
                f'policy "{self.policy}" has no setting discard; policy="shift" has'
            )
        with session_transaction([self.core]) as (state,):
            state.memory.change_policy(discard=validation.integer("discard", discard))

    def __repr__(self) -> str:
        spans, pins = len(self.core.state.spans), len(self.core.memory.pins)
        details = (f", {spans} spans" if spans else "") + (f", {pins} pinned" if pins else "")
        return (
            f"<{type(self).__name__} of {self.core.model.name}: {self.policy}, "
            f"{self.cache.cells:,} of {self.max_kv_size:,} cells "
            f"({self.cache.nbytes / 1e6:,.1f} MB), {len(self.tokens):,} tokens{details}>"
        )

    @property
    def cache(self) -> KVCache:
        """The present cache; each call that changes the session replaces it."""
        return self.core.memory.cache

    @property
    def tokens(self) -> History:
        """All token ids so far, evicted ones included: immutable, and equal to a list of them."""
        return self.core.memory.tokens

    @property
    @computes_in_worker
    def logits(self) -> Tensor | None:
        """`[vocab]` float32 for the last token evaluated (a copy); None before the first."""
        logits = self.core.memory.logits()
        return None if logits is None else logits.clone()

    @property
    def policy(self) -> str:
        return self.core.memory.policy.name

    @property
    def max_kv_size(self) -> int:
        return self.core.memory.policy.max_kv_size

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of its policy, the budget included."""
        return self.core.memory.policy.settings()

    @property
    def bits(self) -> Bits:
        """The number of bits in which cells are stored."""
        return self.core.memory.bits

    @property
    def room(self) -> int | None:
        """The count of tokens that still fit; None for no limit."""
        return self.core.memory.policy.room(self.cache)

    def text(self) -> str:
        """Return all tokens as text, special tokens included."""
        return self.core.model.text.decode(self.tokens)

    @property
    def spans(self) -> dict[str, Span]:
        """Named spans, where they are now, and how much of each is still remembered."""
        held, serials = set(self.cache.serials()), self.core.memory.serials
        return {
            name: Span(name, start, end, sum(serial in held for serial in serials[start:end]))
            for name, (start, end) in self.core.state.spans.items()
        }

    @property
    def span_ranges(self) -> Mapping[str, TokenRange]:
        """The range of each span: its first token, and the one after its last. Cheap."""
        return MappingProxyType(self.core.state.spans)

    def watch(self) -> Callable[[], bool]:
        """Return a function that tells whether the session has changed since this call."""
        state_at_call = weakref.ref(self.core.state)
        return lambda: state_at_call() is not self.core.state

    @property
    def token_status(self) -> list[TokenStatus]:
        """The status of each token, in order; see `TokenStatus`."""
        return token_statuses(self.core.memory)

    @property
    def places(self) -> Mapping[str, TokenRange]:
        """Deprecated: use `span_ranges`."""
        message = "Session.places is deprecated: use Session.span_ranges"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return self.span_ranges

    @property
    def standing(self) -> list[TokenStatus]:
        """Deprecated: use `token_status`."""
        message = "Session.standing is deprecated: use Session.token_status"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return self.token_status

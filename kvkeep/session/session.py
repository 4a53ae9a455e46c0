"""A session: one model's live memory, fed and asked for tokens."""

import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NoReturn, SupportsIndex

import torch
from torch import Tensor

from kvkeep import validation
from kvkeep.cache import Bits, KVCache
from kvkeep.cache.shallow_copy import shallow_copy
from kvkeep.compression.calibration.calibration import Calibration
from kvkeep.compression.methods import Budget, make_method
from kvkeep.compression.plan import (
    CompressionPlan,
    CompressionReport,
    best_at_once,
    compress_held,
)
from kvkeep.errors import InvalidArgument
from kvkeep.loaded_model import LoadedModel
from kvkeep.policies import Policy
from kvkeep.runtime.memory import trim
from kvkeep.runtime.worker import computes, computes_itself
from kvkeep.session import editing, naming
from kvkeep.session.core import SessionCore
from kvkeep.session.decoding import next_token, score_step, stream_text
from kvkeep.session.editing import EditReport, Recompute
from kvkeep.session.evaluation import rewind
from kvkeep.session.feeding import Feeding, FeedReport
from kvkeep.session.history import History
from kvkeep.session.sampling import Sampler, Sampling
from kvkeep.session.snapshots import restored_policy, restored_state, snapshot_of
from kvkeep.session.spans import Span, TokenRange, TokenStatus, after_rewind, token_statuses
from kvkeep.session.transaction import session_transaction
from kvkeep.storage.prefixes.interface import PrefixCache
from kvkeep.storage.snapshots.fingerprint import Exactness
from kvkeep.storage.snapshots.snapshot import Snapshot

GREEDY = Sampling()
WHOLE_PROMPT = -1  # keep: all of the first prompt


class Session:
    """Feed it text, ask it for tokens; it remembers what its policy keeps.

    A call that is refused changes nothing. Evaluation goes in steps, and a step counts whole or
    not at all: if a long feed is interrupted or fails in its middle, the session stands after
    the last whole step, and `tokens` says where that is.

    Sessions may be used from any thread; one computes at a time (`kvkeep.runtime.worker`). Two
    threads that use one session take turns in it, step by step: it stays whole, and holds what
    each added in the order in which they came.

    exactness: of a restored session, whether it goes on to the bit as the one that was saved.
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
        self.core = SessionCore(model, policy, prefill_step, store, bits)
        self.exactness = Exactness()

    # Feeding and decoding

    def feed(
        self,
        prompt: str | Sequence[int],
        progress: Callable[[int], None] | None = None,
        special: bool = False,
    ) -> FeedReport:
        """Evaluates a prompt, of any length where the policy is bounded.

        Args:
            prompt: text, or token ids; no special token is added.
            progress: called after each step with the number of tokens in it.
            special: the text of a special token, such as <|im_end|>, becomes that token. By
                default it stays text, as anybody may have written it. What `model.text.chat` gives
                needs no `special`.

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

    def feeding(self, prompt: str | Sequence[int], special: bool = False) -> Feeding:
        """As `feed`, a step each time that the next one is asked for.

            for step in session.feeding(prompt):
                print(step.done, "of", step.total)

        A prompt that `feed` would refuse is refused at once. Between two steps the session is whole
        and stands after the last one; it stays there if no more steps are asked for.
        """
        started, ids = time.perf_counter(), self.core.encode_prompt(prompt, special)
        return Feeding(self.core, ids, time.perf_counter() - started)

    def next_token(self, sampling: Sampling = GREEDY) -> int:
        """Samples a token, appends it and evaluates it.

        It never stops by itself: whether an end-of-text token ends anything is for the caller to
        say. Raises ContextFull and NonFiniteLogits as `feed` does, and InvalidArgument where
        nothing was fed yet.
        """
        validation.instance("sampling", sampling, Sampling)
        return next_token(self.core, sampling)

    def stream(
        self,
        max_tokens: int | None = None,
        sampling: Sampling = GREEDY,
        ignore_eos: bool = False,
    ) -> Iterator[str]:
        """Text as it is written: whole characters only, without special tokens.

        Ends after `max_tokens` (None: never), at an end token of the model (`end_token_ids`) unless
        `ignore_eos`, where a constraint is complete, or before a stop string; `finish_reason` then
        says "length", "eos" or "stop". The tokens stay in the session, those of a stop string too.

        An error comes once all text of the tokens that the session has taken in was given;
        `finish_reason` is "full" for ContextFull, "interrupt" for Ctrl-C, "error" for any other.
        """
        max_tokens = validation.optional_whole("max_tokens", max_tokens, 0)
        validation.instance("sampling", sampling, Sampling)
        ignored = validation.flag("ignore_eos", ignore_eos)
        end_ids = () if ignored else self.core.model.end_token_ids
        return stream_text(self.core, max_tokens, sampling, end_ids)

    def score(
        self,
        prompt: str | Sequence[int],
        progress: Callable[[int], None] | None = None,
        special: bool = False,
        written: bool = False,
    ) -> Tensor:
        """Evaluates a prompt as `feed` does and says how likely each of its tokens was.

        written: evaluates each token by itself, as if the model had just chosen it: with packed
            weights, where it has them.

        Returns `[n]` float64: the natural log of each token's probability given what the session
        remembered before it. The first token of a session was predicted by nothing: NaN.
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

    @computes_itself
    def rewind(self, count: int) -> list[int]:
        """Takes the last `count` tokens back and returns them.

        `logits` are then those of the token before, evaluated anew, as a prompt's, over the cells
        still held. Cells that a window forgot do not come back: it is shorter until it fills again.
        All tokens can always be taken back, and the session is empty then.

        Raises InvalidArgument for a negative count, and where the token to stand on is no longer
        held.
        """
        with session_transaction([self.core]) as (state,):
            count, memory = validation.whole("count", count), state.memory
            everything = count == len(memory.tokens) > memory.rewindable
            removed = memory.clear() if everything else rewind(memory, count)
            left = len(memory.tokens)
            state.move_spans(lambda span: after_rewind(span, left))
        return removed

    @computes
    def take_back(self, count: int) -> None:
        """Drop the last `count` tokens without evaluating anything.

        There are no logits until more is fed. For callers that try tokens out, as speculative
        decoding does. Raises InvalidArgument if cells of earlier tokens were evicted meanwhile.
        """
        with session_transaction([self.core]) as (state,):
            state.memory.truncate(validation.whole("count", count, 0))
            left = len(state.memory.tokens)
            state.move_spans(lambda span: after_rewind(span, left))

    @computes
    def draw_anew(self) -> None:
        """The next tokens are drawn as a new session draws them.

        Otherwise one seed goes on from token to token, whatever is fed in between.
        """
        with session_transaction([self.core]) as (state,):
            state.sampler = Sampler()

    # Editing and compressing

    @computes_itself
    def delete(
        self, start: int | str, end: int | None = None, recompute: Recompute = "none"
    ) -> EditReport:
        """Takes out tokens `start ... end - 1`, or a named span.

        Args:
            recompute: "none" leaves later cells as they were computed, so that the edit costs
                little; "suffix" evaluates everything after it anew, which is exact.

        What is forgotten altogether, every token of it, has no cell that could go: with "none" it
        goes from `tokens`. An empty span goes, too. In either case nothing is evaluated.

        Raises:
            InvalidArgument: no such range or span, or some of it is no longer remembered.
        """
        return editing.delete(self.core, start, end, recompute)

    @computes_itself
    def insert(
        self,
        at: int,
        text: str | Sequence[int],
        recompute: Recompute = "none",
        special: bool = False,
    ) -> EditReport:
        """Puts text or token ids in before token `at`. Otherwise as `delete`.

        special: as of `Session.feed`. Raises ContextFull where it does not fit.
        """
        return editing.insert(self.core, at, text, recompute, special)

    @computes_itself
    def replace(
        self,
        start: int | str,
        end: int | None,
        text: str | Sequence[int],
        recompute: Recompute = "none",
        special: bool = False,
    ) -> EditReport:
        """Puts text or token ids in the place of a range, or of a named span (`end` None).

        Otherwise as `delete` and `insert`. A pinned or kept range stays pinned or kept, and a span
        that is replaced by its name is what was put there, also if it was empty.
        """
        return editing.replace(self.core, start, end, text, recompute, special)

    @computes_itself
    def make_room(self, count: int, bridge: str = " (...) ", keep: int | None = None) -> EditReport:
        """Takes out old tokens so that `count` more fit, and bridges the gap.

        The first `keep` tokens stay (by default those that the policy keeps, or 4), then comes the
        bridge, then what is left. So a session whose context is full goes on.
        """
        count, keep = validation.whole("count", count), validation.optional_whole("keep", keep)
        if keep is None:
            keep = min(self.keep, 4) if self.policy == "full" else self.keep
        return editing.make_room(self.core, count, bridge, keep)

    @computes_itself
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
        """Leaves `ratio` times fewer cells, once; each KV head keeps its own.

        The first four, the newest `recent` and pinned tokens stay as they are. What the method
        keeps, merges or forgets cannot be edited or named any more. Policy "full" only: "archive"
        compresses as it goes.

        Args:
            recent: None for 64 where all heads keep as many. Where they compete, for half of what
                is left at ratios up to 4, less above (2 / ratio of it), and for 32 at least.
            method: see `kvkeep.compression.methods`. None: "kvzap" by a calibration that has a
                surrogate, and without one "kvzip", which has the text repeated in about the
                time of reading it; "fitted" where some of it was compressed before.
            seed: of method "random".
            calibration: what is known of the model, for methods that decide by it.
            progress: called after each chunk with the number of cells that were in it.
            budget: "uniform", each 512 cells become so many fewer in every layer and KV head, or
                "heads", whatever is worth most stays, in whichever head it is: some then keep
                much, and others nothing. None: what is best for the method; "kvzip" then leaves
                only what the text says once more, word for word, where that is enough.

        Raises InvalidArgument where that cannot be done, before anything is changed.
        """
        ratio = validation.number("ratio", ratio)
        seed = validation.whole("seed", seed, 0)
        progress = validation.progress(progress)
        core = self.core
        if calibration is not None:
            validation.instance("calibration", calibration, Calibration).require(core.model)
        statistics = calibration.statistics if calibration else None
        chosen = make_method(best_at_once(core.memory, statistics) if method is None else method)
        recent = validation.optional_whole("recent", recent)
        plan = CompressionPlan(
            chosen, ratio, budget, core.model.text, recent, seed, statistics, progress
        )
        memory, report = compress_held(core.memory, plan)
        core.state = replace(core.state, memory=memory)
        trim()
        return report

    # Names and pins

    def span(self, name: str) -> AbstractContextManager[None]:
        """Names the tokens that come within the block; see `spans`.

        A name is free again once all tokens of its span are forgotten or compressed. An exception
        leaves it free, too; the tokens that came before it stay.
        """
        return naming.new_span(self.core, name)

    @computes
    def name(self, name: str, start: int, end: int) -> None:
        """Name a range of existing tokens; a name in use moves to it."""
        tokens = self.core.token_range(start, end)
        naming.change_spans(self.core, {validation.text("name", name): tokens})

    def remembered(self, start: int | str, end: int | None = None) -> int:
        """Return how many tokens of a range or a named span are still held."""
        return naming.count_remembered(self.core, start, end)

    def pin(self, start: int | str, end: int | None = None) -> None:
        """Exempt a range or a named span from eviction until it is unpinned.

        Raises InvalidArgument if some of it is no longer held, it overlaps another pin, or it would
        leave no room for a window.
        """
        naming.pin(self.core, start, end)

    def unpin(self, start: int | str, end: int | None = None) -> None:
        """Unpin a range: it is evicted as the window moves on."""
        naming.unpin(self.core, start, end)

    # Snapshots and forks

    @computes
    def snapshot(self) -> Snapshot:
        """Return a snapshot. Cheap: cells are shared until they would be overwritten."""
        return snapshot_of(self.core)

    @classmethod
    @computes
    def restored(
        cls,
        model: LoadedModel,
        snapshot: Snapshot,
        store: PrefixCache | None = None,
        policy: Policy | None = None,
    ) -> "Session":
        """The session that a snapshot was taken of.

        policy: the snapshot's policy, if it was given a calibration; see `restored_policy`.

        Raises FingerprintMismatch for another model, and InvalidSnapshot, saying what is wrong,
        where no session of this model could have been so.
        """
        if policy is None:
            policy = restored_policy(model, snapshot)
        state = restored_state(model, snapshot, policy)
        step = snapshot.settings["prefill_step"]
        session = cls(model, policy, step, store, state.memory.bits)
        session.core.state = state
        session.exactness = Exactness.of(snapshot.arithmetic, model.arithmetic, snapshot.codec)
        return session

    @computes
    def fork(self, at: int | None = None) -> "Session":
        """A session that starts as this one is, or as it was after its first `at` tokens.

        Memory is shared: the fork's own tokens are all that it adds, but for a window that has
        begun to rotate, which the first side that writes copies. Raises InvalidArgument if the
        tokens up to `at` are no longer held.
        """
        core = self.core
        total = len(core.memory.tokens)
        at = validation.optional_whole("at", at)
        if at is not None and not 0 <= at <= total:
            raise InvalidArgument(f"fork at 0 to {total} tokens; found {at}")
        fork = shallow_copy(self)
        fork.core = core.with_state(core.state.fork())
        if at is not None:
            fork.rewind(total - at)
        return fork

    def __copy__(self) -> "Session":
        return self.fork()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Session":
        """A fork: the model is never copied, and neither session sees what the other adds."""
        return self.fork()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise InvalidArgument(
            "a session cannot be pickled, as it belongs to a model in this process: save it with "
            "session.snapshot().save(path), and load it with model.restore(Snapshot.load(path))"
        )

    @computes
    def beginning(self, count: int) -> "Session":
        """A session that holds the first `count` tokens of this one, to be fed what comes next.

        As `fork(at)`, but nothing is evaluated anew, so that there are no logits until more is
        fed; and it goes on to the bit as a session that was fed these tokens alone, in the same
        steps. Memory is shared until it adds to it.

        Raises InvalidArgument where these tokens are not all held, each in a cell of its own, or
        for a count that is none of 0 to as many as there are.
        """
        core = self.core
        count = validation.whole("count", count, 0, len(core.memory.tokens))
        beginning, state = shallow_copy(self), shallow_copy(core.state)
        state.memory, state.sampler = core.memory.beginning(count), Sampler()
        state.move_spans(lambda span: after_rewind(span, count))
        beginning.core = core.with_state(state)
        return beginning

    @property
    def holds_all(self) -> bool:
        """Whether all tokens are held, each in a cell of its own or in states of layers.

        `beginning` then gives a copy of the whole session.
        """
        return self.core.memory.holds_all

    # State and settings

    @property
    def prefill_step(self) -> int:
        """How many tokens of a prompt are evaluated at once."""
        return self.core.prefill_step

    @prefill_step.setter
    def prefill_step(self, size: int) -> None:
        self.core.prefill_step = size

    @property
    def finish_reason(self) -> str | None:
        """Why the last stream ended; see `stream`."""
        return self.core.finish_reason

    @property
    def keep(self) -> int:
        """The count of first tokens that are never evicted; -1 until the first prompt is known.

        Setting a larger number pins the oldest cells still held; a smaller one lets them go.
        """
        return WHOLE_PROMPT if self.core.state.keep_whole_prompt else self.core.memory.policy.keep

    @keep.setter
    def keep(self, keep: int) -> None:
        keep = validation.whole("keep", keep)
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
        return self.core.memory.policy.discards(self.cache)

    @discard.setter
    def discard(self, discard: int) -> None:
        if "discard" not in self.core.memory.policy.settings():
            raise InvalidArgument(
                f'policy "{self.policy}" has no discard to set; policy="shift" has'
            )
        with session_transaction([self.core]) as (state,):
            state.memory.change_policy(discard=validation.whole("discard", discard))

    def __repr__(self) -> str:
        spans, pins = self.core.state.spans, self.core.memory.pins
        named = f", {len(spans)} spans" if spans else ""
        pinned = f", {len(pins)} pinned" if pins else ""
        return (
            f"<{type(self).__name__} of {self.core.model.name}: {self.policy}, "
            f"{self.cache.cells:,} of {self.max_kv_size:,} cells "
            f"({self.cache.nbytes / 1e6:,.1f} MB), {len(self.tokens):,} tokens{named}{pinned}>"
        )

    @property
    def cache(self) -> KVCache:
        """The present cache; each call that changes the session replaces it.

        `cache.cells` is the count of cells, `cache.nbytes` their size.
        """
        return self.core.memory.cache

    @property
    def tokens(self) -> History:
        """All token ids so far, evicted ones included.

        It equals a list of them, is cheap to get and never changes.
        """
        return self.core.memory.tokens

    @property
    @computes
    def logits(self) -> Tensor | None:
        """`[vocab]` float32 for the last token evaluated (a copy); None before the first."""
        current = self.core.memory.logits()
        return None if current is None else current.clone()

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
        """All tokens as text, special tokens included."""
        return self.core.model.text.decode(self.tokens)

    @property
    def spans(self) -> dict[str, Span]:
        """Named spans, where they are now, and how much of each is still remembered."""
        return naming.list_spans(self.core)

    @property
    def places(self) -> Mapping[str, TokenRange]:
        """The range of each span: its first token, and the one after its last.

        Cheap, whereas `spans` looks at each token of every span.
        """
        return MappingProxyType(self.core.state.spans)

    def watch(self) -> Callable[[], bool]:
        """Return a function that tells whether the session has changed since this call."""
        before = weakref.ref(self.core.state)
        return lambda: before() is not self.core.state

    @property
    def token_status(self) -> list[TokenStatus]:
        """The status of each token, in order; see `TokenStatus`."""
        return token_statuses(self.core.memory)

    @property
    def standing(self) -> list[TokenStatus]:
        """Deprecated: use `token_status`."""
        message = "Session.standing is deprecated: use Session.token_status"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return self.token_status

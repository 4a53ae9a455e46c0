"""`Session`: a live KV cache of one text, with its token ids, policy, sampler, pins and spans."""

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, SupportsIndex

from torch import Tensor

from kvkeep import validation
from kvkeep.cache import Bits
from kvkeep.cache.shallow_copy import shallow_copy
from kvkeep.cache.state import MAX_EXACT_INT
from kvkeep.compression.calibration.calibration import Calibration
from kvkeep.errors import InvalidArgument
from kvkeep.loaded_model import LoadedModel
from kvkeep.policies import Policy
from kvkeep.runtime.worker import computes_in_worker
from kvkeep.session import decoding
from kvkeep.session.core import WHOLE_PROMPT, SessionCore, SessionState, session_transaction
from kvkeep.session.edits import SessionEdits
from kvkeep.session.feeding import Feeding, FeedReport
from kvkeep.session.memory import Memory
from kvkeep.session.reductions import SessionReductions
from kvkeep.session.sampler import Sampler
from kvkeep.session.sampling import Sampling
from kvkeep.session.scoring import score_prompt
from kvkeep.session.snapshots import restore_state, take_snapshot
from kvkeep.session.views import SessionViews
from kvkeep.storage.prefixes.block import PrefixCache
from kvkeep.storage.snapshots.fingerprint import Exactness
from kvkeep.storage.snapshots.snapshot import Snapshot

GREEDY = Sampling()


class Session(SessionEdits, SessionReductions, SessionViews):
    """A live KV cache of one text, with its token ids, policy, sampler, pins and spans.

    A call that is refused changes nothing. A prompt is evaluated in steps, each committed or rolled
    back as a whole; `tokens` are those of committed steps. Sessions may be used from any thread;
    one computes at a time, and threads that use the same session take turns step by step.

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
        prefill_step = validation.integer("prefill_step", prefill_step, 1, MAX_EXACT_INT)
        state = SessionState(Memory(model.decoder, policy, bits))
        if store is not None and not isinstance(store, PrefixCache):
            raise InvalidArgument(f"store must be a PrefixStore; found {store!r:.200}")
        self.core = SessionCore(model, state, prefill_step, store)
        self._saved_exactness = Exactness()  # of the arithmetic with which it was saved

    @property
    def exactness(self) -> Exactness:
        """Whether the session continues bit-exactly.

        That is as the saved session would have, and as one that used no prefix cache. `differs`
        names what does not match.
        """
        return self._saved_exactness.rounded_by(self.core.state.rounded)

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
        self,
        max_tokens: int | None = None,
        sampling: Sampling = GREEDY,
        ignore_eos: bool = False,
        speculate: bool = True,
    ) -> Iterator[str]:
        """Generate tokens and yield their text: whole characters, without special tokens.

        Ends after `max_tokens` (None: never), at an end token of the model (`end_token_ids`) unless
        `ignore_eos`, if a constraint is complete, or before a stop string; `finish_reason` is then
        "length", "eos" or "stop". The tokens stay in the session, those of a stop string too.

        speculate: whether to try, in one forward, tokens that followed the newest ones earlier in
            the session. The text, the logits and all later tokens are the same to the bit; text
            that repeats itself comes sooner, several tokens at a time. It has no effect where the
            compiled kernels do not compute the model. `speculated` has the numbers.

        An error is raised after the text of all tokens in the session was yielded; `finish_reason`
        is "full" for ContextFull, "interrupt" for Ctrl-C, "error" for any other.
        """
        max_tokens = validation.optional_integer("max_tokens", max_tokens, 0)
        validation.instance("sampling", sampling, Sampling)
        ignores_eos = validation.flag("ignore_eos", ignore_eos)
        end_ids = () if ignores_eos else self.core.model.end_token_ids
        speculates = validation.flag("speculate", speculate)
        return decoding.stream_text(self.core, max_tokens, sampling, end_ids, speculates)

    @property
    def speculated(self) -> tuple[int, int]:
        """(accepted, drafted): accepted draft tokens of the last stream, and all drafted ones."""
        return self.core.drafts.accepted, self.core.drafts.drafted

    def score(
        self,
        prompt: str | Sequence[int],
        progress: Callable[[int], None] | None = None,
        special: bool = False,
        token_by_token: bool = False,
        *,
        written: bool | None = None,
    ) -> Tensor:
        """Evaluate a prompt as `feed` does, and return the log probability of each token.

        token_by_token: evaluate tokens one by one by decode steps, as generation does. The result
            differs by rounding, and more where generation reads weights in fewer bits than prompts
            do.
        written: deprecated: use `token_by_token`.

        Returns `[n]` float64: natural logs; NaN for the first token of a session.
        """
        if written is not None:
            message = "Session.score(written=) is deprecated: use token_by_token"
            warnings.warn(message, DeprecationWarning, stacklevel=2)
            token_by_token = written
        progress, ids = validation.progress(progress), self.core.encode_prompt(prompt, special)
        token_by_token = validation.flag("token_by_token", token_by_token)
        return score_prompt(self.core, ids, token_by_token, progress)

    @computes_in_worker
    def reset_sampler(self) -> None:
        """Reset the sampler: the next tokens are drawn as in a new session with their seed."""
        with session_transaction([self.core]) as (state,):
            state.sampler = Sampler()

    def draw_anew(self) -> None:
        """Deprecated: use `reset_sampler`."""
        message = "Session.draw_anew is deprecated: use Session.reset_sampler"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        self.reset_sampler()

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
        """Name a range of existing tokens; a name in use moves to it.

        They may be forgotten or compressed. If all of them are, the name is free again; see `span`.
        """
        token_range = self.core.token_range(start, end)
        self.core.set_span(validation.text("name", name), token_range)

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
        session._saved_exactness = Exactness.of(snapshot.arithmetic, model.arithmetic)
        return session

    def fork(
        self, at: int | None = None, progress: Callable[[int], None] | None = None
    ) -> "Session":
        """Return a session that starts as this one is, or as it was after its first `at` tokens.

        Cells are shared copy-on-write. Raises InvalidArgument if tokens up to `at` are not held.

        progress: of tokens that are evaluated again for `at`; see `rewind`.
        """
        at, fork = validation.optional_integer("at", at), self._forked()
        total = len(fork.tokens)  # other threads may have added tokens to this session since
        if at is not None and not 0 <= at <= total:
            raise InvalidArgument(f"fork must be at 0 to {total} tokens; found {at}")
        if at is not None:
            fork.rewind(total - at, progress)
        return fork

    @computes_in_worker
    def _forked(self) -> "Session":
        return self._with_state(self.core.state.fork())

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
        count = validation.integer("count", count, 0, len(self.tokens))
        return self._with_state(self.core.state.beginning(count))

    def _with_state(self, state: SessionState) -> "Session":
        session, session.core = shallow_copy(self), shallow_copy(self.core)
        session.core.state = state
        return session

    # State and settings

    @property
    def prefill_step(self) -> int:
        """The most tokens of a prompt that are evaluated at once."""
        return self.core.prefill_step

    @prefill_step.setter
    def prefill_step(self, size: int) -> None:
        self.core.prefill_step = validation.integer("prefill_step", size, 1, MAX_EXACT_INT)

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
        size = validation.integer("checkpoint_bytes", size, 0, MAX_EXACT_INT)
        with session_transaction([self.core]) as (state,):
            state.memory.checkpoints = state.memory.checkpoints.limited(size)

    def keep_checkpoint_at(self, num_tokens: int) -> None:
        """Keep a checkpoint after `num_tokens` tokens, where another text is known to differ.

        If there is none yet, it is taken if a prefill step ends there.
        """
        num_tokens = validation.integer("num_tokens", num_tokens, 0, MAX_EXACT_INT)
        if not self.core.memory.overwrites:
            return
        with session_transaction([self.core]) as (state,):
            state.memory.checkpoints = state.memory.checkpoints.branched(num_tokens)

    def branch_at(self, num_tokens: int) -> None:
        """Deprecated: use `keep_checkpoint_at`."""
        message = "Session.branch_at is deprecated: use Session.keep_checkpoint_at"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        self.keep_checkpoint_at(num_tokens)

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

"""A session: one model's live memory, fed and asked for tokens."""

import copy
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvkeep import arguments
from kvkeep.cache import Bits
from kvkeep.errors import ContextFull, InvalidArgument
from kvkeep.loaded import LoadedModel
from kvkeep.methods import Compression
from kvkeep.policies import Policy
from kvkeep.session.capture import capture
from kvkeep.session.context import Context
from kvkeep.session.memory import Evaluated
from kvkeep.session.prefixes import PromptPrefix, load_prefix, store_prefix
from kvkeep.session.sampling import Sampling
from kvkeep.session.spans import after_rewind
from kvkeep.session.streaming import TextStream
from kvkeep.store.prefix import PrefixStore
from kvkeep.store.snapshot import Snapshot
from kvkeep.trim_heap import trim_heap

GREEDY = Sampling()


@dataclass(frozen=True)
class FeedReport:
    """What a feed did.

    tokens: of the prompt. seconds: wall time. peak_cells: the most cells held at any moment,
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


class Session(Context):
    """Feed it text, ask it for tokens; it remembers what its policy keeps.

    A call that is refused changes nothing. Evaluation goes in steps, and a step counts whole or
    not at all: if a long feed is interrupted or fails in its middle, the session stands after
    the last whole step, and `tokens` says where that is.
    """

    def __init__(
        self,
        model: LoadedModel,
        policy: Policy,
        prefill_step: int,
        store: PrefixStore | None = None,
        bits: Bits = Bits(),  # noqa: B008 (frozen)
    ):
        super().__init__(model, policy, prefill_step, bits)
        self.finish_reason: str | None = None
        self._store = None if store is None else arguments.instance("store", store, PrefixStore)

    # What it does

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
        progress = arguments.progress(progress)
        begun, ids = time.perf_counter(), self._checked_ids(prompt, special)
        prefix = self._load_prefix(ids)
        reused = prefix.reused if prefix else 0
        if reused and progress:
            progress(reused)
        peak, done = self.cache.cells, list[Compression]()
        for step in self._evaluated(ids, reused):
            peak = max(peak, step.peak_cells)
            done += step.compressions
            if prefix:
                left = len(ids) - len(self._memory.tokens)
                store_prefix(prefix, self._memory, upcoming=min(left, self.prefill_step))
            if progress:
                progress(step.hidden.shape[0])
        if len(ids) - reused > self.prefill_step:
            trim_heap()
        return FeedReport(
            len(ids),
            time.perf_counter() - begun,
            peak,
            reused,
            prefix.differs_at if prefix else None,
            tuple(done),
            prefix.error if prefix else None,
        )

    def next_token(self, sampling: Sampling = GREEDY) -> int:
        """Samples a token, appends it and evaluates it.

        It never stops by itself: whether an end-of-text token ends anything is for the caller to
        say. Raises ContextFull and NonFiniteLogits as `feed` does, and InvalidArgument where
        nothing was fed yet.
        """
        arguments.instance("sampling", sampling, Sampling)
        logits = self._memory.logits()
        if logits is None:
            raise InvalidArgument("nothing to continue: feed a prompt before asking for tokens")
        self._memory.require_room(1)
        with self._changing() as work:
            token = work.choose(logits, sampling)
            work.memory.step([token], 0, 1, sampled=True)
        return token

    def stream(
        self,
        max_tokens: int | None = None,
        sampling: Sampling = GREEDY,
        ignore_eos: bool = False,
    ) -> Iterator[str]:
        """Text as it is written: whole characters only, without special tokens.

        Ends after `max_tokens` (None: never), at end-of-text unless `ignore_eos`, or before a
        stop string; `finish_reason` then says "length", "eos" or "stop". The tokens stay in the
        session, those of a stop string too.

        An error comes once all text of the tokens that the session has taken in was given;
        `finish_reason` is "full" for ContextFull, "interrupt" for Ctrl-C, "error" for any other.
        """
        max_tokens = arguments.optional_whole("max_tokens", max_tokens, 0)
        arguments.instance("sampling", sampling, Sampling)
        ends = () if arguments.flag("ignore_eos", ignore_eos) else self._model.spec.eos_token_ids
        return self._written(max_tokens, sampling, ends)

    def _written(
        self, max_tokens: int | None, sampling: Sampling, ends: tuple[int, ...]
    ) -> Iterator[str]:
        before, self.finish_reason, shown = self.tokens, None, 0
        try:
            for piece in self._pieces(max_tokens, sampling, ends):
                shown += len(piece)
                yield piece
        except GeneratorExit:
            raise
        except BaseException as error:
            self.finish_reason = _reason(error)
            whole = TextStream(self._text, sampling.stop, before)
            if rest := whole.all_of(self.tokens[len(before) :])[shown:]:
                try:
                    yield rest
                except GeneratorExit:
                    if isinstance(error, Exception):
                        raise  # nobody asks for more, but an interrupt must not get lost
            raise

    def _pieces(
        self, max_tokens: int | None, sampling: Sampling, ends: tuple[int, ...]
    ) -> Iterator[str]:
        text = TextStream(self._text, sampling.stop, self.tokens)
        for _ in itertools.count() if max_tokens is None else range(max_tokens):
            token = self.next_token(sampling)
            if token in ends:
                self.finish_reason = "eos"
                break
            yield from text.push(token)
            if text.stopped:
                self.finish_reason = "stop"
                return
        self.finish_reason = self.finish_reason or "length"
        yield from text.flush()

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
        progress, ids = arguments.progress(progress), self._checked_ids(prompt, special)
        written = arguments.flag("written", written)
        last, done, scores = self._memory.hidden, 0, list[Tensor]()
        for step in self._evaluated(ids, 0, written):
            count = step.hidden.shape[0]
            before, targets = step.hidden, ids[done : done + count]
            if last is None:
                scores.append(torch.full((1,), math.nan, dtype=torch.float64, device="cpu"))
                targets = targets[1:]
            else:
                before = torch.cat((last, step.hidden))
            scores.append(self._memory.log_probabilities(before[: len(targets)], targets))
            last, done = step.hidden[-1:], done + count
            if progress:
                progress(count)
        return torch.cat(scores)

    def rewind(self, count: int) -> list[int]:
        """Takes the last `count` tokens back and returns them.

        `logits` are then those of the token before, evaluated anew, as a prompt's, over the cells
        still held. Cells that a window forgot do not come back: it is shorter until it fills again.

        Raises InvalidArgument for a negative count, and where the token to stand on is no longer
        held.
        """
        with self._changing() as work:
            taken = work.memory.take_back(arguments.whole("count", count))
            left = len(work.memory.tokens)
            work.move_spans(lambda span: after_rewind(span, left))
        return taken

    # Going on elsewhere

    def snapshot(self) -> Snapshot:
        """All that this session is now. Cheap: cells are shared until they would be overwritten."""
        return capture(self)

    def fork(self, at: int | None = None) -> "Session":
        """A session that starts as this one is, or as it was after its first `at` tokens.

        Memory is shared: the fork's own tokens are all that it adds, but for a window that has
        begun to rotate, which whoever goes on first copies. Raises InvalidArgument where the
        tokens up to `at` are no longer held.
        """
        total = len(self._memory.tokens)
        at = arguments.optional_whole("at", at)
        if at is not None and not 0 <= at <= total:
            raise InvalidArgument(f"fork at 0 to {total} tokens; found {at}")
        fork = copy.copy(self)
        fork._state = self._state.fork()
        if at is not None:
            fork.rewind(total - at)
        return fork

    # How

    def _checked_ids(self, prompt: str | Sequence[int], special: bool) -> list[int]:
        ids = self._ids(prompt, special)
        if not ids:
            raise InvalidArgument("the prompt is empty: expected at least one token")
        self._memory.require_room(len(ids))
        self._state.check_prompt(len(ids))
        return ids

    def _evaluated(self, ids: list[int], done: int, sampled: bool = False) -> Iterator[Evaluated]:
        """Evaluates what comes after the first `done` ids, and stands after each step whole."""
        most = 1 if sampled else self.prefill_step
        while done < len(ids):
            with self._changing() as work:
                work.keep_prompt(len(ids))
                step = work.memory.step(ids, done, most, sampled)
            done += step.hidden.shape[0]
            yield step

    def _load_prefix(self, ids: list[int]) -> PromptPrefix | None:
        """What a store holds of a first prompt is the session's; None where nothing is looked up.

        Nothing that is here is overwritten for it, so that Ctrl-C need not wait.
        """
        if self._store is None or self._memory.tokens:
            return None
        work = self._state.successor()
        work.keep_prompt(len(ids))
        prefix = load_prefix(self._store, self._model.fingerprint, work.memory, ids)
        if prefix.reused:
            self._state = work
        return prefix


def _reason(error: BaseException) -> str:
    """Why a stream ended that could not go on."""
    if isinstance(error, ContextFull):
        return "full"
    return "interrupt" if isinstance(error, KeyboardInterrupt) else "error"

"""A session: one model's live memory, fed and asked for tokens."""

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, SupportsIndex

import torch
from torch import Tensor

from kvkeep import validation
from kvkeep.cache import Bits
from kvkeep.cache.shallow_copy import shallow_copy
from kvkeep.errors import ContextFull, InvalidArgument
from kvkeep.loaded_model import LoadedModel
from kvkeep.policies import Policy
from kvkeep.runtime.worker import computes, computes_itself
from kvkeep.session.feeding import Feeding, FeedReport, Reader
from kvkeep.session.held import changing
from kvkeep.session.sampling import Sampler, Sampling
from kvkeep.session.snapshots import restored_state, snapshot_of
from kvkeep.session.spans import after_rewind
from kvkeep.session.streaming import TextStream
from kvkeep.storage.prefixes.interface import PrefixCache
from kvkeep.storage.snapshots.fingerprint import Exactness
from kvkeep.storage.snapshots.snapshot import Snapshot

GREEDY = Sampling()


class Session(Reader):
    """Feed it text, ask it for tokens; it remembers what its policy keeps.

    A call that is refused changes nothing. Evaluation goes in steps, and a step counts whole or
    not at all: if a long feed is interrupted or fails in its middle, the session stands after
    the last whole step, and `tokens` says where that is.

    Sessions may be used from any thread; one computes at a time (`kvkeep.runtime.worker`). Two
    threads that use one session take turns in it, step by step: it stays whole, and holds what
    each added in the order in which they came.

    finish_reason: why the last stream ended. exactness: of a restored session, whether it goes on
    to the bit as the one that was saved.
    """

    def __init__(
        self,
        model: LoadedModel,
        policy: Policy,
        prefill_step: int,
        store: PrefixCache | None = None,
        bits: Bits = Bits(),  # noqa: B008 (frozen)
    ):
        super().__init__(model, policy, prefill_step, store, bits)
        self.finish_reason: str | None = None
        self.exactness = Exactness()

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
        begun, ids = time.perf_counter(), self._checked_ids(prompt, special)
        return Feeding(self, ids, time.perf_counter() - begun)

    @computes
    def next_token(self, sampling: Sampling = GREEDY) -> int:
        """Samples a token, appends it and evaluates it.

        It never stops by itself: whether an end-of-text token ends anything is for the caller to
        say. Raises ContextFull and NonFiniteLogits as `feed` does, and InvalidArgument where
        nothing was fed yet.
        """
        validation.instance("sampling", sampling, Sampling)
        logits = self._memory.logits()
        if logits is None:
            raise InvalidArgument("nothing to continue: feed a prompt before asking for tokens")
        self._memory.require_room(1)
        with changing([self]) as (work,):
            token = work.choose(logits, sampling)
            work.memory.step([token], 0, 1, sampled=True)
        if sampling.constraint is not None:
            sampling.constraint.accept(token)
        return token

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
        ends = () if validation.flag("ignore_eos", ignore_eos) else self._model.end_token_ids
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
            if sampling.complete:
                self.finish_reason = "eos"
                break
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
        progress, ids = validation.progress(progress), self._checked_ids(prompt, special)
        written = validation.flag("written", written)
        done, scores = 0, list[Tensor]()
        while done < len(ids):
            scores.append(self._scored(ids, done, written))
            count = len(scores[-1])
            done += count
            if progress:
                progress(count)
        return torch.cat(scores)

    @computes
    def _scored(self, ids: list[int], done: int, written: bool) -> Tensor:
        """The scores of one step's tokens, which are taken in."""
        with self._changing() as work:
            before = work.memory.hidden
            hidden = self._step(work, ids, done, written).hidden
            targets, nothing = ids[done : done + len(hidden)], []
            if before is None:
                nothing = [torch.full((1,), math.nan, dtype=torch.float64, device="cpu")]
                targets = targets[1:]
            else:
                hidden = torch.cat((before, hidden))
            found = work.memory.log_probabilities(hidden[: len(targets)], targets)
            return torch.cat([*nothing, found])

    @computes_itself
    def rewind(self, count: int) -> list[int]:
        """Takes the last `count` tokens back and returns them.

        `logits` are then those of the token before, evaluated anew, as a prompt's, over the cells
        still held. Cells that a window forgot do not come back: it is shorter until it fills again.
        All tokens can always be taken back, and the session is empty then.

        Raises InvalidArgument for a negative count, and where the token to stand on is no longer
        held.
        """
        with self._changing() as work:
            count, memory = validation.whole("count", count), work.memory
            every = count == len(memory.tokens) > memory.rewindable
            taken = memory.take_all() if every else memory.take_back(count)
            left = len(work.memory.tokens)
            work.move_spans(lambda span: after_rewind(span, left))
        return taken

    @computes
    def take_back(self, count: int) -> None:
        """Takes the last `count` tokens back, as if they had not come, and evaluates nothing.

        There are no logits until more is fed. For who tries tokens out, as speculative decoding
        does. Raises InvalidArgument where some of what was there before them is forgotten.
        """
        with self._changing() as work:
            work.memory.drop(validation.whole("count", count, 0))
            left = len(work.memory.tokens)
            work.move_spans(lambda span: after_rewind(span, left))

    # Going on elsewhere

    @computes
    def snapshot(self) -> Snapshot:
        """All that this session is now. Cheap: cells are shared until they would be overwritten."""
        return snapshot_of(self._model, self._state, self.prefill_step)

    @classmethod
    @computes
    def restored(
        cls, model: LoadedModel, snapshot: Snapshot, store: PrefixCache | None = None
    ) -> "Session":
        """The session that a snapshot was taken of.

        Raises FingerprintMismatch for another model, and InvalidSnapshot, saying what is wrong,
        where no session of this model could have been so.
        """
        state = restored_state(model, snapshot)
        memory, step = state.memory, snapshot.settings["prefill_step"]
        session = cls(model, memory.policy, step, store, memory.bits)
        session._take(state)
        session.exactness = Exactness.of(snapshot.arithmetic, model.arithmetic, snapshot.codec)
        return session

    @computes
    def fork(self, at: int | None = None) -> "Session":
        """A session that starts as this one is, or as it was after its first `at` tokens.

        Memory is shared: the fork's own tokens are all that it adds, but for a window that has
        begun to rotate, which whoever goes on first copies. Raises InvalidArgument where the
        tokens up to `at` are no longer held.
        """
        total = len(self._memory.tokens)
        at = validation.optional_whole("at", at)
        if at is not None and not 0 <= at <= total:
            raise InvalidArgument(f"fork at 0 to {total} tokens; found {at}")
        fork = shallow_copy(self)
        fork._take(self._state.fork())
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
        count = validation.whole("count", count, 0, len(self._memory.tokens))
        beginning, state = shallow_copy(self), shallow_copy(self._state)
        state.memory, state.sampler = self._memory.beginning(count), Sampler()
        state.move_spans(lambda span: after_rewind(span, count))
        beginning._take(state)
        return beginning

    @property
    def holds_all(self) -> bool:
        """Whether all tokens are held, each in a cell of its own or in states of layers.

        `beginning` then gives a copy of the whole session.
        """
        return self._memory.holds_all

    @computes
    def draw_anew(self) -> None:
        """The next tokens are drawn as a new session draws them.

        Otherwise one seed goes on from token to token, whatever is fed in between.
        """
        with self._changing() as work:
            work.sampler = Sampler()

    # How

    def _checked_ids(self, prompt: str | Sequence[int], special: bool) -> list[int]:
        ids = self._ids(prompt, special)
        if not ids:
            raise InvalidArgument("the prompt is empty: expected at least one token")
        self._memory.require_room(len(ids))
        self._state.check_prompt(len(ids))
        return ids


def _reason(error: BaseException) -> str:
    """Why a stream ended that could not go on."""
    if isinstance(error, ContextFull):
        return "full"
    return "interrupt" if isinstance(error, KeyboardInterrupt) else "error"

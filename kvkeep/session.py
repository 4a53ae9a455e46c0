"""A session: one model's live memory, fed and asked for tokens."""

import copy
import math
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvkeep.errors import ContextFull, InvalidArgument, NonFiniteLogits
from kvkeep.interrupts import interrupts_deferred
from kvkeep.policies import Policy, make_policy
from kvkeep.sampling import Sampler, Sampling
from kvkeep.store.snapshot import Snapshot
from kvkeep.streaming import TextStream

if TYPE_CHECKING:
    from kvkeep.model import Model

WHOLE_PROMPT = -1  # keep: all of the first prompt
GREEDY = Sampling()


@dataclass(frozen=True)
class FeedReport:
    """What a feed did.

    tokens: evaluated. seconds: wall time. peak_cells: the most cells held at any moment, those
    of the step in progress included.
    """

    tokens: int
    seconds: float
    peak_cells: int

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


class Session:
    """Feed it text, ask it for tokens; it remembers what its policy keeps.

    A call that is refused changes nothing. Evaluation goes in steps, and a step counts whole or
    not at all: if a long feed is interrupted or fails in its middle, the session stands after
    the last whole step, and `tokens` says where that is.
    """

    def __init__(self, model: "Model", policy: Policy, prefill_step: int):
        if prefill_step < 1:
            raise InvalidArgument(f"prefill_step must be 1 or more; found {prefill_step}")
        self.cache = model.decoder.new_cache()
        self.prefill_step = prefill_step
        self.finish_reason: str | None = None
        self._model = model
        self._decoder = model.decoder
        self._text = model.text
        self._policy = policy
        self._sampler = Sampler()
        self._tokens = array("i")
        self._hidden: Tensor | None = None  # of the last token, [1, hidden_size]
        self._logits: Tensor | None = None  # made from it when first asked for
        self._keep_whole_prompt = False

    # What it holds

    @property
    def tokens(self) -> list[int]:
        """Every token id so far, also those that the policy has forgotten."""
        return self._tokens.tolist()

    @property
    def logits(self) -> Tensor | None:
        """`[vocab]` float32 for the last token evaluated (a copy); None before the first."""
        current = self._current_logits()
        return None if current is None else current.clone()

    @property
    def policy(self) -> str:
        return self._policy.name

    @property
    def max_kv_size(self) -> int:
        return self._policy.max_kv_size

    @property
    def room(self) -> int | None:
        """How many more tokens it can take; None if there is no end."""
        return self._policy.room(self.cache)

    @property
    def keep(self) -> int:
        """How many of the first tokens stay for ever; -1 until the first prompt is known.

        Setting a larger number pins the oldest cells still held; a smaller one lets them go.
        """
        return WHOLE_PROMPT if self._keep_whole_prompt else self._policy.keep

    @keep.setter
    def keep(self, keep: int) -> None:
        if keep == WHOLE_PROMPT and not self._tokens:
            self._keep_whole_prompt = True
            return
        self._policy.set_keep(self.cache, keep)
        self._keep_whole_prompt = False

    def text(self) -> str:
        """All tokens as text, special tokens included."""
        return self._text.decode(self.tokens)

    # What it does

    def feed(
        self, prompt: str | Sequence[int], progress: Callable[[int], None] | None = None
    ) -> FeedReport:
        """Evaluates a prompt, of any length where the policy is bounded.

        Args:
            prompt: text, or token ids; no special token is added.
            progress: called after each step with the number of tokens in it.

        Raises:
            InvalidArgument: the prompt is empty or holds an id outside the vocabulary.
            ContextFull: the policy cannot take as many tokens.
            NonFiniteLogits: the model produced NaN or infinity.
        """
        begun, peak = time.perf_counter(), 0
        ids = self._checked_ids(prompt)
        for step in self._steps(ids):
            peak = max(peak, step.peak_cells)
            if progress:
                progress(step.hidden.shape[0])
        return FeedReport(len(ids), time.perf_counter() - begun, peak)

    def next_token(self, sampling: Sampling = GREEDY) -> int:
        """Samples a token, appends it and evaluates it.

        It never stops by itself: whether an end-of-text token ends anything is for the caller to
        say. Raises ContextFull and NonFiniteLogits as `feed` does, and InvalidArgument where
        nothing was fed yet.
        """
        logits = self._current_logits()
        if logits is None:
            raise InvalidArgument("nothing to continue: feed a prompt before asking for tokens")
        self._require_room(1)
        token = self._sampler.choose(logits, self._tokens, sampling)
        for _ in self._steps([token]):
            pass
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
        """
        if max_tokens is not None and max_tokens < 0:
            raise InvalidArgument(f"max_tokens must be 0 or more; found {max_tokens}")
        return self._stream(max_tokens, sampling, ignore_eos)

    def _stream(
        self, max_tokens: int | None, sampling: Sampling, ignore_eos: bool
    ) -> Iterator[str]:
        text, written = TextStream(self._text, sampling.stop), 0
        self.finish_reason = None
        while max_tokens is None or written < max_tokens:
            token = self.next_token(sampling)
            written += 1
            if token in self._decoder.spec.eos_token_ids and not ignore_eos:
                self.finish_reason = "eos"
                break
            if piece := text.push(token):
                yield piece
            if text.stopped:
                self.finish_reason = "stop"
                return
        if self.finish_reason is None:
            self.finish_reason = "length"
        if rest := text.flush():
            yield rest

    def score(
        self, prompt: str | Sequence[int], progress: Callable[[int], None] | None = None
    ) -> Tensor:
        """Evaluates a prompt as `feed` does and says how likely each of its tokens was.

        Returns `[n]` float64: the natural log of each token's probability given what the session
        remembered before it. The first token of a session was predicted by nothing: NaN.
        """
        ids, last, scores = self._checked_ids(prompt), self._hidden, []
        for step in self._steps(ids):
            before = step.hidden if last is None else torch.cat((last, step.hidden))
            targets = self._tokens[-step.hidden.shape[0] :]
            if last is None:
                scores.append(torch.full((1,), math.nan, dtype=torch.float64))
                targets = targets[1:]
            scores.append(self._log_probabilities(before[: len(targets)], targets))
            last = step.hidden[-1:]
            if progress:
                progress(step.hidden.shape[0])
        return torch.cat(scores)

    def rewind(self, count: int) -> list[int]:
        """Takes the last `count` tokens back and returns them.

        `logits` are then those of the token before, evaluated anew over the cells still held. Cells
        that a window forgot do not come back: it is shorter until it fills again.

        Raises InvalidArgument for a negative count, and where the token to stand on is no longer
        held.
        """
        held, total = self.cache.rewindable, len(self._tokens)
        most = total if held == total else held - 1
        if not 0 <= count <= most:
            raise InvalidArgument(
                f"rewind takes 0 to {most} tokens here; found {count}: of {total} tokens the last "
                f"{held} are held without a gap, and one of them must remain to go on from"
            )
        if count == 0:
            return []
        taken = self._tokens[total - count :].tolist()
        again = self._tokens[total - count - 1 : total - count].tolist()
        with interrupts_deferred():
            self.cache.drop_newest(count + len(again))
            del self._tokens[total - count - len(again) :]
            self._hidden = self._logits = None
            for _ in self._steps(again):
                pass
        return taken

    # Going on elsewhere

    def snapshot(self) -> Snapshot:
        """All that this session is now. Cheap: cells are shared until they would be overwritten."""
        return Snapshot(
            fingerprint=asdict(self._model.fingerprint),
            model=self._model.name,
            policy={"name": self._policy.name, **self._policy.settings()},
            settings={
                "prefill_step": self.prefill_step,
                "keep_whole_prompt": self._keep_whole_prompt,
            },
            tokens=torch.tensor(self._tokens, dtype=torch.int32),
            clock=self.cache.time,
            segments=tuple(segment.twin() for segment in self.cache.segments),
            hidden=self._hidden,
            logits=self._current_logits(),
            sampler=self._sampler.state(),
            layout=self.cache.layout,
        )

    @classmethod
    def restore(cls, model: "Model", snapshot: Snapshot) -> "Session":
        """The session that a snapshot was taken of; see `Model.restore`."""
        model.fingerprint.require(snapshot.fingerprint, "the snapshot")
        session = cls(model, make_policy(**snapshot.policy), snapshot.settings["prefill_step"])
        session._keep_whole_prompt = snapshot.settings["keep_whole_prompt"]
        session._tokens = array("i", snapshot.tokens.tolist())
        session._sampler = Sampler.at(snapshot.sampler)
        device = session.cache.layout.device
        session.cache.time = snapshot.clock
        session.cache.segments = [segment.twin().to(device) for segment in snapshot.segments]
        if snapshot.hidden is not None and snapshot.logits is not None:
            session._hidden, session._logits = snapshot.hidden.to(device), snapshot.logits.to(device)
        return session

    def fork(self, at: int | None = None) -> "Session":
        """A session that starts as this one is, or as it was after its first `at` tokens.

        Memory is shared: the fork's own tokens are all that it adds, but for a window that has
        begun to rotate, which whoever goes on first copies. Raises InvalidArgument where the
        tokens up to `at` are no longer held.
        """
        total = len(self._tokens)
        if at is not None and not 0 <= at <= total:
            raise InvalidArgument(f"fork at 0 to {total} tokens; found {at}")
        fork = copy.copy(self)
        fork.cache = self.cache.fork()
        fork._policy = copy.copy(self._policy)
        fork._tokens = self._tokens[:]
        fork._sampler = Sampler.at(self._sampler.state())
        if at is not None:
            fork.rewind(total - at)
        return fork

    # How

    def _checked_ids(self, prompt: str | Sequence[int]) -> list[int]:
        ids = self._text.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not ids:
            raise InvalidArgument("the prompt is empty: expected at least one token")
        vocabulary = self._decoder.spec.vocab_size
        for index, token in enumerate(ids):
            if not 0 <= token < vocabulary:
                raise InvalidArgument(
                    f"token ids must be 0 to {vocabulary - 1}; found {token} at index {index}"
                )
        self._require_room(len(ids))
        if self._keep_whole_prompt:
            self.keep = len(ids)
        return ids

    def _require_room(self, count: int) -> None:
        room = self._policy.room(self.cache)
        if room is not None and count > room:
            raise ContextFull(
                f'policy "{self._policy.name}" holds at most {self._policy.max_kv_size} tokens: '
                f"{self.cache.cells} are held and {count} more do not fit; "
                'policy="sliding" goes on for ever on a fixed budget'
            )

    @torch.inference_mode()
    def _steps(self, ids: list[int]) -> Iterator["_Evaluated"]:
        """Evaluates ids step by step; each is part of the session when it is yielded."""
        done = 0
        while done < len(ids):
            count = min(self._policy.open(self.cache, len(ids) - done), self.prefill_step)
            chunk, before = ids[done : done + count], self.cache.cells
            done += count
            with interrupts_deferred():
                with self.cache.step(count):
                    where = self.cache.layout.device
                    hidden = self._decoder.hidden(torch.tensor(chunk, device=where), self.cache)
                    logits = self._decoder.logits(hidden[-1:])[0] if done == len(ids) else None
                    _require_finite(hidden if logits is None else logits)
                self._tokens.extend(chunk)
                self._hidden, self._logits = hidden[-1:], logits
            yield _Evaluated(hidden, before + count if count > 1 else self.cache.cells)

    @torch.inference_mode()
    def _current_logits(self) -> Tensor | None:
        if self._logits is None and self._hidden is not None:
            self._logits = self._decoder.logits(self._hidden)[0]
        return self._logits

    @torch.inference_mode()
    def _log_probabilities(self, hidden: Tensor, targets: Sequence[int]) -> Tensor:
        """`[n]` float64. Goes by blocks of rows: the logits of all would not fit in a cache."""
        wanted, block = torch.tensor(targets, device=hidden.device), 64
        parts = [torch.empty(0, dtype=torch.float64)]
        for first in range(0, len(targets), block):
            logits = self._decoder.logits(hidden[first : first + block])
            chosen = logits.gather(1, wanted[first : first + block, None])[:, 0]
            parts.append((chosen.double() - logits.logsumexp(-1).double()).cpu())
        return torch.cat(parts)


@dataclass(frozen=True)
class _Evaluated:
    """hidden: `[n, hidden_size]` of the step's tokens; peak_cells: held while it ran."""

    hidden: Tensor
    peak_cells: int


def _require_finite(x: Tensor) -> None:
    if not math.isfinite(float(x.sum())):
        raise NonFiniteLogits(
            "the model produced NaN or infinity: its weights are broken, or need "
            'dtype="float32"; the tokens of this step were not taken in'
        )

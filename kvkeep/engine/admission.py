"""Answers are taken on: each is given a session, what of its prompt is there, and memory."""

import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from kvkeep.engine.cache_misses import CacheMiss, cache_miss
from kvkeep.engine.events import GenerationEvent, Reuse
from kvkeep.engine.generation import Generation, GenerationRequest
from kvkeep.engine.limits import Limits, Totals
from kvkeep.engine.recent_log import RecentLog
from kvkeep.engine.record import STEP, SessionRecord
from kvkeep.engine.registry import SessionRegistry
from kvkeep.engine.reuse import best_match
from kvkeep.engine.scheduler import Scheduler
from kvkeep.errors import Cancelled, InvalidArgument, NoRoom
from kvkeep.model import Model
from kvkeep.session.sampling import Sampling, require_own_constraints
from kvkeep.session.session import Session

_log = logging.getLogger("kvkeep.engine")
_MISSES = 50  # that are known of one owner


class Tells(Protocol):
    """Is told what was done to a session."""

    def __call__(self, kept: SessionRecord, what: str, tokens: int, seconds: float) -> None: ...


class Admission:
    """Answers from the moment that they are asked for until they are over. In the engine's thread.

    new_session: makes one for an owner. tells: is told of each answer that is over.
    """

    def __init__(
        self,
        model: Model,
        keeping: SessionRegistry,
        limits: Limits,
        new_session: Callable[[str], Session],
        tells: Tells,
    ):
        self._model, self._keeping, self._limits = model, keeping, limits
        self._new_session, self._done = new_session, tells
        self.schedule = Scheduler(model.end_token_ids, self._over, self._has_read)
        self._followers: dict[Generation, list[Generation]] = {}
        self._ended_by = Counter[str]()
        self._sums = Counter[str]()
        self.cache_misses = RecentLog[CacheMiss](_MISSES)
        self.pace = 0.02  # seconds of a turn, lately

    def take_on(
        self,
        ask: GenerationRequest | Callable[[SessionRecord], GenerationRequest],
        session: str | None,
        owner: str,
        listener: Callable[[GenerationEvent], None] | None,
        revision: int | None = None,
        times: int = 1,
    ) -> Generation:
        self._require_turn(owner)
        if session is None:
            assert isinstance(ask, GenerationRequest)
            _require_something(ask, 0)
            self._require_short(ask)
            kept, reuse = self._placed(ask, owner)
        else:
            kept, reuse = self._keeping.find(session, owner), Reuse()
            ask = self._said(ask, kept, revision)
            _require_something(ask, len(kept.live.tokens))
        try:
            require_own_constraints([ask.sampling], self._samplings())
            tokens = None if ask.max_tokens is None else len(ask.prompt) + ask.max_tokens
            self._keeping.reserve(kept, tokens, times)
            rest = ask.prompt[reuse.tokens :]
            feeding = kept.live.feeding(rest) if rest else None
        except BaseException:
            if not kept.named and kept.revision == 0:  # made for this prompt
                self._keeping.remove(kept)
            raise
        answer = Generation(ask, kept, self._model.text, listener)
        kept.answer = answer
        kept.used = time.monotonic()
        answer.start(feeding, reuse)
        self.schedule.add(answer)
        return answer

    def _said(
        self,
        ask: GenerationRequest | Callable[[SessionRecord], GenerationRequest],
        kept: SessionRecord,
        revision: int | None,
    ) -> GenerationRequest:
        """What is asked of a session."""
        kept.require_idle()
        kept.require_revision(revision)
        self._keeping.reserve(kept, 0)
        if callable(ask):
            before = len(kept.live.tokens)
            ask = ask(kept)
            if len(kept.live.tokens) < before:
                kept.stands_at(len(kept.live.tokens))
        self._require_short(ask)
        return ask

    def _require_short(self, ask: GenerationRequest) -> None:
        if len(ask.prompt) > self._limits.prompt_tokens:
            raise InvalidArgument(
                f"a prompt has at most {self._limits.prompt_tokens:,} tokens here; found "
                f"{len(ask.prompt):,}: feed a session in parts"
            )

    def _placed(self, ask: GenerationRequest, owner: str) -> tuple[SessionRecord, Reuse]:
        """A session for a prompt, and what of the prompt is in it."""
        fresh = SessionRecord("", owner, False, None, self._new_session(owner))
        match = best_match(ask.prompt, self._keeping.of(owner), fresh)
        reason = "" if match.tokens == len(ask.prompt) else match.reason
        differs = match.common if match.common < len(ask.prompt) else None
        source = match.record
        reuse = Reuse(match.tokens, "session" if source else "", reason, differs)
        if not match.whole:
            self.cache_misses.add(owner, cache_miss(ask.prompt, match))
        if source is None:
            return self._keeping.add(fresh.live, owner, named=False), reuse
        reuse = replace(reuse, session=source.name)
        if match.whole and not source.named:
            source.live.draw_anew()
            return source, reuse
        live = source.live.beginning(match.tokens)
        kept = self._keeping.add(live, owner, parent=source.name, named=False)
        kept.evaluated = min(source.evaluated, match.tokens)
        kept.sampled = match.tokens if match.whole else 0
        return kept, reuse

    def take_on_several(
        self,
        ask: GenerationRequest,
        samplings: Sequence[Sampling],
        owner: str,
        listeners: Sequence[Callable[[GenerationEvent], None] | None],
    ) -> list[Generation]:
        require_own_constraints(samplings, self._samplings())
        asks = [replace(ask, sampling=sampling) for sampling in samplings]
        first = self.take_on(asks[0], None, owner, listeners[0], times=len(asks))
        others = [
            Generation(one, first.kept, self._model.text, told)
            for one, told in zip(asks[1:], listeners[1:], strict=True)
        ]
        self._followers[first] = others
        if first.writes:
            self._has_read(first)
        return [first, *others]

    def _samplings(self) -> Iterator[Sampling]:
        """The samplings of all running answers, and of those that wait for a shared prefill."""
        for answer in (*self.schedule.answers, *itertools.chain(*self._followers.values())):
            yield answer.ask.sampling

    def _has_read(self, answer: Generation) -> None:
        """Those who wait for its prompt go on from there, each in a fork."""
        kept, others = answer.kept, self._followers.pop(answer, ())
        kept.reserved //= 1 + len(others)
        for other in others:
            if other.cancelled:
                other.dismiss()
                continue
            try:
                fork = self._keeping.add(kept.live.fork(), kept.owner, named=False)
                self._keeping.reserve(fork, other.ask.max_tokens)
            except Exception as error:
                other.fail(error)
                continue
            fork.evaluated, other.kept, fork.answer = kept.evaluated, fork, other
            other.start(None, Reuse(len(other.ask.prompt), "session", session=kept.name))
            self.schedule.add(other)

    def _over(self, answer: Generation) -> None:
        """An answer has come to its end: the session is idle."""
        for other in self._followers.pop(answer, ()):
            other.fail(answer.error or Cancelled("the prompt was not read to its end"))
        kept, usage = answer.kept, answer.usage
        self._count(answer)
        if answer.written:
            kept.sampled = len(kept.live.tokens)
        if answer.ask.on_end is not None:
            self._do_after(answer)
        kept.answer = None
        kept.reserved = 0
        if not kept.named and kept.live.cache.cells == 0:
            self._keeping.remove(kept)
            return
        kept.touched()
        seconds = usage.prefill_seconds + usage.decode_seconds
        self._done(kept, "generate", usage.evaluated + usage.generated, seconds)

    def _do_after(self, answer: Generation) -> None:
        kept, ask = answer.kept, answer.ask
        before = len(kept.live.tokens)
        try:
            assert ask.on_end is not None
            ask.on_end(kept.live, len(ask.prompt) - answer.unread, len(answer.written))
        except Exception:  # the answer is made: what others do with it is their own
            _log.exception("what was to be done after an answer in %r", kept.name)
        if len(kept.live.tokens) < before:
            kept.stands_at(len(kept.live.tokens))

    def _require_turn(self, owner: str) -> None:
        owners = Counter(answer.kept.owner for answer in self.schedule.answers)
        if (
            len(self.schedule) >= self._limits.running
            or owners[owner] >= self._limits.running_per_owner
        ):
            raise NoRoom(
                f"{len(self.schedule)} answers are being made, {owners[owner]} of them yours: "
                "come back when one is done",
                self._soonest(),
            )

    def _soonest(self) -> float:
        """Seconds until an answer may be done, as things go."""
        left = [
            (answer.ask.max_tokens or 512) - len(answer.written) + answer.prefill_remaining / STEP
            for answer in self.schedule.answers
        ]
        return max(1.0, min(left, default=0) * self.pace)

    def turned(self, seconds: float) -> None:
        """A turn of the schedule has taken so long."""
        self.pace += 0.1 * (seconds - self.pace)

    def totals(self) -> Totals:
        """What was done, and what is held, as of now."""
        held, sums = list(self._keeping), self._sums
        live = sum(kept.session is not None for kept in held)
        return Totals(
            ended=dict(self._ended_by),
            prefilled=sums["read"],
            reused=sums["reused"],
            generated=sums["written"],
            prefill_seconds=sums["reading"] / 1e6,
            decode_seconds=sums["writing"] / 1e6,
            running=len(self.schedule),
            in_memory=live,
            on_disk=len(held) - live,
            nbytes=self._keeping.nbytes,
            memory_limit=self._limits.memory,
        )

    def _count(self, answer: Generation) -> None:
        usage = answer.usage
        self._ended_by[answer.ended] += 1
        # A prompt that was broken off is counted as far as it was read.
        self._sums["read"] += max(0, usage.evaluated - answer.unread)
        self._sums["reused"] += usage.reuse.tokens
        self._sums["written"] += usage.generated
        self._sums["reading"] += round(1e6 * usage.prefill_seconds)
        self._sums["writing"] += round(1e6 * usage.decode_seconds)


def _require_something(ask: GenerationRequest, held: int) -> None:
    """Before anything is begun. held: tokens of the session."""
    if not ask.prompt and not held:
        raise InvalidArgument("nothing to continue: feed a prompt before asking for tokens")

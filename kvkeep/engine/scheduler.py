"""The scheduler: what is admitted, decoded and prefilled next, and which session is evicted."""

import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kvkeep.engine.generation import Generation, Phase
from kvkeep.engine.lookups import PrefixLookups
from kvkeep.engine.record import SessionRecord, is_response_name
from kvkeep.engine.steps import DEFAULT_PREFILL_STEP
from kvkeep.errors import NoRoom
from kvkeep.session.drafts import DraftPlanner, SpeculationOptions
from kvkeep.session.speculation import Speculation, sample_runs

_log = logging.getLogger("kvkeep.engine")
_MAX_BATCH_SIZE = 64  # sessions in a forward pass: more delay each token and save nothing
_AGING_RATE = 0.5  # tokens that a waiting prompt gains for each token prefilled for another
_TOKENS_PER_PRIORITY = 2048  # tokens of a prompt that a priority higher by 1 outweighs
_TYPICAL_TOKENS = 512  # assumed length of a generation without max_tokens


@dataclass(frozen=True)
class Limits:
    """The limits within which an engine admits requests."""

    memory: int = 4_000_000_000  # bytes of all sessions' cells
    running: int = 256  # generations at a time, of all owners
    running_per_owner: int = 128
    sessions_per_owner: int = 1_000  # named sessions, other than those of responses
    snapshots_per_owner: int = 1_000  # labelled ones
    responses_per_owner: int = 1_000  # stored ones; of more the server drops the oldest
    prompt_tokens: int = 250_000  # of one prompt
    pins_per_owner: int = 64  # prefixes that requests protect from eviction
    save_idle_after: float = 2.0  # seconds from the last change to the save


class SchedulingPolicy:
    """The scheduling decisions of an engine, within its limits. Stateless."""

    def __init__(self, limits: Limits):
        self.limits = limits

    def require_slots(
        self, owner: str, count: int, running: Sequence[Generation], step_seconds: float
    ) -> None:
        """Raise NoRoom, with a time to retry, if an owner may not start `count` generations."""
        if count > (most := min(self.limits.running, self.limits.running_per_owner)):
            raise NoRoom(
                f"the request is for {count} generations, and at most {most} are allowed at a "
                "time: lower n, or send several requests",
                retry_after=float("inf"),
            )
        running_of_owner = sum(generation.record.owner == owner for generation in running)
        is_full = len(running) + count > self.limits.running
        if is_full or running_of_owner + count > self.limits.running_per_owner:
            steps_left = (_steps_left(generation) for generation in running)
            raise NoRoom(
                f"too many requests: {len(running)} generations are running, {running_of_owner} of "
                "them yours; retry later",
                retry_after=max(1.0, min(steps_left, default=0) * step_seconds),
                needed_slots=count,
                of_owner=not is_full,
            )

    def require_session_slot(self, records: Collection[SessionRecord]) -> None:
        """Raise NoRoom if an owner may not add a named session. records: the owner's sessions."""
        if len(records) < self.limits.sessions_per_owner:
            return
        count = sum(
            record.named and not record.may_be_lost and not is_response_name(record.name)
            for record in records
        )
        if count >= self.limits.sessions_per_owner:
            raise NoRoom(f"the limit of {count} sessions is reached: delete some", math.inf)

    def require_snapshot_slot(self, label: str, labels: Collection[str]) -> None:
        """Raise NoRoom if an owner may not add a snapshot. labels: of the owner's snapshots."""
        if label not in labels and len(labels) >= self.limits.snapshots_per_owner:
            raise NoRoom(f"the limit of {len(labels)} snapshots is reached: delete some", math.inf)

    def require_fits_memory(self, requested_bytes: int) -> None:
        """Raise NoRoom if the bytes would not fit even with every other session evicted."""
        if requested_bytes > self.limits.memory:
            raise NoRoom(
                f"the session could take {requested_bytes / 1e6:,.1f} MB, and the engine's memory "
                f"limit is {self.limits.memory / 1e6:,.1f} MB: use a smaller max_kv_size, or fewer "
                "tokens",
                retry_after=float("inf"),
            )

    def next_prefill(self, prefilling: Sequence[Generation]) -> Generation:
        """Return the generation whose prompt gets the next prefill step.

        The one with the fewest remaining tokens, less a bonus for waiting and for priority: a
        prompt with 1,000 tokens left counts as 700 once 600 were prefilled for others. Of equal
        prompts the older goes first.
        """

        def rank(generation: Generation) -> tuple[float, int]:
            bonus = _AGING_RATE * generation.waited_tokens
            bonus += _TOKENS_PER_PRIORITY * generation.request.priority
            return generation.prefill_remaining - bonus, generation.number

        return min(prefilling, key=rank)

    def victims(
        self,
        records: Iterable[SessionRecord],
        requester: SessionRecord | None = None,
        now: float = 0.0,
        source: SessionRecord | None = None,
    ) -> Iterator[SessionRecord]:
        """Iterate over the sessions that can be evicted for another, those to evict first first.

        The least recently used, unnamed ones before named ones. Those that are pinned at time `now`
        come last, in the order in which their pins expire. source: the session whose cells the
        other one reuses, which comes after all that are pinned, or not, as it is.
        """

        def rank(record: SessionRecord) -> tuple[float, bool, bool, float]:
            pinned_until = record.pinned_until if record.pinned_until > now else 0.0
            if record is source and pinned_until:
                pinned_until = math.inf
            return pinned_until, record is source, record.named, record.last_used

        yield from sorted((r for r in records if r is not requester and r.evictable), key=rank)


class Scheduler:
    """The running generations, each in a session of its own, and the steps that advance them.

    If one fails, the others go on. None changes a bit of another: a prompt is always prefilled in
    the same steps, and the rows of a forward pass are independent.
    """

    def __init__(
        self,
        policy: SchedulingPolicy,
        on_prefilled: Callable[[Generation], None],
        on_end: Callable[[Generation], None],
        speculation: SpeculationOptions,
        lookups: PrefixLookups,
    ):
        """on_prefilled, on_end: called with a generation that is prefilled, or that ended."""
        self._lookups = lookups
        self.step_seconds = 0.02  # moving average of a step's duration
        self._policy, self._on_prefilled, self._on_end = policy, on_prefilled, on_end
        self._speculates, self._planner = speculation.enabled, DraftPlanner(speculation.max_delay)
        self.running: list[Generation] = []  # the oldest first

    def step(self) -> None:
        """Decode tokens of each prefilled generation, then evaluate a prefill step of a prompt."""
        start = time.perf_counter()
        self.end_cancelled()
        try:
            decoding = self._in_phase("decode")
            for first in range(0, len(decoding), _MAX_BATCH_SIZE):
                self._decode(decoding[first : first + _MAX_BATCH_SIZE])
            self._remove_ended()  # an answer's end does not wait for another's prompt
            self._prefill()
        except Exception as error:  # no caller may wait forever
            for generation in self.running:
                generation.fail(error)
        self._remove_ended()
        self.step_seconds += 0.1 * (time.perf_counter() - start - self.step_seconds)

    def cancel_all(self) -> None:
        for generation in self.running:
            generation.cancel()

    def cancel(self, record: SessionRecord) -> None:
        """End a session's generation, if there is one."""
        for generation in self.running:
            if generation.record is record:
                generation.cancel()
        self.end_cancelled()

    def end_cancelled(self) -> None:
        for generation in self.running:
            if generation.cancelled and generation.phase != "done":
                generation.fail_as_cancelled()
        self._remove_ended()

    def _decode(self, generations: Sequence[Generation]) -> None:
        """Decode tokens of each, in one forward pass. One that fails does not end the others.

        One token of each, and more of those whose drafts are right.
        """
        ready, speculations = list[Generation](), list[Speculation]()
        for generation in generations:
            with _failing_alone(generation):
                if generation.check_can_decode():
                    speculations.append(generation.speculation(self._speculates))
                    ready.append(generation)
        if not ready:
            return
        limits = [generation.tokens_left for generation in ready]
        try:
            runs = sample_runs(speculations, limits, self._planner)
        except Exception as error:
            for generation, speculation in zip(ready, speculations, strict=True):
                if len(ready) == 1 or speculation.has_lost_step:
                    generation.fail(error)
                else:  # no session has changed: find the one that fails
                    generation.forget_failed_step()
                    self._decode([generation])
            return
        for generation, run in zip(ready, runs, strict=True):
            with _failing_alone(generation):
                run.require_followed()
                generation.add_run(run)

    def _prefill(self) -> None:
        """Evaluate a prefill step of one prompt, or start to look it up in the prefix cache."""
        generation = self._next_prefill()
        if generation is None:
            return
        remaining_before = generation.prefill_remaining
        try:
            self._lookups.finish(generation)
            if generation.needs_lookup:
                self._lookups.start(generation)
                return
            generation.prefill_next_step()
        except Exception as error:
            generation.fail(error)
            return
        prefilled = remaining_before - generation.prefill_remaining
        for other in self._in_phase("prefill"):
            other.waited_tokens += 0 if other is generation else prefilled
        if generation.phase == "decode":
            self._on_prefilled(generation)

    def _next_prefill(self) -> Generation | None:
        """Return the generation whose prompt is next, of those that wait for no lookup."""
        ready = self._ready_prefills()
        return self._policy.next_prefill(ready) if ready else None

    def _ready_prefills(self) -> list[Generation]:
        return [each for each in self._in_phase("prefill") if self._lookups.is_ready(each)]

    @property
    def can_step(self) -> bool:
        """Whether there is something to compute. Otherwise all wait for lookups, or none runs."""
        return bool(self._in_phase("decode")) or bool(self._ready_prefills())

    def _remove_ended(self) -> None:
        ended = self._in_phase("done")
        self.running = [generation for generation in self.running if generation.phase != "done"]
        for generation in ended:
            self._lookups.discard(generation)
            try:
                self._on_end(generation)
            except Exception:  # the others must end, too
                _log.exception(
                    "a generation in session %r was not released", generation.record.name
                )

    def _in_phase(self, phase: Phase) -> list[Generation]:
        return [generation for generation in self.running if generation.phase == phase]


@contextmanager
def _failing_alone(generation: Generation) -> Iterator[None]:
    """End a generation with the error of a block that works for it alone."""
    try:
        yield
    except Exception as error:
        generation.fail(error)


def _steps_left(generation: Generation) -> float:
    """Estimate the scheduler steps until a generation ends."""
    tokens = (generation.request.max_tokens or _TYPICAL_TOKENS) - len(generation.generated)
    return tokens + generation.prefill_remaining / DEFAULT_PREFILL_STEP

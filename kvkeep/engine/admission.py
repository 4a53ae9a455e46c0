"""Admission: each request gets a session, the reusable part of its prompt, and memory."""

import itertools
import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from kvkeep.engine.followers import Followers
from kvkeep.engine.generation import Generation
from kvkeep.engine.in_place import ALIGNED
from kvkeep.engine.lookups import PrefixLookups
from kvkeep.engine.operations import OperationLog, Totals
from kvkeep.engine.preparing import (
    PreparedSession,
    restored_if_refused,
)
from kvkeep.engine.record import SessionRecord
from kvkeep.engine.registry import SessionRegistry
from kvkeep.engine.request import GenerationRequest, Listener, RequestLike, SessionRequest
from kvkeep.engine.request_sessions import RequestSessions, with_answer
from kvkeep.engine.reuse import ReuseReport
from kvkeep.engine.scheduler import Scheduler
from kvkeep.engine.usage import LastAnswer
from kvkeep.session.aligning import AlignedFeeding
from kvkeep.session.alignment import AlignmentOptions
from kvkeep.session.drafts import SpeculationOptions
from kvkeep.session.feeding import Feeding
from kvkeep.session.sampling import Sampling
from kvkeep.session.session import Session

_log = logging.getLogger("kvkeep.engine")
_generation_log = logging.getLogger("kvkeep.engine.generations")  # a line for each, at level INFO
_MAX_MISSES = 50  # of one owner
_miss_numbers = itertools.count(1)


class Admission:
    """Starts generations, and releases their sessions at the end. Used in the engine's thread."""

    def __init__(
        self,
        registry: SessionRegistry,
        log: OperationLog,
        new_session: Callable[[str], Session],
        alignment: AlignmentOptions,
        speculation: SpeculationOptions,
        lookups: PrefixLookups,
    ):
        """new_session: creates an empty session for an owner. alignment: of requests without."""
        self._registry, self._policy = registry, registry.policy
        self._operation_log = log
        self._sessions = RequestSessions(registry, new_session, alignment, self._samplings)
        callbacks = (self._start_followers, self._end)
        self.scheduler = Scheduler(registry.policy, *callbacks, speculation, lookups)
        # Prompts that continued no session, by owner, the newest first.
        self.cache_misses = defaultdict[str, deque[ReuseReport]](lambda: deque(maxlen=_MAX_MISSES))
        self._followers = Followers(registry)
        self._totals = Totals()

    def admit(
        self,
        request: RequestLike,
        session_name: str | None,
        owner: str,
        listeners: Sequence[Listener | None],
        revision: int | None = None,
        samplings: Sequence[Sampling] = (),
    ) -> list[Generation]:
        """Start a generation for each listener; see `Engine.submit`, `Engine.submit_many`.

        samplings: of the generations; by default the request's. The first generation prefills the
        prompt; the others then fork its session.
        """
        step_seconds, in_progress = self.scheduler.step_seconds, self._in_progress
        self._policy.require_slots(owner, len(listeners), in_progress, step_seconds)
        with restored_if_refused(self._registry, session_name, owner):
            prepared = self._sessions.prepare(request, session_name, owner, revision, samplings)
            request, feeding = self._begin(request, prepared, samplings)
        record = prepared.record
        prepared.extend_pins(self._registry.pins)
        if prepared.miss is not None:
            miss = replace(prepared.miss, number=next(_miss_numbers))
            self.cache_misses[owner].appendleft(miss)
        if prepared.plan is not None:
            self._operation_log.add(record, ALIGNED, prepared.plan.evaluated)
        samplings = samplings or [request.sampling]
        first, *followers = [
            Generation(replace(request, sampling=sampling), record, listener)
            for sampling, listener in zip(samplings, listeners, strict=True)
        ]
        record.activity = "generating"
        record.last_used = time.monotonic()
        record.suggest_title(request.title)
        first.start(feeding, prepared.reuse)
        self.scheduler.running.append(first)
        self._followers.add(first, followers)
        return [first, *followers]

    def totals(self) -> Totals:
        """Return counts of the work since the start, and of present generations and sessions."""
        records = list(self._registry)
        in_memory = sum(record.session is not None for record in records)
        return replace(
            self._totals,
            ended=self._totals.ended.copy(),
            latencies=self._totals.latencies.copy(),
            waiting=sum(generation.is_waiting for generation in self._in_progress),
            running=len(self._in_progress),
            in_memory=in_memory,
            on_disk=len(records) - in_memory,
            nbytes=self._registry.nbytes,
            memory_limit=self._policy.limits.memory,
            pins=len(self._registry.pins),
            evicted_pins=self._registry.pins.evicted,
        )

    # A session for a request

    def _begin(
        self, request: RequestLike, prepared: PreparedSession, samplings: Sequence[Sampling]
    ) -> tuple[GenerationRequest, Feeding | AlignedFeeding | None]:
        """Reserve memory, and begin a request's prompt in its session; see `_feeding`.

        If this fails, a session that was created for the prompt is removed.
        """
        record = prepared.record
        try:
            if isinstance(request, SessionRequest):
                request = self._build_request(request, record)
            self._reserve(request, prepared, samplings or [request.sampling])
            prepared.require_fit(request.prompt)
            prepared.start()
            return request, _feeding(request, prepared)
        except BaseException:
            if not record.named and record.revision == 0:  # it was created for this prompt
                self._registry.remove(record)
            raise

    def _build_request(self, request: SessionRequest, record: SessionRecord) -> GenerationRequest:
        """Reserve memory, then build the request from its session."""
        self._registry.reserve(record, request.most_tokens(record))
        length_before = len(record.live.tokens)
        generation_request = request.make(record)
        record.lower_token_counts(length_before)
        self._sessions.check_prompt(generation_request, session_length=len(record.live.tokens))
        return generation_request

    def _reserve(
        self, request: GenerationRequest, prepared: PreparedSession, samplings: Sequence[Sampling]
    ) -> None:
        """Reserve memory for a request's generations. Raises NoRoom."""
        self._sessions.check_samplings(samplings)
        new_tokens = with_answer(request, _tokens_to_add(request, prepared))
        source = prepared.matched[0] if prepared.matched else None
        self._registry.reserve(prepared.record, new_tokens, len(samplings), source)

    @property
    def _in_progress(self) -> list[Generation]:
        """The running generations, and those that wait for another one to prefill their prompt."""
        return [*self.scheduler.running, *self._followers]

    def _samplings(self) -> list[Sampling]:
        return [generation.request.sampling for generation in self._in_progress]

    # Called by the scheduler

    def _start_followers(self, generation: Generation) -> None:
        """Start the generations that share the prompt, which is prefilled now."""
        for follower in self._followers.start(generation):
            self.scheduler.running.append(follower)
        self._registry.releases.notify()  # those of followers that were cancelled

    def _end(self, generation: Generation) -> None:
        """Release the session of an ended generation, and report the end."""
        self._followers.fail(generation)
        try:
            self._release_session(generation)
        finally:
            generation.report_end()
            self._registry.releases.notify()

    def _release_session(self, generation: Generation) -> None:
        """Make the session of an ended generation idle, and log the operation."""
        record, usage = generation.record, generation.usage
        # A prompt that was cancelled counts as far as it was prefilled.
        prefilled = max(0, usage.evaluated - generation.unprefilled_tokens)
        self._totals.add(usage, prefilled, generation.end_reason)
        if _generation_log.isEnabledFor(logging.INFO):
            _generation_log.info("%s: %s; %s", record.name, usage.summary(), generation.end_reason)
        if generation.generated:
            record.note_answer(generation.generated, generation.withheld_tokens)
        if (on_end := generation.request.on_end) is not None:
            length_before = len(record.live.tokens)
            prefilled_tokens = len(generation.request.prompt) - generation.unprefilled_tokens
            try:
                on_end(record.live, prefilled_tokens, len(generation.generated))
            except Exception:  # the generation is complete: an error of its caller changes nothing
                _log.exception("on_end of a generation in session %r failed", record.name)
            record.lower_token_counts(length_before)
        record.activity = "idle"
        record.reserved_bytes = 0
        if generation.generated:
            length = len(record.live.tokens)
            record.last_answer = LastAnswer(usage, generation.end_reason, length)
        if usage.prompt:
            record.last_prompt = usage.reuse.as_json(usage.prompt)
        if not record.named and record.live.cache.cells == 0:
            self._registry.remove(record)
            return
        record.mark_changed()
        self._registry.pins.keep_to_text(record)
        self._registry.pins.add(record, generation.request.pins)
        seconds = usage.prefill_seconds + usage.decode_seconds
        self._operation_log.add(record, "generate", usage.evaluated + usage.generated, seconds)


def _tokens_to_add(request: GenerationRequest, prepared: PreparedSession) -> int:
    """Return how many cells the prompt adds to those that its session has now, at most."""
    if prepared.plan is None:
        return len(request.prompt) - prepared.reuse.tokens
    return prepared.plan.evaluated if prepared.source is None else len(request.prompt)


def _feeding(
    request: GenerationRequest, prepared: PreparedSession
) -> Feeding | AlignedFeeding | None:
    """Return the evaluation of the rest of a prompt; None if nothing is left."""
    session = prepared.record.live
    if prepared.plan is not None:
        return AlignedFeeding(session.core, prepared.plan, prepared.source)
    remaining_prompt = request.prompt[prepared.reuse.tokens :]
    if not remaining_prompt:
        return None
    return session.feeding(remaining_prompt, top_logprobs=request.prompt_logprobs)

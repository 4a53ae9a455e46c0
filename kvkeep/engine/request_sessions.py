"""The choice of a session for a request: a new one, a copy, or an existing one that has room."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from kvkeep.engine.in_place import ALIGNED, InPlaceMatch, match_prompt
from kvkeep.engine.memory_bound import MemoryBound
from kvkeep.engine.preparing import CheckRoom, PreparedSession, prepare_named
from kvkeep.engine.record import SessionRecord
from kvkeep.engine.registry import SessionRegistry
from kvkeep.engine.request import GenerationRequest, RequestLike, SessionRequest
from kvkeep.engine.usage import Reuse
from kvkeep.errors import InvalidArgument, NoRoom
from kvkeep.session.alignment import AlignmentOptions
from kvkeep.session.sampling import Sampling, require_own_constraints
from kvkeep.session.session import Session


class RequestSessions:
    """Prepares the sessions of requests. Used in the engine's thread only."""

    def __init__(
        self,
        registry: SessionRegistry,
        new_session: Callable[[str], Session],
        alignment: AlignmentOptions,
        samplings_in_progress: Callable[[], Sequence[Sampling]],
    ):
        """new_session: creates an empty session for an owner. alignment: of requests without.
        samplings_in_progress: returns those of the running generations."""
        self._registry, self._policy = registry, registry.policy
        self._new_session, self._alignment = new_session, alignment
        self._samplings_in_progress = samplings_in_progress

    def prepare(
        self,
        request: RequestLike,
        session_name: str | None,
        owner: str,
        revision: int | None,
        samplings: Sequence[Sampling],
    ) -> PreparedSession:
        """Return the session of a request. Raises InvalidArgument for an unfit prompt."""
        if session_name is None:
            assert isinstance(request, GenerationRequest)
            self.check_prompt(request, session_length=0)
            return self._session_for_prompt(request, owner, samplings or [request.sampling])
        if isinstance(request, GenerationRequest) and request.whole_text:
            return self._named_session_for_prompt(request, session_name, owner, revision)
        self._check_room_on_disk(request, self._registry.find(session_name, owner), revision)
        record = self._registry.load_idle(session_name, owner, revision)
        if isinstance(request, GenerationRequest):
            self.check_prompt(request, session_length=len(record.live.tokens))
        return PreparedSession(record, Reuse())

    def check_samplings(self, samplings: Sequence[Sampling]) -> None:
        """Raise InvalidArgument for samplings with which no generation can start."""
        require_own_constraints(samplings, self._samplings_in_progress())
        for sampling in samplings:
            sampling.require_vocabulary(self._registry.disk.model.spec.vocab_size)

    def _check_room(
        self,
        request: GenerationRequest,
        samplings: Sequence[Sampling],
        bound: MemoryBound,
        added_tokens: int,
        existing: SessionRecord | None = None,
    ) -> None:
        """Raise NoRoom, before cells are copied, for a prompt for which there is no room.

        `_reserve` decides: this is the same, or less for models with checkpoints. bound: of the
        session to which the prompt adds cells. existing: the session that it replaces.
        """
        new_tokens = with_answer(request, added_tokens)
        requested_bytes = len(samplings) * bound.max_bytes(new_tokens)
        try:
            self._registry.require_room(requested_bytes, existing)
        except NoRoom:
            self.check_samplings(samplings)  # its error comes before
            raise

    def _check_room_on_disk(
        self, request: RequestLike, record: SessionRecord, revision: int | None
    ) -> None:
        """Raise NoRoom, before its file is read, if a session would have no room for a request."""
        record.require_idle()
        record.require_revision(revision)
        if isinstance(request, SessionRequest):
            if record.session is None:
                self._registry.require_room_to_load(record, request.most_tokens(record))
            return
        try:
            new_tokens = with_answer(request, len(request.prompt))
            self._registry.require_room_to_load(record, new_tokens)
        except NoRoom:  # errors that waiting does not mend come before it
            self.check_prompt(request, session_length=1)
            self.check_samplings([request.sampling])
            raise

    def _session_for_prompt(
        self, request: GenerationRequest, owner: str, samplings: Sequence[Sampling]
    ) -> PreparedSession:
        """Return an unnamed session for a prompt."""
        prompt, empty_session = request.prompt, self._new_session(owner)
        if request.prompt_logprobs is not None:  # of all tokens, so that all are evaluated
            return PreparedSession(self._registry.add(empty_session, owner, named=False), Reuse())
        options = request.alignment or self._alignment
        candidates = self._registry.owned_by(owner, request.cache_key)
        match, in_place, report = match_prompt(prompt, candidates, empty_session, options)
        source, matched = match.record, None
        if source is not None:
            tokens = source.live.tokens
            matched = source, len(tokens) if match.resumes_session else match.common_tokens
        check_room = partial(self._check_room, request, samplings)
        if in_place is not None:
            prepared = self._session_in_place(in_place, report.reuse, check_room)
            return replace(prepared, matched=matched, miss=report)
        reuse = report.reuse
        if source is not None and match.resumes_session and not source.named:
            return PreparedSession(source, reuse, resumed=match, matched=matched)
        check_room(match.bound(empty_session), len(prompt) - match.reused_tokens)
        session = match.build_session(empty_session)
        record = self._registry.add(session, owner, named=False, source=source)
        record.parent = reuse.session
        match.set_token_counts(record)
        miss = None if match.resumes_session else report
        return PreparedSession(record, reuse, matched=matched, miss=miss)

    def _named_session_for_prompt(
        self, request: GenerationRequest, name: str, owner: str, revision: int | None
    ) -> PreparedSession:
        """Return a named session for a prompt that is its whole text."""
        registry, options = self._registry, request.alignment or self._alignment
        if not request.prompt:
            raise InvalidArgument("the prompt is empty: expected the whole text of the session")
        prepared = prepare_named(
            *(registry, request.prompt, name, owner, self._new_session, options, revision),
            reuses=request.prompt_logprobs is None,
            check_room=partial(self._check_room, request, [request.sampling]),
        )
        held = prepared.reuse.tokens
        self.check_prompt(replace(request, prompt=request.prompt[held:]), session_length=held)
        return prepared

    def _session_in_place(
        self, match: InPlaceMatch, reuse: Reuse, check_room: CheckRoom
    ) -> PreparedSession:
        """Return the session of a prompt that is aligned in place: a fork, or the session itself.

        Whatever becomes of it, no exact reuse takes cells from it.
        """
        source = match.record
        if match.continues_session(target=None):
            return PreparedSession(source, reuse)
        check_room(MemoryBound.of(source.live), match.plan.evaluated)
        fork = source.live.fork()
        record = self._registry.add(fork, source.owner, named=False, source=source)
        record.parent, record.first_edit = source.name, ALIGNED
        return PreparedSession(record, reuse, match.plan)

    def check_prompt(self, request: GenerationRequest, session_length: int) -> None:
        """Raise InvalidArgument for a prompt that is too long, or empty in an empty session."""
        max_prompt = self._policy.limits.prompt_tokens
        if not request.prompt and not session_length:
            raise InvalidArgument("nothing to continue: feed a prompt first")
        if len(request.prompt) > max_prompt:
            raise InvalidArgument(
                f"a prompt can have at most {max_prompt:,} tokens; found {len(request.prompt):,}: "
                "feed a session in parts"
            )


def with_answer(request: GenerationRequest, prompt_tokens: int) -> int | None:
    """Return how many tokens prompt and answer add; None for any number."""
    return None if request.max_tokens is None else prompt_tokens + request.max_tokens

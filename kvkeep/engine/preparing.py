"""Preparing a session for a prompt: choosing the reusable cells, and loading or aligning them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from kvkeep.engine.in_place import ALIGNED, InPlaceMatch, match_prompt
from kvkeep.engine.memory_bound import MemoryBound
from kvkeep.engine.pins import PrefixPins
from kvkeep.engine.record import SessionRecord
from kvkeep.engine.registry import SessionRegistry
from kvkeep.engine.reuse import Match, ReuseReport
from kvkeep.engine.usage import Reuse
from kvkeep.session.alignment import AlignmentOptions, AlignmentPlan
from kvkeep.session.core import SessionState
from kvkeep.session.session import Session


class CheckRoom(Protocol):
    """A check whether there is room for a prompt. Raises NoRoom if not."""

    def __call__(
        self, bound: MemoryBound, added_tokens: int, existing: SessionRecord | None = None, /
    ) -> None:
        """bound: of the session to which the prompt adds cells. existing: one that it replaces."""


def _check_nothing(
    bound: MemoryBound, added_tokens: int, existing: SessionRecord | None = None, /
) -> None:
    """Accept any prompt."""


@dataclass(frozen=True)
class PreparedSession:
    """The session of a prompt, and how it comes to hold the prompt's reused tokens.

    plan: the alignment after which it holds them; None if it does already. source: the state that
    the plan aligns; None for the session's own. resumed: of a session that itself continues with
    the prompt. matched: the session whose cells are reused, and how many of its first tokens the
    prompt begins with. miss: the report of a prompt that continued no session, to be recorded.
    """

    record: SessionRecord
    reuse: Reuse
    plan: AlignmentPlan | None = None
    source: SessionState | None = None
    resumed: Match | None = None
    matched: tuple[SessionRecord, int] | None = None
    miss: ReuseReport | None = None

    def extend_pins(self, pins: PrefixPins) -> None:
        """Extend the pins of the matched session, once there is memory for the prompt."""
        if self.matched is not None:
            pins.extend(*self.matched)

    def require_fit(self, prompt: Sequence[int]) -> None:
        """Raise InvalidArgument or ContextFull for a prompt with which it cannot continue."""
        if self.resumed is not None:
            core = self.record.live.core
            rest = core.encode(prompt[self.reuse.tokens :], special=False)
            num_removed = len(core.memory.tokens) - self.reuse.tokens
            core.memory.require_room(len(rest) - num_removed)

    def start(self) -> None:
        """Change the session itself, once there is memory for the prompt.

        It ends where the prompt continues it, and a seed draws as in a new session.
        """
        if self.resumed is not None:
            if self.resumed.take_over() and self.record.named:
                self.record.mark_changed()
        elif self.reuse.mode == "in_place":
            self.record.live.reset_sampler()


def prepare_named(
    registry: SessionRegistry,
    prompt: Sequence[int],
    name: str,
    owner: str,
    new_session: Callable[[str], Session],
    options: AlignmentOptions,
    revision: int | None = None,
    reuses: bool = True,
    check_room: CheckRoom = _check_nothing,
) -> PreparedSession:
    """Make a named session hold the reusable part of a prompt, and, once started, nothing else.

    The part is from any session of the owner; with a plan, the session holds it once it is aligned,
    and its own text until then. Creates the session if it is missing. reuses: False for no part.
    check_room: called before cells are copied; raises NoRoom.
    """
    empty_session, existing = new_session(owner), registry.get(name, owner)
    if existing or revision is not None:
        existing = registry.load_idle(name, owner, revision)
    # A missing session is matched as an empty one, which is not in the registry.
    target = existing or SessionRecord("", owner, named=False, file=None, session=empty_session)
    candidates = registry.owned_by(owner) if reuses else []
    match, in_place, report = match_prompt(prompt, candidates, empty_session, options, target)
    matched = None
    if match.record is not None and match.record is not target:
        matched = match.record, match.common_tokens
    if in_place is not None:
        source = in_place.record.live.core.state  # `add` may evict it from the registry
        if existing is None:
            check_room(MemoryBound.of(empty_session), len(prompt))
        record = existing or registry.add(empty_session, owner, name)
        prepared = _prepare_in_place(record, in_place, source, report)
        return replace(prepared, matched=matched)
    resumes = match.resumes_session and match.record is target
    if resumes:
        return PreparedSession(target, report.reuse, resumed=match)
    check_room(match.bound(empty_session), len(prompt) - match.reused_tokens, existing)
    record = _prepare_exact(registry, match, existing, empty_session, (owner, name))
    return PreparedSession(record, report.reuse, matched=matched)


def _prepare_exact(
    registry: SessionRegistry,
    match: Match,
    existing: SessionRecord | None,
    empty_session: Session,
    name: tuple[str, str],
) -> SessionRecord:
    """Return the session with the reused tokens. name: the owner and the name of a new one."""
    session = match.build_session(empty_session)
    record = existing or registry.add(session, *name, source=match.record)
    if existing:
        record.replace_session(session)
    match.set_token_counts(record)
    return record


def _prepare_in_place(
    record: SessionRecord, match: InPlaceMatch, source: SessionState, report: ReuseReport
) -> PreparedSession:
    """Return the named session to align. From here on no exact reuse takes cells from it.

    source: the state of the matched session.
    """
    if match.continues_session(record):
        return PreparedSession(record, report.reuse, miss=report)
    if match.record is not record:
        record.parent = match.record.name
    record.forget_text()
    record.first_edit = ALIGNED
    return PreparedSession(record, report.reuse, match.plan, source, miss=report)


@contextmanager
def restored_if_refused(registry: SessionRegistry, name: str | None, owner: str) -> Iterator[None]:
    """Leave a session as it was if the block raises, and remove one that the block created.

    The block may load the session, replace it, and change its record. Changes of its cells stay, in
    another revision, unless it was empty or on disk. name: None for a request without a session.
    """
    record = None if name is None else registry.get(name, owner)
    session, fields = (record.session, dict(vars(record))) if record else (None, {})
    state, length = (session.core.state, len(session.tokens)) if session else (None, 0)
    try:
        yield
    except BaseException:
        created = None if name is None else registry.get(name, owner)
        if record is None:
            if created is not None:
                registry.remove(created)
        elif session is None or state is None:
            vars(record).update(fields)
        elif not length or len(session.tokens) == length:
            vars(record).update(fields)
            if not length:
                session.core.state = state
        elif record.revision == fields["revision"]:
            record.mark_changed()
        raise

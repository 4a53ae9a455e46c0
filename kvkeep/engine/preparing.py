"""Sessions for whole prompts: which session takes a prompt, and which of its tokens it holds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvkeep.engine.in_place import ALIGNED, InPlaceMatch, match_prompt
from kvkeep.engine.record import SessionRecord
from kvkeep.engine.registry import SessionRegistry
from kvkeep.engine.reuse import Match, ReuseReport
from kvkeep.engine.usage import Reuse
from kvkeep.session.alignment import AlignmentOptions, AlignmentPlan
from kvkeep.session.core import SessionState
from kvkeep.session.session import Session


@dataclass(frozen=True)
class PreparedSession:
    """The session of a prompt, and how it comes to hold the prompt's reused tokens.

    plan: the alignment after which it holds them; None if it does already. source: the state that
    the plan aligns; None for the session's own. report: of a prompt that continues no session.
    """

    record: SessionRecord
    reuse: Reuse
    plan: AlignmentPlan | None = None
    source: SessionState | None = None
    report: ReuseReport | None = None


def prepare_named(
    registry: SessionRegistry,
    prompt: Sequence[int],
    name: str,
    owner: str,
    new_session: Callable[[str], Session],
    options: AlignmentOptions,
    revision: int | None = None,
) -> PreparedSession:
    """Make a named session hold the reusable part of a prompt, and nothing else.

    The part is from any session of the owner; with a plan, the session holds it once it is aligned,
    and its own text until then. Creates the session if it is missing.
    """
    empty_session, existing = new_session(owner), registry.get(name, owner)
    if existing or revision is not None:
        existing = registry.load_idle(name, owner, revision)
    # A missing session is matched as an empty one, which is not in the registry.
    target = existing or SessionRecord("", owner, named=False, file=None, session=empty_session)
    candidates = registry.owned_by(owner)
    match, in_place, report = match_prompt(prompt, candidates, empty_session, options, target)
    if match.record is not None and match.record is not target:
        registry.pins.extend(match.record, match.common_tokens)
    if in_place is not None:
        return _prepare_in_place(
            existing or registry.add(empty_session, owner, name), in_place, report
        )
    resumes = match.resumes_session and match.record is target
    if resumes:
        if match.take_over():
            target.mark_changed()
        return PreparedSession(target, report.reuse)
    record = _prepare_exact(registry, match, existing, empty_session, (owner, name))
    return PreparedSession(record, report.reuse, report=report)


def _prepare_exact(
    registry: SessionRegistry,
    match: Match,
    existing: SessionRecord | None,
    empty_session: Session,
    name: tuple[str, str],
) -> SessionRecord:
    """Return the session with the reused tokens. name: the owner and the name of a new one."""
    session = match.build_session(empty_session)
    record = existing or registry.add(session, *name)
    if existing:
        record.session, record.first_edit = session, ""
        record.mark_changed()
    match.set_token_counts(record)
    return record


def _prepare_in_place(
    record: SessionRecord, match: InPlaceMatch, report: ReuseReport
) -> PreparedSession:
    """Return the named session to align. From here on no exact reuse takes cells from it."""
    record.live.draw_anew()
    if match.continues_session(record):
        return PreparedSession(record, report.reuse, report=report)
    if match.record is not record:
        record.parent = match.record.name
    record.first_edit = ALIGNED
    record.step_aligned_tokens = record.sampled_length = record.droppable_tokens = 0
    source = match.record.live.core.state
    return PreparedSession(record, report.reuse, match.plan, source, report)

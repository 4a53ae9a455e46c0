"""Whether what a server shows of a session can follow from its record.

After a kill a session may be at any state since the last acknowledged save, never before it. After
any other fault it must be at its newest state. A change whose response was lost is made or not.
"""

from dataclasses import replace
from typing import Literal

from benchmarks.soak_faults.effects import is_effect
from benchmarks.soak_faults.records import Change, Found, SessionPoint, UserSession

Verdict = Literal["made", "newest", "went back", "lost", "wrong"]


def judge(
    held: UserSession,
    found: Found | None,
    generation: int,
    answered: Change | None = None,
    revision: int | None = None,
) -> Verdict:
    """Return how a session came to what was found, and update its record.

    answered: a change that the server has acknowledged, with the revision after it, as of now.
    Without one, the session may be at its newest point, or changed by an unanswered change.
    """
    was_killed = generation > held.generation
    if found is not None and _make(held, found, generation, answered, revision):
        return "made"
    if found is not None and answered is None and _is_newest(held, found, was_killed):
        held.points[-1] = replace(held.points[-1], revision=found.revision)
        held.generation = generation
        if was_killed:
            held.unanswered = []
        return "newest"
    if not was_killed:
        return "wrong"
    held.generation, held.unanswered = generation, []
    return _go_back(held, found)


def judge_new(
    new: UserSession, point: SessionPoint, found: Found | None, generation: int, is_made: bool
) -> Verdict:
    """Return whether a new session was made, and give it its first point.

    new: with the generation before it was made, and the points of its parent, if it has one.
    is_made: whether the server has acknowledged all of it. A session that was to be fed may be
    empty otherwise, or after a kill.
    """
    if found is None or (not found.content.tokens and not new.origin):
        return "lost" if not is_made or generation > new.generation else "wrong"
    if (found.content, found.revision) != (point.content, point.revision):
        return "wrong"
    new.points.append(point)
    new.generation = generation
    return "made"


def _make(
    held: UserSession,
    found: Found,
    generation: int,
    answered: Change | None,
    revision: int | None,
) -> bool:
    """Add a point to the session if one change, made to the newest point, explains it."""
    newest, changes = held.points[-1], held.unanswered if answered is None else [answered]
    # Each failed change may have raised the revision before the one that was made.
    if not 1 <= found.revision - newest.revision <= len(changes):
        return False
    if answered is not None and found.revision != revision:
        return False
    for change in changes:
        if is_effect(change, newest.content, found.content):
            held.points.append(SessionPoint(found.content, found.revision, change))
            held.generation, held.unanswered = generation, []
            return True
    return False


def _is_newest(held: UserSession, found: Found, was_killed: bool) -> bool:
    """Whether a session is at its newest point.

    A change that failed and was rolled back may have raised the revision, and a kill undone that.
    """
    newest, last = held.points[-1], len(held.points) - 1
    least = _least_revision(held, last) if was_killed else newest.revision
    is_possible = least <= found.revision <= newest.revision + len(held.unanswered)
    return found.content == newest.content and is_possible


def _least_revision(held: UserSession, index: int) -> int:
    """Return the least revision that a session may have at one of its own points after a kill."""
    if index == held.origin:
        return held.saved_revision
    return max(held.saved_revision, held.points[index - 1].revision + 1)


def _go_back(held: UserSession, found: Found | None) -> Verdict:
    """Accept the state after a kill, if it is none from before the last save.

    A session that was never saved may be gone, or empty as it was created; a copy is never empty.
    """
    if found is None or not found.content.tokens:
        may_be_lost = held.saved < 0 and (found is None or not held.origin)
        return "lost" if may_be_lost else "wrong"
    for index in range(len(held.points) - 1, max(held.saved, held.origin) - 1, -1):
        point, least = held.points[index], _least_revision(held, index)
        if point.content == found.content and least <= found.revision <= point.revision:
            del held.points[index + 1 :]
            held.points[index] = replace(point, revision=found.revision)
            held.saved, held.saved_revision = index, found.revision
            held.events.append(f"a kill led back to point {index}")
            return "went back"
    return "wrong"

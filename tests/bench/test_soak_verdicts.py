"""Verdicts on sessions after faults: which states are accepted, and which are violations."""

from dataclasses import replace

import pytest

from benchmarks.soak_faults.effects import first_content
from benchmarks.soak_faults.records import (
    Change,
    Content,
    Found,
    Record,
    SessionPoint,
    UserSession,
)
from benchmarks.soak_faults.verdicts import judge, judge_new

FIRST = tuple(range(100, 150))
EMPTY = Content((), (), 0)


def fed(*counts: int) -> Content:
    """Return a session's content after it was fed these numbers of tokens."""
    return first_content((*FIRST, *(n for count in counts for n in range(count))), "full")


def feed(before: Content, count: int) -> Change:
    end = len(before.tokens)
    return Change("feed", end, end, tuple(range(count)))


POINTS = [
    SessionPoint(fed(), 1, Change("feed")),
    SessionPoint(fed(2), 2, feed(fed(), 2)),
    SessionPoint(fed(2, 3), 3, feed(fed(2), 3)),
]
NEXT = feed(fed(2, 3), 4)


@pytest.fixture
def held() -> UserSession:
    """A session of three points, seen in generation 0. Its second one is saved."""
    return UserSession("s", "word", "full", [*POINTS], 0, saved=1, saved_revision=2)


def found(content: Content, revision: int) -> Found:
    return Found(content, "", revision)


def test_an_acknowledged_change_is_made_with_the_revision_of_its_response(
    held: UserSession,
) -> None:
    for content, seen, answered in [
        (fed(2, 3, 4), 5, 4),  # something else was changed, too
        (fed(2, 3, 4), 5, 5),  # it was made twice, as a pin or a compression may be
        (fed(2, 3, 4, 4), 4, 4),
        (fed(2, 3), 3, 4),  # it was not made
        (fed(2, 3), 4, 4),
    ]:
        assert judge(held, found(content, seen), 0, NEXT, answered) == "wrong"
    assert judge(held, None, 0, NEXT, 4) == "wrong"
    assert judge(held, found(fed(2, 3, 4), 4), 0, NEXT, 4) == "made"
    assert held.points[-1] == SessionPoint(fed(2, 3, 4), 4, NEXT)


def test_a_change_without_a_response_is_made_once_or_not_at_all(held: UserSession) -> None:
    held.unanswered = [NEXT]
    assert judge(held, found(fed(2, 3, 4, 4), 5), 0) == "wrong"
    assert judge(held, found(fed(2, 3, 4), 5), 0) == "wrong"  # two changes with one request
    assert judge(held, found(fed(2, 3), 5), 0) == "wrong"
    assert judge(held, found(fed(2, 3), 4), 0) == "newest"  # it was rolled back
    assert judge(held, found(fed(2, 3, 4), 5), 0) == "made"
    assert judge(held, found(fed(2, 3, 4, 4), 6), 0) == "wrong"  # made again, later
    assert held.unanswered == []


def test_a_refused_change_is_not_made(held: UserSession) -> None:
    assert judge(held, found(fed(2, 3, 4), 4), 0) == "wrong"
    assert judge(held, found(fed(2, 3), 4), 0) == "wrong"
    assert judge(held, found(fed(2), 2), 0) == "wrong"  # as a stale copy in a fleet
    assert judge(held, found(replace(fed(2, 3), cells=54), 3), 0) == "wrong"  # evicted
    assert judge(held, found(fed(2, 3), 3), 0) == "newest"


@pytest.mark.parametrize(("content", "revision"), [(fed(), 1), (fed(2), 1), (EMPTY, 0)])
def test_a_kill_undoes_no_save(held: UserSession, content: Content, revision: int) -> None:
    assert judge(held, found(content, revision), 1) == "wrong"


def test_a_kill_leads_to_a_state_since_the_save(held: UserSession) -> None:
    assert judge(replace(held, points=[*POINTS]), None, 1) == "wrong"
    assert judge(replace(held, points=[*POINTS]), found(fed(3), 2), 1) == "wrong"
    assert judge(replace(held, points=[*POINTS]), found(fed(2, 3), 3), 1) == "newest"
    assert judge(held, found(fed(2), 2), 1) == "went back"
    assert (held.points, held.saved, held.saved_revision) == (POINTS[:2], 1, 2)
    assert judge(held, found(fed(), 1), 2) == "wrong"  # what a kill left was on disk


def test_a_saved_state_is_told_from_an_earlier_one_with_the_same_tokens(held: UserSession) -> None:
    """Its cells are others: they were computed after tokens that are no longer there."""
    held.points.append(SessionPoint(fed(), 4, Change("rewind", 50, 55)))
    held.saved, held.saved_revision = 3, 4
    assert judge(replace(held, points=[*held.points]), found(fed(), 1), 1) == "wrong"
    held.saved, held.saved_revision = -1, -1
    assert judge(held, found(fed(), 1), 1) == "went back"
    assert held.points == POINTS[:1]


def test_after_a_kill_no_earlier_change_is_made(held: UserSession) -> None:
    held.unanswered = [NEXT]
    assert judge(held, found(fed(2, 3), 3), 1) == "newest"
    assert judge(held, found(fed(2, 3, 4), 4), 1) == "wrong"


def test_a_copy_is_never_at_a_state_from_before_it(held: UserSession) -> None:
    copy = replace(held, points=[*POINTS], origin=3, saved=-1, saved_revision=-1)
    assert judge_new(copy, SessionPoint(fed(2, 3), 0, Change("fork")), None, 0, True) == "wrong"
    for content, revision in [(fed(2), 0), (fed(2, 3), 1), (EMPTY, 0)]:
        point = SessionPoint(fed(2, 3), 0, Change("fork"))
        assert judge_new(copy, point, found(content, revision), 0, True) == "wrong"
    assert judge_new(copy, point, found(fed(2, 3), 0), 0, True) == "made"
    assert judge(replace(copy, points=[*copy.points]), found(fed(2), 2), 1) == "wrong"
    assert judge(replace(copy, points=[*copy.points]), found(EMPTY, 0), 1) == "wrong"
    assert judge(replace(copy, points=[*copy.points]), None, 1) == "lost"
    assert judge(copy, None, 0) == "wrong"


@pytest.mark.parametrize("missing", [None, found(EMPTY, 0)])
def test_a_new_session_is_there_once_it_is_acknowledged(missing: Found | None) -> None:
    new, point = UserSession("s", "word", "full", [], 0), POINTS[0]
    assert judge_new(new, point, missing, 0, is_made=True) == "wrong"
    assert judge_new(new, point, missing, 0, is_made=False) == "lost"
    assert judge_new(new, point, missing, 1, is_made=True) == "lost"
    for content in (first_content(FIRST * 2, "full"), first_content(FIRST[:9], "full")):
        assert judge_new(new, point, found(content, 1), 0, is_made=False) == "wrong"
    assert judge_new(new, point, found(fed(), 2), 0, is_made=True) == "wrong"
    assert judge_new(new, point, found(fed(), 1), 0, is_made=False) == "made"
    assert new.points == [point]


def test_a_session_that_was_not_saved_may_be_lost_by_a_kill_alone(held: UserSession) -> None:
    held.saved = held.saved_revision = -1
    assert judge(replace(held), found(EMPTY, 0), 1) == "lost"
    assert judge(replace(held), None, 1) == "lost"
    assert judge(held, None, 0) == "wrong"


def test_answers_and_words_of_others_are_told_apart() -> None:
    record = Record(1, words={"mine": "key", "theirs": "key"})
    assert record.strangers("mine and theirs", "mine") == ["theirs"]
    assert record.strangers("an answer with mine") == ["mine"]
    assert record.first_answer("Why?", ("So", "length", 8)) == ("So", "length", 8)
    assert record.first_answer("Why?", ("So", "length", 9)) == ("So", "length", 8)

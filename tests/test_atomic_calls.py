"""A call that fails or is interrupted, at whatever line: the session is as before, or as after."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import pytest
from interrupts import BrokenOff, broken_off_at, interrupted_from, lines_of
from session_state import Whole, differences, going_on, same, whole_state
from small_models import local_spec, small_model, state_specs

from kvkeep import Sampling, Session, SessionGroup
from kvkeep.model import Model

MODEL = small_model(max_positions=64)
OTHER_MODELS = {
    "local": small_model(spec=replace(local_spec(), max_positions=64)),
    "delta_net": small_model(spec=replace(state_specs()["delta_net"], max_positions=64)),
}
WARM = Sampling(temperature=1.0, seed=3)
Breaking = Callable[[int, Callable[[], object]], bool]
TEXT = [1 + i * 7 % 250 for i in range(60)]


@dataclass(frozen=True)
class Case:
    """A session of a kind, and what is done to it.

    settings: of the session. call: what is done. steps: whether it is whole after each step of a
    prompt, too.
    """

    settings: dict[str, object]
    call: Callable[[Session], object]
    prompt: int = 30
    pinned: tuple[int, int] | None = (20, 23)
    steps: bool = False

    def session(self, model: Model) -> Session:
        """The same session each time: read a prompt, a span named, some pinned, some sampled."""
        session = model.session(**self.settings)  # type: ignore[arg-type]
        if not self.prompt:
            return session
        session.feed(TEXT[: self.prompt - 8])
        with session.span("draft"):
            session.feed(TEXT[self.prompt - 8 : self.prompt - 2])
        if self.pinned:
            session.pin(*self.pinned)
        for _ in range(2):
            session.next_token(WARM)
        return session


RING = {"max_kv_size": 16, "keep": 2, "prefill_step": 6}
SHIFT = {"max_kv_size": 16, "keep": 2, "policy": "shift", "discard": 4, "prefill_step": 6}
FAR = {"policy": "self_extend", "group": 4, "window": 8, "prefill_step": 5}
FULL = {"policy": "full", "prefill_step": 6}
ARCHIVE = {
    "max_kv_size": 24, "keep": 2, "policy": "archive", "window": 8, "prefill_step": 6,
    "method": "snapkv",
}  # fmt: skip
HEADS = ARCHIVE | {"method": "keydiff", "budget": "heads"}
EIGHT = RING | {"kv_bits": "8"}
WHOLE = {"max_kv_size": 40, "keep": -1, "prefill_step": 6}


def fed(session: Session) -> object:
    return session.feed(TEXT[30:46])


def keep(session: Session) -> None:
    session.keep = 5


def discard(session: Session) -> None:
    session.discard = 2


def spanned(session: Session) -> None:
    with session.span("turn"):
        session.feed(TEXT[:3])


CASES = {
    "feed": Case(RING, fed, steps=True),
    "feed 8 bits": Case(EIGHT, fed, steps=True),
    "feed shift": Case(SHIFT, fed, steps=True),
    "feed self_extend": Case(FAR, fed, pinned=None, steps=True),
    "feed archive": Case(ARCHIVE, fed, pinned=None, steps=True),
    "feed first": Case(RING, fed, prompt=0, steps=True),
    "feed kept whole": Case(WHOLE, fed, prompt=0, steps=True),
    "score": Case(RING, lambda session: session.score(TEXT[30:35])),
    "next_token": Case(RING, lambda session: session.next_token(WARM)),
    "next_token archive": Case(
        ARCHIVE, lambda session: session.next_token(WARM), prompt=33, pinned=None
    ),
    "rewind": Case(RING, lambda session: session.rewind(3)),
    "rewind full": Case(FULL, lambda session: session.rewind(9), pinned=None),
    "rewind archive": Case(ARCHIVE, lambda session: session.rewind(3), pinned=None),
    "pin": Case(RING, lambda session: session.pin(26, 28)),
    "pin archive": Case(ARCHIVE, lambda session: session.pin("draft"), pinned=None),
    "unpin": Case(RING, lambda session: session.unpin(20, 23)),
    "keep": Case(RING, keep),
    "discard": Case(SHIFT, discard),
    "name": Case(RING, lambda session: session.name("turn", 25, 27)),
    "delete": Case(RING, lambda session: session.delete("draft")),
    "delete suffix": Case(
        FULL, lambda session: session.delete("draft", recompute="suffix"), pinned=None
    ),
    "insert": Case(RING, lambda session: session.insert(25, TEXT[:2])),
    "replace": Case(RING, lambda session: session.replace("draft", None, TEXT[:4])),
    "make_room": Case(FULL, lambda session: session.make_room(12), pinned=None),
    "compress": Case(FULL, lambda session: session.compress(2, recent=4), pinned=None),
    "compress by heads": Case(
        FULL,
        lambda session: session.compress(2, "keydiff", recent=4, budget="heads"),
        pinned=None,
    ),
    "feed archive by heads": Case(HEADS, fed, pinned=None, steps=True),
    "compress by queries": Case(
        FULL, lambda session: session.compress(2, "snapkv", recent=4), pinned=None
    ),
}  # fmt: skip


def milestones(case: Case, model: Model) -> list[tuple[Whole, Whole]]:
    """What the session may be once the call was broken off, and what becomes of it then."""
    before, after = case.session(model), case.session(model)
    case.call(after)
    found = [before, after]
    while case.steps:
        session, steps = case.session(model), len(found) - 1
        if not _stopped_after(steps, session):
            break
        found.append(session)
    return [(whole_state(session), going_on(session)) for session in found]


def _stopped_after(steps: int, session: Session) -> bool:
    """Breaks a feed off after so many steps; whether it was as long as that."""
    done = [0]

    def stop(count: int) -> None:
        done[0] += 1
        if done[0] == steps:
            raise BrokenOff

    try:
        session.feed(TEXT[30:46], progress=stop)
    except BrokenOff:
        return True
    return False


def reference(case: Case, model: Model) -> tuple[list[tuple[Whole, Whole]], int]:
    """Return the milestones of a call and the number of its lines."""
    session = case.session(model)
    return milestones(case, model), lines_of(lambda: case.call(session))


@cache
def reference_of(name: str, kind: str = "") -> tuple[list[tuple[Whole, Whole]], int]:
    """Return `reference` of a case by its name, once for all ways of breaking it off."""
    return reference(CASES[name], OTHER_MODELS[kind] if kind else MODEL)


def check(
    case: Case,
    model: Model,
    points: int,
    breaking: Breaking,
    expected_states: tuple[list[tuple[Whole, Whole]], int],
) -> None:
    """Breaks the call off at lines that lie evenly over it."""
    allowed, lines = expected_states
    stride, hits = max(1, lines // points), 0
    for number, index in enumerate(range(0, lines, stride)):
        session = case.session(model)
        hits += breaking(index, lambda session=session: case.call(session))
        now = whole_state(session)
        expected = next((later for state, later in allowed if same(state, now)), None)
        assert expected is not None, (index, list(differences(allowed[0][0], now)))
        if number % 4 == 0:
            assert list(differences(going_on(session), expected)) == []
    assert hits


@pytest.mark.parametrize("breaking", [broken_off_at, interrupted_from])
@pytest.mark.parametrize("name", CASES)
def test_an_interrupted_call_is_all_or_nothing(name: str, breaking: Breaking) -> None:
    check(CASES[name], MODEL, 5, breaking, reference_of(name))


@pytest.mark.parametrize("breaking", [broken_off_at, interrupted_from])
@pytest.mark.parametrize("kind", ["local", "delta_net"])
@pytest.mark.parametrize("name", ["feed", "next_token", "rewind full", "delete suffix"])
def test_an_interrupted_call_is_all_or_nothing_with_checkpoints(
    name: str, kind: str, breaking: Breaking
) -> None:
    """Check models whose tokens overwrite windows and states."""
    check(CASES[name], OTHER_MODELS[kind], 5, breaking, reference_of(name, kind))


@pytest.mark.parametrize("name", ["feed", "next_token", "rewind", "pin", "delete"])
def test_an_interrupted_call_is_all_or_nothing_in_compiled_code(name: str, smollm2: Model) -> None:
    settings = RING | {"prefill_step": 32}
    case = replace(CASES[name], settings=settings, steps=False)
    check(case, smollm2, 3, broken_off_at, reference(case, smollm2))


def test_an_interrupted_span_names_all_of_its_tokens_or_none() -> None:
    total = lines_of(lambda: spanned(CASES["feed"].session(MODEL)))
    for index in range(0, total, total // 12):
        session = CASES["feed"].session(MODEL)
        interrupted_from(index, lambda session=session: spanned(session))
        span = session.spans.get("turn")
        assert span is None or (span.start, span.end) == (30, len(session.tokens)) == (30, 33)


@pytest.mark.parametrize("breaking", [broken_off_at, interrupted_from])
def test_an_interrupted_group_step_advances_all_sessions_or_none(breaking: Breaking) -> None:
    def sessions() -> list[Session]:
        """Of several kinds; the last one shares its parent's cells."""
        found = [CASES[name].session(MODEL) for name in ("feed", "feed archive", "rewind full")]
        return [*found, found[0].fork()]

    def write(group: list[Session]) -> list[int]:
        return SessionGroup(group).next_tokens(WARM)

    def states(group: list[Session]) -> list[Whole]:
        return [whole_state(session) for session in group]

    before, after = sessions(), sessions()
    lines = lines_of(lambda: write(after))
    allowed = states(before), states(after)
    for index in range(0, lines, lines // 6):
        group = sessions()
        breaking(index, lambda group=group: write(group))
        found = states(group)
        assert any(not any(differences(found, each)) for each in allowed), index


def test_no_earlier_session_state_stays_referenced() -> None:
    session = CASES["feed"].session(MODEL)
    gone = [weakref.ref(segment.block) for segment in session.cache.segments]
    session.feed(TEXT[:40])
    session.rewind(2)
    session.next_token()
    assert [segment.protected for segment in session.cache.segments] == [None] * len(
        session.cache.segments
    )
    held = {id(segment.block) for segment in session.cache.segments}
    assert all(block() is None or id(block()) in held for block in gone)

"""Edits whose neighbours are forgotten: only what is taken out must be held."""

import random

import pytest
from dense_reference import DenseMemory, Refused
from edit_actions import MODEL
from session_state import same, whole_state
from test_edits import distances, held
from topics import topic_ids

from kvkeep.errors import ContextFull, InvalidArgument
from kvkeep.model import Model
from kvkeep.session.session import Session

BUDGET = 64


def words(count: int, seed: int, upto: int = 255) -> list[int]:
    drawn = random.Random(seed)
    return [drawn.randint(1, upto) for _ in range(count)]


def agent(session: Session, dense: DenseMemory, talk: list[int], tool: list[int]) -> None:
    """A kept prompt of 4 tokens, some talk, and a pinned tool result."""
    for each in (session, dense):
        each.feed(talk)
    with session.span("tool"):
        session.feed(tool)
    dense.feed(tool)
    session.pin("tool")
    dense.pin(len(talk), len(talk) + len(tool))


def step(session: Session, dense: DenseMemory, tool: list[int], talk: list[int]) -> None:
    """One step of an agent: another tool result in the place of the last one, and some talk."""
    span = session.spans["tool"]
    session.replace("tool", None, tool)
    dense.edit(span.start, span.end, tool, False)
    for each in (session, dense):
        each.feed(talk)


@pytest.mark.parametrize(("policy", "steps"), [("sliding", 200), ("shift", 60)])
def test_an_agent_can_replace_its_pinned_tool_result_for_ever(policy: str, steps: int) -> None:
    session = MODEL.session(BUDGET, 4, policy)
    dense = DenseMemory(MODEL.decoder, BUDGET, 4, 1 if policy == "sliding" else 0)
    agent(session, dense, words(10, 300), words(6, 0))
    for turn in range(steps):
        step(session, dense, words(4 + turn % 5, turn), words(2, -turn))
        assert session.spans["tool"].remembered == 4 + turn % 5
        assert session.cache.cells == len(dense.held) <= BUDGET
        assert distances(session) == list(range(session.cache.cells - 1, -1, -1))
        assert (session.logits - dense.logits()).abs().max() <= 1e-3
    assert len(session.tokens) > 2 * BUDGET


@pytest.mark.extended
def test_an_agent_on_the_default_model_sees_what_the_naive_memory_does(
    smollm2: Model, smollm2_fp32: Model
) -> None:
    """The compiled path in bfloat16 against float32; without an edit it is up to 0.14 away."""
    ids = topic_ids(smollm2)
    session, dense = smollm2.session(24, 4), DenseMemory(smollm2_fp32.decoder, 24, 4)
    agent(session, dense, ids[:4], ids[10:16])
    for each in (session, dense):
        each.feed(ids[40:52])
    for turn in range(4):
        step(session, dense, ids[60 + 8 * turn :][: 5 + turn % 3], ids[100 + 4 * turn :][:4])
        assert [session.tokens[i] for i in held(session)] == [t.id for t in dense.held]
        difference = (session.logits - dense.logits()).abs()
        assert difference.mean() <= 0.25
        assert difference.max() <= 1.0


PINNED = range(20, 26)
TEXT = words(60, 7)


def pinned(more: int = 60) -> tuple[Session, DenseMemory]:
    """24 cells: the first 4, kept, tokens 20 to 25, pinned, and the newest."""
    session, dense = MODEL.session(24, 4), DenseMemory(MODEL.decoder, 24, 4)
    for each in (session, dense):
        each.feed(TEXT[:30])
        each.pin(PINNED.start, PINNED.stop)
        each.feed(words(more, 8))
    assert {3, 20, 25} < set(held(session))
    assert not {4, 19, 26} & set(held(session))
    return session, dense


EDITS = {
    "a pinned stretch": (20, 26, 6),
    "a pinned stretch by a shorter one": (20, 26, 2),
    "a pinned stretch by a longer one": (20, 26, 11),
    "the end of a pinned stretch": (24, 26, 3),
    "the start of a pinned stretch": (20, 22, 3),
    "a pinned stretch taken out": (20, 26, 0),
    "a pinned token taken out": (25, 26, 0),
    "the kept tokens": (0, 4, 4),
    "the kept tokens by more": (0, 4, 9),
    "the last kept token": (3, 4, 0),
    "all kept tokens taken out": (0, 4, 0),
    "among kept ones": (2, 2, 3),
    "before all": (0, 0, 2),
}


@pytest.mark.parametrize(("start", "end", "count"), EDITS.values(), ids=EDITS)
def test_what_is_held_can_be_edited_whatever_became_of_its_neighbours(start, end, count) -> None:
    session, dense = pinned()
    new = words(count, 9)
    session.replace(start, end, new) if end > start else session.insert(start, new)
    dense.edit(start, end, new, False)
    for more in (0, 1, 30):
        for each in (session, dense):
            each.feed(words(more, more)) if more else None
        assert held(session) == [i for i, t in enumerate(dense.tokens) if t.held]
        assert session.keep == dense.keep
        assert distances(session) == list(range(session.cache.cells - 1, -1, -1))
        assert (session.logits - dense.logits()).abs().max() <= 1e-3


@pytest.mark.parametrize("at", [4, 20, 26], ids=["after kept", "before pinned", "after pinned"])
def test_beside_a_held_token_text_can_be_put_in_where_there_is_room(at: int) -> None:
    session, dense = pinned()
    before = whole_state(session)
    with pytest.raises(ContextFull):  # it would be the oldest of the window, and go at once
        session.insert(at, [5, 6])
    with pytest.raises(Refused):
        dense.copy().edit(at, at, [5, 6], False)
    assert same(whole_state(session), before)
    for each in (session, dense):
        each.rewind(4)
    session.insert(at, [5, 6])
    dense.edit(at, at, [5, 6], False)
    assert (session.logits - dense.logits()).abs().max() <= 1e-3
    assert {at, at + 1} < set(held(session))
    assert distances(session) == list(range(session.cache.cells - 1, -1, -1))


@pytest.mark.parametrize(("start", "end"), [(19, 22), (24, 27), (3, 5), (10, 10), (19, 27)])
def test_what_touches_a_forgotten_token_is_refused(start: int, end: int) -> None:
    session, _ = pinned()
    session.rewind(4)
    before = whole_state(session)
    with pytest.raises(InvalidArgument, match="not all in the cache"):
        session.replace(start, end, [5]) if end > start else session.insert(start, [5])
    assert same(whole_state(session), before)

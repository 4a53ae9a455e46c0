"""Pins, names and kept tokens after an alignment: the same in place and exactly."""

import random
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from session_state import same, whole_state
from small_models import local_spec, small_model

from kvkeep.errors import InvalidArgument
from kvkeep.session.alignment import changed_ranges
from kvkeep.session.session import Session
from kvkeep.types import AlignmentMode
from tests.examples import examples

MODEL = small_model()
MODELS = {"plain": MODEL, "local": small_model(spec=local_spec(8))}
MODES: tuple[AlignmentMode, ...] = ("in_place", "exact")
TEXT = random.Random(1).choices(range(1, 250), k=150)
LONG_TEXT = random.Random(0).choices(range(1, 250), k=400)


def pinned(session: Session) -> list[int]:
    """The tokens that are pinned, or kept as some of the first: never evicted."""
    statuses, pins = session.token_status, session.core.memory.pins
    serials = session.core.memory.serials
    indices = [index for index, serial in enumerate(serials) if serial in pins]
    assert {statuses[index] for index in indices} <= {"pinned", "kept", "window"}
    assert {i for i, status in enumerate(statuses) if status == "pinned"} <= {*indices}
    return indices


def aligned_copies(session: Session, text: list[int], **options: Any) -> list[Session]:
    """Copies of a session, aligned with a text in place, and exactly."""
    copies = [session.fork() for _ in MODES]
    for copy, mode in zip(copies, MODES, strict=True):
        assert copy.align(text, mode=mode, min_saved=0, **options).mode == mode
        assert copy.tokens == text
    return copies


@pytest.mark.parametrize("options", [{"mode": "exact"}, {}, {"min_saved": 0}])
def test_pins_and_names_after_a_change_stay_whatever_the_mode(options: Mapping[str, Any]) -> None:
    session = MODEL.session(400)
    session.feed(TEXT)
    session.name("note", 50, 70)
    session.name("later", 100, 120)
    session.pin("note")
    session.align([*TEXT[:10], 3, 4, 5, *TEXT[10:]], **options)
    assert session.span_ranges == {"note": (53, 73), "later": (103, 123)}
    assert pinned(session) == list(range(53, 73))


@pytest.mark.parametrize(("at", "first", "count"), [(10, 53, 40), (45, 53, 40), (50, 53, 40)])
@pytest.mark.parametrize("reread", [0, 16])
def test_tokens_that_are_only_evaluated_again_stay_pinned(
    at: int, first: int, count: int, reread: int
) -> None:
    session = MODEL.session(600)
    session.feed(LONG_TEXT)
    session.pin(50, 90)
    text = [*LONG_TEXT[:at], 3, 3, 3, *LONG_TEXT[at:]]
    for copy in aligned_copies(session, text, reread=reread):
        assert pinned(copy) == list(range(first, first + count))


def test_tokens_that_come_into_a_pin_or_replace_it_are_pinned() -> None:
    session = MODEL.session(600)
    session.feed(LONG_TEXT)
    session.pin(50, 90)
    for text, expected in [
        ([*LONG_TEXT[:60], 3, 3, 3, *LONG_TEXT[60:]], range(50, 93)),
        ([*LONG_TEXT[:50], *[3] * 9, *LONG_TEXT[90:]], range(50, 59)),
        ([*LONG_TEXT[:40], *[3] * 9, *LONG_TEXT[90:]], range(0)),
        ([*LONG_TEXT[:70], *LONG_TEXT[110:]], range(50, 70)),
    ]:
        for copy in aligned_copies(session, text):
            assert pinned(copy) == list(expected)


@pytest.mark.parametrize("length", [80, 300])
def test_what_follows_a_pinned_text_is_not_pinned(length: int) -> None:
    text = LONG_TEXT[:length]
    session = MODEL.session(100)
    session.feed(text[:40])
    session.pin(4, 40)
    session.align([*text[:20], 9, *text[20:]], mode="exact")
    assert pinned(session) == list(range(4, 41))
    assert session.token_status.count("pinned") == 37
    session = MODEL.session(100)
    session.feed(text[:40])
    session.pin(4, 40)
    session.align([*text[:20], *[9] * length, 7], mode="exact")
    assert pinned(session) == list(range(4, 20))


@pytest.mark.parametrize(("keep", "expected"), [(30, 31), (-1, 41), (4, 4)])
@pytest.mark.parametrize("length", [80, 300])
def test_keep_grows_by_what_comes_between_kept_tokens_alone(
    keep: int, expected: int, length: int
) -> None:
    text = LONG_TEXT[:length]
    session = MODEL.session(100, keep=keep)
    session.feed(text[:40])
    session.align([*text[:20], 9, *text[20:]], mode="exact")
    assert session.keep == expected
    assert session.token_status[:expected] == ["kept"] * expected


@pytest.mark.parametrize(("at", "expected"), [(0, 63), (10, 63), (50, 63), (60, 60), (100, 60)])
def test_keep_grows_alike_in_place_and_exactly(at: int, expected: int) -> None:
    session = MODEL.session(600, keep=60)
    session.feed(LONG_TEXT)
    text = [*LONG_TEXT[:at], 3, 3, 3, *LONG_TEXT[at:]]
    for copy in aligned_copies(session, text):
        assert copy.keep == expected
        assert copy.token_status.count("kept") == expected


def test_attention_sinks_are_the_first_tokens_of_any_text() -> None:
    session = MODEL.session(800)
    session.feed(LONG_TEXT)
    for copy in aligned_copies(session, [*LONG_TEXT[:2], *[3] * 300, *LONG_TEXT[2:]]):
        assert copy.keep == 4


def test_pins_of_evicted_texts_stay_where_all_is_evaluated_again() -> None:
    session = MODEL.session(100)
    session.feed(LONG_TEXT[:60])
    session.name("note", 20, 30)
    session.pin("note")
    session.feed(LONG_TEXT[60:])
    report = session.align([*LONG_TEXT[:10], 3, 3, *LONG_TEXT[10:]], mode="exact")
    assert report.kept == 0
    assert session.span_ranges == {"note": (22, 32)}
    assert pinned(session) == list(range(22, 32))


@pytest.mark.parametrize("count", range(250, 300, 7))
def test_pins_stay_where_a_window_is_evicted_meanwhile(count: int) -> None:
    """Policy "shift" evicts half of its window at once, also in the middle of pinned tokens."""
    session = MODEL.session(100, policy="shift")
    session.feed(LONG_TEXT[:70])
    session.pin(10, 65)
    text = [*LONG_TEXT[100 : 100 + count], *LONG_TEXT[:70]]
    session.align(text, mode="exact")
    assert pinned(session) == list(range(count + 10, count + 65))


@pytest.mark.parametrize("mode", MODES)
def test_pins_without_room_are_refused_and_change_nothing(mode: AlignmentMode) -> None:
    session = MODEL.session(460)
    session.feed(LONG_TEXT)
    session.pin(4, 400)
    before = whole_state(session)
    with pytest.raises(InvalidArgument, match="not enough room for pins"):
        session.align([*LONG_TEXT[:200], *[3] * 60, *LONG_TEXT[200:]], mode=mode, min_saved=0)
    assert same(whole_state(session), before)


@given(
    st.sampled_from(["full", "sliding", "shift", "archive"]),
    st.sampled_from(sorted(MODELS)),
    st.integers(0, 1000),
    st.sampled_from([0, 16]),
)
@settings(max_examples=examples(12))
def test_modes_agree_on_pins_names_and_kept_tokens(
    policy: Any, model: str, seed: int, reread: int
) -> None:
    draws = random.Random(seed)
    keep: dict[str, Any] = {} if policy == "full" else {"keep": draws.choice([0, 4, 40])}
    session = MODELS[model].session(2000, policy=policy, prefill_step=64, **keep)
    session.feed(LONG_TEXT)
    for number in range(3):
        start = draws.randrange(390)
        session.name(f"span {number}", start, start + 10)
    for start in (50, 200, 350):
        session.pin(start, start + draws.randrange(1, 40))
    text = list(LONG_TEXT)
    for _ in range(3):
        at = draws.randrange(len(text))
        text[at : at + draws.randrange(20)] = draws.choices(range(250), k=draws.randrange(20))
    text += draws.choices(range(250), k=5)
    changed = changed_ranges(LONG_TEXT, text)
    exact = session.fork()
    exact.align(text, mode="exact")
    session.align(text, min_saved=0, reread=reread)
    assert session.tokens == exact.tokens == text
    assert pinned(session) == pinned(exact)
    assert session.span_ranges == exact.span_ranges
    assert session.keep == exact.keep
    assert session.token_status == exact.token_status
    assert len(changed) <= 5

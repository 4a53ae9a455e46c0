"""Pins: what is pinned is never forgotten, wherever it lies, and is seen from where it lies."""

import pytest
import torch
from dense_reference import DenseMemory
from edit_actions import MODEL
from hypothesis import given, settings
from hypothesis import strategies as st
from test_edits import distances, held
from test_invariants import same, state

from kvkeep import Snapshot
from kvkeep.errors import InvalidArgument
from kvkeep.session.session import Session

TEXT = list(b"a pinned stretch stays where it is while the window moves on without end")
PASS = range(20, 26)


def pinned_session(policy: str = "sliding", prefill_step: int = 512) -> tuple[Session, DenseMemory]:
    """24 cells, of which the first 4 are kept and tokens 20 to 25 of 30 are pinned."""
    session = MODEL.session(24, 4, policy, prefill_step)
    dense = DenseMemory(MODEL.decoder, 24, 4, 0 if policy == "shift" else 1)
    for each in (session, dense):
        each.feed(TEXT[:30])
        each.pin(PASS.start, PASS.stop)
    return session, dense


@pytest.mark.parametrize("policy", ["sliding", "shift"])
@pytest.mark.parametrize("prefill_step", [1, 5, 512])
def test_a_pin_outlives_a_feed_many_times_the_window(policy: str, prefill_step: int) -> None:
    session, dense = pinned_session(policy, prefill_step)
    for each in (session, dense):
        each.feed(TEXT * 4)
    assert set(held(session)) >= {*range(4), *PASS}
    assert session.cache.cells <= 24
    assert (session.logits - dense.logits()).abs().max() <= 1e-3


def test_the_window_passes_a_pin_and_closes_behind_it() -> None:
    session, _ = pinned_session()
    session.feed(TEXT * 2)
    assert held(session) == [
        *range(4),
        *PASS,
        *range(len(session.tokens) - 14, len(session.tokens)),
    ]
    assert distances(session) == list(range(23, -1, -1))


def test_an_unpinned_stretch_goes_with_the_next_tokens() -> None:
    session, dense = pinned_session()
    for each in (session, dense):
        each.feed(TEXT)
        each.unpin(PASS.start, PASS.stop)
    assert session.cache.cells == 24
    assert set(PASS) < set(held(session))
    for each in (session, dense):
        each.feed(TEXT[:4])
    assert set(PASS) & set(held(session)) == {24, 25}
    assert (session.logits - dense.logits()).abs().max() <= 1e-3
    session.feed(TEXT[:2])
    assert not set(PASS) & set(held(session))


def test_part_of_a_pin_can_be_let_go() -> None:
    session, _ = pinned_session()
    session.unpin(18, 23)
    session.feed(TEXT * 2)
    assert set(PASS) & set(held(session)) == {23, 24, 25}


def test_pins_in_several_places_and_a_change_of_keep() -> None:
    session, dense = pinned_session()
    for each in (session, dense):
        each.pin(27, 29)
        each.feed(TEXT)
    for keep in (7, 0, 4):
        session.keep = keep
        dense.set_keep(keep)
        for each in (session, dense):
            each.feed(TEXT[:11])
        assert set(held(session)) >= {*PASS, 27, 28}
        assert (session.logits - dense.logits()).abs().max() <= 1e-3


@pytest.mark.parametrize("recompute", ["none", "suffix"])
def test_what_replaces_a_pinned_stretch_is_pinned(recompute: str) -> None:
    for new in (TEXT[:6], TEXT[:3], TEXT[:8]):
        session, dense = pinned_session()
        session.replace(PASS.start, PASS.stop, new, recompute)
        dense.edit(PASS.start, PASS.stop, new, recompute == "suffix")
        for each in (session, dense):
            each.feed(TEXT)
        session.keep = 5  # decides anew which cells are anchors
        dense.set_keep(5)
        for each in (session, dense):
            each.feed(TEXT)
        assert set(range(20, 20 + len(new))) < set(held(session))
        assert (session.logits - dense.logits()).abs().max() <= 1e-3


@pytest.mark.parametrize("recompute", ["none", "suffix"])
def test_what_is_put_into_a_pinned_stretch_is_pinned_but_not_at_its_border(recompute: str) -> None:
    session, _ = pinned_session()
    session.insert(PASS.stop, TEXT[:2], recompute)
    session.insert(23, TEXT[:2], recompute)
    session.insert(PASS.start, TEXT[:2], recompute)
    session.feed(TEXT * 2)
    assert held(session)[:12] == [*range(4), *range(22, 30)]


@pytest.mark.parametrize("recompute", ["none", "suffix"])
def test_a_kept_beginning_that_grows_stays_kept_whole(recompute: str) -> None:
    session, dense = MODEL.session(24, keep=8), DenseMemory(MODEL.decoder, 24, 8)
    for each in (session, dense):
        each.feed(TEXT[:20])
    session.replace(2, 6, TEXT[:7], recompute)
    dense.edit(2, 6, TEXT[:7], recompute == "suffix")
    assert session.keep == 11
    for each in (session, dense):
        each.feed(TEXT)
    assert held(session)[:11] == list(range(11))
    assert (session.logits - dense.logits()).abs().max() <= 1e-3


def test_a_kept_beginning_can_grow_when_the_window_is_full() -> None:
    session, dense = MODEL.session(24, keep=8), DenseMemory(MODEL.decoder, 24, 8)
    for each in (session, dense):
        each.feed(TEXT)
    session.replace(2, 6, TEXT[:7])
    dense.edit(2, 6, TEXT[:7], False)
    assert session.cache.cells == 24
    assert session.keep == 11
    assert (session.logits - dense.logits()).abs().max() <= 1e-3


@pytest.mark.parametrize("recompute", ["none", "suffix"])
def test_taking_out_kept_tokens_keeps_those_that_come_first_then(recompute: str) -> None:
    session = MODEL.session(24, keep=4)
    session.feed(TEXT[:20])
    session.delete(0, 3, recompute)
    assert session.keep == 4
    session.feed(TEXT)
    assert held(session)[:4] == [0, 1, 2, 3]
    assert session.tokens[:4] == TEXT[3:7]


@pytest.mark.parametrize("recompute", ["none", "suffix"])
def test_pins_behind_an_edit_survive_it(recompute: str) -> None:
    session, dense = pinned_session()
    session.replace(14, 17, TEXT[:2], recompute)
    dense.edit(14, 17, TEXT[:2], recompute == "suffix")
    for each in (session, dense):
        each.feed(TEXT)
    assert set(range(19, 25)) < set(held(session))
    assert session.tokens[19:25] == TEXT[20:26]
    assert (session.logits - dense.logits()).abs().max() <= 1e-3


@pytest.mark.parametrize("what", ["edit", "rewind"])
def test_a_pinned_last_token_stays_pinned_when_it_is_evaluated_anew(what: str) -> None:
    session, dense = MODEL.session(20, 4), DenseMemory(MODEL.decoder, 20, 4)
    for each in (session, dense):
        each.feed(TEXT[:20])
        each.pin(17, 18)
        each.pin(19, 20)
    if what == "edit":
        session.replace(10, 12, TEXT[:2])
        dense.edit(10, 12, TEXT[:2], False)
    else:
        session.rewind(2)
        dense.rewind(2)
    pinned = {17, 19} if what == "edit" else {17}
    assert session.cache.cells == len(session.tokens)
    for each in (session, dense):
        each.feed(TEXT)
    assert pinned < set(held(session))
    assert (session.logits - dense.logits()).abs().max() <= 1e-3


def test_pins_come_back_from_a_file(tmp_path) -> None:
    session, _ = pinned_session()
    session.snapshot().save(tmp_path / "pins.kvkeep")
    restored = MODEL.restore(Snapshot.load(tmp_path / "pins.kvkeep"))
    for each in (session, restored):
        each.feed(TEXT * 2)
        each.unpin(22, 26)
        each.feed(TEXT)
    assert same(state(session), state(restored))
    assert {20, 21} < set(held(restored))


def test_pins_come_back_with_a_rewind_and_go_with_their_tokens() -> None:
    session, _ = pinned_session()
    session.rewind(7)
    session.feed(TEXT * 2)
    assert set(held(session)) & set(range(18, 26)) == {20, 21, 22}
    with pytest.raises(InvalidArgument, match="pinned"):
        session.unpin(23, 26)


REFUSED = {
    "out of order": lambda s: s.pin(9, 8),
    "nothing": lambda s: s.pin(26, 26),
    "negative": lambda s: s.pin(-2, 3),
    "past the end": lambda s: s.pin(28, 31),
    "no end": lambda s: s.pin(3),
    "overlaps": lambda s: s.pin(25, 28),
    "overlaps from before": lambda s: s.pin(18, 21),
    "forgotten": lambda s: s.pin(5, 9),
    "partly forgotten": lambda s: s.pin(8, 14),
    "not pinned": lambda s: s.unpin(26, 29),
    "unpin past the end": lambda s: s.unpin(20, 31),
    "unknown span": lambda s: s.pin("doc"),
    "name with an end": lambda s: s.pin("doc", 4),
    "keep beside pins": lambda s: setattr(s, "keep", 24),
}


@pytest.mark.parametrize("wrong", REFUSED.values(), ids=REFUSED)
def test_a_pin_that_cannot_be_is_refused(wrong) -> None:
    session, _ = pinned_session()
    before = state(session)
    with pytest.raises(InvalidArgument):
        wrong(session)
    assert same(state(session), before)


def test_a_budget_cannot_be_pinned_whole() -> None:
    session = MODEL.session(8, keep=2)
    session.feed(TEXT[:8])
    before = state(session)
    with pytest.raises(InvalidArgument, match="room for a window"):
        session.pin(2, 8)
    assert same(state(session), before)
    session.pin(2, 7)
    session.feed(TEXT)
    assert held(session) == [*range(7), len(session.tokens) - 1]


@settings(max_examples=40)
@given(st.integers(0, 19), st.integers(1, 12), st.sampled_from([1, 3, 64]))
def test_any_stretch_can_be_pinned(start: int, count: int, prefill_step: int) -> None:
    session, dense = (
        MODEL.session(24, 4, prefill_step=prefill_step),
        DenseMemory(MODEL.decoder, 24, 4),
    )
    end = min(start + count, 20)
    for each in (session, dense):
        each.feed(TEXT[:20])
        each.pin(start, end)
        each.feed(TEXT)
    assert set(held(session)) >= {*range(start, end), *range(4)}
    assert (session.logits - dense.logits()).abs().max() <= 1e-3


def test_what_is_pinned_is_what_the_window_would_have_seen() -> None:
    """As long as nothing is forgotten, a pin changes no logits."""
    session, plain = MODEL.session(64, 4), MODEL.session(64, 4)
    for each in (session, plain):
        each.feed(TEXT[:30])
    session.pin(10, 20)
    for each in (session, plain):
        each.feed(TEXT[30:60])
    assert torch.allclose(session.logits, plain.logits, atol=1e-3)

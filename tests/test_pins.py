"""Pinned tokens are never evicted, and are seen at the distances of their places."""

import pytest
import torch
from dense_reference import DenseMemory
from edit_actions import MODEL
from hypothesis import given, settings
from hypothesis import strategies as st
from session_state import same, whole_state
from test_edits import distances, held

from kvkeep import Archive, Snapshot
from kvkeep.errors import InvalidArgument
from kvkeep.session.session import Session
from tests.examples import examples

TEXT = list(b"a pinned stretch stays where it is while the window moves on without end")
PINNED = range(20, 26)


def pinned_session(policy: str = "sliding", prefill_step: int = 512) -> tuple[Session, DenseMemory]:
    """A session and its reference of 24 cells; 4 are kept, and tokens 20 to 25 of 30 are pinned."""
    session = MODEL.session(24, 4, policy, prefill_step)
    dense = DenseMemory(MODEL.decoder, 24, 4, 0 if policy == "shift" else 1)
    for each in (session, dense):
        each.feed(TEXT[:30])
        each.pin(PINNED.start, PINNED.stop)
    return session, dense


@pytest.mark.parametrize("policy", ["sliding", "shift"])
@pytest.mark.parametrize("prefill_step", [1, 5, 512])
def test_pinned_tokens_stay_while_many_windows_are_fed(policy: str, prefill_step: int) -> None:
    session, dense = pinned_session(policy, prefill_step)
    for each in (session, dense):
        each.feed(TEXT * 4)
    assert set(held(session)) >= {*range(4), *PINNED}
    assert session.cache.cells <= 24
    assert (session.logits - dense.logits()).abs().max() <= 1e-3


def test_evictions_around_a_pin_leave_no_gap_in_distances() -> None:
    session, _ = pinned_session()
    session.feed(TEXT * 2)
    assert held(session) == [
        *range(4),
        *PINNED,
        *range(len(session.tokens) - 14, len(session.tokens)),
    ]
    assert distances(session) == list(range(23, -1, -1))


def test_unpinned_tokens_are_evicted_next() -> None:
    session, dense = pinned_session()
    for each in (session, dense):
        each.feed(TEXT)
        each.unpin(PINNED.start, PINNED.stop)
    assert session.cache.cells == 24
    assert set(PINNED) < set(held(session))
    for each in (session, dense):
        each.feed(TEXT[:4])
    assert set(PINNED) & set(held(session)) == {24, 25}
    assert (session.logits - dense.logits()).abs().max() <= 1e-3
    session.feed(TEXT[:2])
    assert not set(PINNED) & set(held(session))


def test_part_of_a_pin_can_be_unpinned() -> None:
    session, _ = pinned_session()
    session.unpin(18, 23)
    session.feed(TEXT * 2)
    assert set(PINNED) & set(held(session)) == {23, 24, 25}


def test_several_pins_survive_changes_of_keep() -> None:
    session, dense = pinned_session()
    for each in (session, dense):
        each.pin(27, 29)
        each.feed(TEXT)
    for keep in (7, 0, 4):
        session.keep = keep
        dense.set_keep(keep)
        for each in (session, dense):
            each.feed(TEXT[:11])
        assert set(held(session)) >= {*PINNED, 27, 28}
        assert (session.logits - dense.logits()).abs().max() <= 1e-3


@pytest.mark.parametrize("recompute", ["none", "suffix"])
def test_the_replacement_of_pinned_tokens_is_pinned(recompute: str) -> None:
    for new in (TEXT[:6], TEXT[:3], TEXT[:8]):
        session, dense = pinned_session()
        session.replace(PINNED.start, PINNED.stop, new, recompute)
        dense.edit(PINNED.start, PINNED.stop, new, recompute == "suffix")
        for each in (session, dense):
            each.feed(TEXT)
        session.keep = 5  # decides again which cells are anchors
        dense.set_keep(5)
        for each in (session, dense):
            each.feed(TEXT)
        assert set(range(20, 20 + len(new))) < set(held(session))
        assert (session.logits - dense.logits()).abs().max() <= 1e-3


@pytest.mark.parametrize("recompute", ["none", "suffix"])
def test_an_insertion_inside_a_pin_is_pinned_but_not_at_its_border(recompute: str) -> None:
    session, _ = pinned_session()
    session.insert(PINNED.stop, TEXT[:2], recompute)
    session.insert(23, TEXT[:2], recompute)
    session.insert(PINNED.start, TEXT[:2], recompute)
    session.feed(TEXT * 2)
    assert held(session)[:12] == [*range(4), *range(22, 30)]


@pytest.mark.parametrize("recompute", ["none", "suffix"])
def test_keep_grows_with_an_edit_of_kept_tokens(recompute: str) -> None:
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


def test_keep_can_grow_when_the_window_is_full() -> None:
    session, dense = MODEL.session(24, keep=8), DenseMemory(MODEL.decoder, 24, 8)
    for each in (session, dense):
        each.feed(TEXT)
    session.replace(2, 6, TEXT[:7])
    dense.edit(2, 6, TEXT[:7], False)
    assert session.cache.cells == 24
    assert session.keep == 11
    assert (session.logits - dense.logits()).abs().max() <= 1e-3


@pytest.mark.parametrize("recompute", ["none", "suffix"])
def test_deleting_kept_tokens_keeps_the_next_ones(recompute: str) -> None:
    session = MODEL.session(24, keep=4)
    session.feed(TEXT[:20])
    session.delete(0, 3, recompute)
    assert session.keep == 4
    session.feed(TEXT)
    assert held(session)[:4] == [0, 1, 2, 3]
    assert session.tokens[:4] == TEXT[3:7]


@pytest.mark.parametrize("recompute", ["none", "suffix"])
def test_pins_after_an_edit_survive_it(recompute: str) -> None:
    session, dense = pinned_session()
    session.replace(14, 17, TEXT[:2], recompute)
    dense.edit(14, 17, TEXT[:2], recompute == "suffix")
    for each in (session, dense):
        each.feed(TEXT)
    assert set(range(19, 25)) < set(held(session))
    assert session.tokens[19:25] == TEXT[20:26]
    assert (session.logits - dense.logits()).abs().max() <= 1e-3


@pytest.mark.parametrize("filled", range(4))
def test_a_run_of_pins_longer_than_an_archives_window_survives_an_edit(filled: int) -> None:
    """However many tokens there are beyond the window when the first of them is evaluated."""
    policy = Archive(96, keep=4, window=8, block=4, method="knorm")
    session, first = MODEL.session(policy=policy, prefill_step=16), 60 + filled
    tokens = [1 + i * 7 % 250 for i in range(first + 23)]
    session.feed(tokens[:first])
    for start in range(first, first + 20, 4):
        session.feed(tokens[start : start + 4])
        session.pin(start, start + 4)
    session.feed(tokens[-3:])
    session.delete(first + 3, first + 4, recompute="suffix")
    assert session.tokens == [*tokens[: first + 3], *tokens[first + 4 :]]
    assert session.token_status[first : first + 19] == ["pinned"] * 19


@pytest.mark.parametrize("change", ["edit", "rewind"])
def test_a_pinned_last_token_stays_pinned_when_it_is_evaluated_again(change: str) -> None:
    session, dense = MODEL.session(20, 4), DenseMemory(MODEL.decoder, 20, 4)
    for each in (session, dense):
        each.feed(TEXT[:20])
        each.pin(17, 18)
        each.pin(19, 20)
    if change == "edit":
        session.replace(10, 12, TEXT[:2])
        dense.edit(10, 12, TEXT[:2], False)
    else:
        session.rewind(2)
        dense.rewind(2)
    pinned = {17, 19} if change == "edit" else {17}
    assert session.cache.cells == len(session.tokens)
    for each in (session, dense):
        each.feed(TEXT)
    assert pinned < set(held(session))
    assert (session.logits - dense.logits()).abs().max() <= 1e-3


def test_pins_are_restored_from_a_file(tmp_path) -> None:
    session, _ = pinned_session()
    session.snapshot().save(tmp_path / "pins.kvkeep")
    restored = MODEL.restore(Snapshot.load(tmp_path / "pins.kvkeep"))
    for each in (session, restored):
        each.feed(TEXT * 2)
        each.unpin(22, 26)
        each.feed(TEXT)
    assert same(whole_state(session), whole_state(restored))
    assert {20, 21} < set(held(restored))


def test_a_rewind_drops_the_pins_of_its_tokens_only() -> None:
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
    "keep with pins": lambda s: setattr(s, "keep", 24),
}


@pytest.mark.parametrize("refused_call", REFUSED.values(), ids=REFUSED)
def test_an_invalid_pin_is_refused(refused_call) -> None:
    session, _ = pinned_session()
    before = whole_state(session)
    with pytest.raises(InvalidArgument):
        refused_call(session)
    assert same(whole_state(session), before)


def test_the_whole_budget_cannot_be_pinned() -> None:
    session = MODEL.session(8, keep=2)
    session.feed(TEXT[:8])
    before = whole_state(session)
    with pytest.raises(
        InvalidArgument,
        match="6 cells would be pinned, and a budget of 8 has room for 5 beside the 2",
    ):
        session.pin(2, 8)
    assert same(whole_state(session), before)
    session.pin(2, 7)
    session.feed(TEXT)
    assert held(session) == [*range(7), len(session.tokens) - 1]


@settings(max_examples=examples(10))
@given(st.integers(0, 19), st.integers(1, 12), st.sampled_from([1, 3, 64]))
def test_any_range_can_be_pinned(start: int, count: int, prefill_step: int) -> None:
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


def test_a_pin_changes_no_logits_before_the_first_eviction() -> None:
    session, unpinned = MODEL.session(64, 4), MODEL.session(64, 4)
    for each in (session, unpinned):
        each.feed(TEXT[:30])
    session.pin(10, 20)
    for each in (session, unpinned):
        each.feed(TEXT[30:60])
    assert torch.allclose(session.logits, unpinned.logits, atol=1e-3)

"""Policy `shift`: many of the oldest cells are evicted at once, and distances close up."""

import pytest
import torch
from dense_reference import DenseMemory
from edit_actions import MODEL
from session_state import held_state, same, whole_state
from test_edits import distances, held

from kvkeep.errors import InvalidArgument
from kvkeep.session.session import Session

TEXT = list(b"at the bound the oldest cells go together, and then there is room again for a while")


def shifting(discard: int | None = None, prefill_step: int = 512) -> Session:
    return MODEL.session(20, 4, "shift", prefill_step, discard=discard)


@pytest.mark.parametrize(("discard", "evicted"), [(None, 8), (0, 8), (1, 1), (5, 5), (16, 16)])
def test_the_oldest_cells_are_evicted_at_once_when_the_window_is_full(
    discard: int | None, evicted: int
) -> None:
    session = shifting(discard)
    assert session.discard == evicted
    session.feed(TEXT[:20])
    assert session.cache.cells == 20
    session.feed(TEXT[20:21])
    assert session.cache.cells == 21 - evicted
    assert held(session) == [*range(4), *range(4 + evicted, 21)]
    assert distances(session) == list(range(20 - evicted, -1, -1))
    if evicted > 1:
        session.feed(TEXT[21 : 20 + evicted])
    assert session.cache.cells == 20


@pytest.mark.parametrize("prefill_step", [1, 7, 512])
@pytest.mark.parametrize("discard", [0, 1, 3, 16])
def test_logits_equal_the_dense_reference_at_every_token(discard: int, prefill_step: int) -> None:
    session = shifting(discard, prefill_step)
    dense = DenseMemory(MODEL.decoder, 20, 4, discard)
    for part in (TEXT[:33], *([t] for t in TEXT[33:])):
        for each in (session, dense):
            each.feed(part)
        assert held(session) == [i for i, t in enumerate(dense.tokens) if t.held]
        assert (session.logits - dense.logits()).abs().max() <= 1e-3


def test_discard_can_be_changed_between_tokens() -> None:
    session, dense = shifting(), DenseMemory(MODEL.decoder, 20, 4, 0)
    for discard in (3, 16, 1, 0):
        session.discard = discard
        dense.set_discard(discard)
        for each in (session, dense):
            each.feed(TEXT[:23])
        assert (session.logits - dense.logits()).abs().max() <= 1e-3
    assert session.discard == 8


def test_the_default_discard_follows_keep_and_pins() -> None:
    session = shifting()
    session.feed(TEXT[:20])
    session.pin(10, 14)
    assert session.discard == 6
    session.keep = 8
    assert session.discard == 4


@pytest.mark.parametrize("discard", [-1, 17, 400])
def test_a_discard_larger_than_the_window_is_refused(discard: int) -> None:
    with pytest.raises(InvalidArgument, match=r"1 to 16.*found"):
        shifting(discard)
    session = shifting(5)
    session.feed(TEXT)
    before = whole_state(session)
    with pytest.raises(InvalidArgument, match=r"1 to 16.*found"):
        session.discard = discard
    assert session.discard == 5
    assert same(whole_state(session), before)


def test_pins_and_keep_must_leave_a_window_of_discard_cells() -> None:
    session = shifting(12)
    session.feed(TEXT[:20])
    before = whole_state(session)
    with pytest.raises(InvalidArgument, match="discard must be 1 to 11"):
        session.pin(8, 13)
    with pytest.raises(InvalidArgument, match="discard must be 1 to 11"):
        session.keep = 9
    assert same(whole_state(session), before)


@pytest.mark.parametrize("policy", ["full", "sliding"])
def test_only_shift_has_the_setting_discard(policy: str) -> None:
    session = MODEL.session(20, policy=policy)
    with pytest.raises(InvalidArgument, match='policy="shift"'):
        session.discard = 3
    assert session.discard == {"full": 0, "sliding": 1}[policy]
    with pytest.raises(InvalidArgument, match="no setting 'discard'"):
        MODEL.session(20, policy=policy, discard=3)


@pytest.mark.parametrize("keep", [0, 4])
def test_shift_with_discard_1_equals_sliding_bit_for_bit(keep: int) -> None:
    shift = MODEL.session(20, keep, "shift", 7, discard=1)
    sliding = MODEL.session(20, keep, "sliding", 7)
    for part in (TEXT[:50], *([t] for t in TEXT[50:]), TEXT):
        for each in (shift, sliding):
            each.feed(part)
        assert torch.equal(shift.logits, sliding.logits)
    assert same(held_state(shift), held_state(sliding))

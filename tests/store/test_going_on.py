"""A session that was saved and loaded goes on to the bit; looking at one changes nothing.

On the compiled path, which sums over cells in blocks: where a cell lies decides the last bit.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from histories import ACTIONS, BY_HEADS, HOW, SETTINGS, act, new
from hypothesis import example, given, settings
from hypothesis import strategies as st
from packed_model import packed_model, spec_of
from topics import topic_ids
from torch import Tensor

from kvkeep import Snapshot
from kvkeep.compiled.binding import library
from kvkeep.model import Model
from kvkeep.session.session import Session

pytestmark = pytest.mark.skipif(library() is None, reason="no compiled kernels here")
MODEL = packed_model(spec_of(), None)
NEXT = 16


def restored(session: Session, path: Path) -> Session:
    session.snapshot().save(path)
    return session.core.model.restore(Snapshot.load(path))


def assert_they_go_on_alike(one: Session, other: Session, count: int = NEXT) -> None:
    assert one.tokens == other.tokens
    assert same(one.logits, other.logits)
    for index in range(count if one.logits is not None else 0):
        if one.room is None or one.room > 0:
            assert one.next_token(HOW) == other.next_token(HOW), f"token {index}"
            assert same(one.logits, other.logits), f"logits after token {index}"


def same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)


@settings(max_examples=30)
@given(SETTINGS, ACTIONS)
@example({"policy": "full"}, BY_HEADS)
@example({"policy": "full", "kv_bits": "8/4"}, BY_HEADS)
def test_any_saved_session_goes_on_to_the_bit(
    tmp_path_factory: pytest.TempPathFactory, setting: dict[str, Any], actions: list[Any]
) -> None:
    session = new(MODEL, setting)
    for action in actions:
        session = act(session, action)
    path = tmp_path_factory.getbasetemp() / "any.kvkeep"
    again = restored(session, path)
    assert_they_go_on_alike(session, again)
    for action in actions:  # and through whatever comes then
        session, again = act(session, action), act(again, action)
    assert_they_go_on_alike(session, again)


def test_the_default_model_goes_on_to_the_bit_after_an_edit(smollm2: Model, tmp_path: Path) -> None:
    ids = topic_ids(smollm2)
    session = smollm2.session(512)
    session.feed(ids[:600])
    session.delete(590, 595)
    session.feed(ids[600:620])
    assert_they_go_on_alike(session, restored(session, tmp_path / "a.kvkeep"), 8)


def test_a_fork_that_was_fed_past_its_window_goes_on_to_the_bit(tmp_path: Path) -> None:
    parent = new(MODEL, {"max_kv_size": 300})
    fork = parent.fork()
    for _ in range(3):
        fork.feed(parent.tokens[:77])
        assert_they_go_on_alike(fork, restored(fork, tmp_path / "a.kvkeep"))


LOOKS = st.lists(st.sampled_from(["no", "snapshot", "fork", "both"]), min_size=8, max_size=8)


@settings(max_examples=30)
@given(SETTINGS, ACTIONS, LOOKS)
@example({"policy": "full"}, BY_HEADS, ["both"] * len(BY_HEADS))
@example({"policy": "full", "kv_bits": "8/4"}, BY_HEADS, ["snapshot"] * len(BY_HEADS))
def test_looking_changes_nothing(
    setting: dict[str, Any], actions: list[Any], looks: list[str]
) -> None:
    session, unseen = new(MODEL, setting), new(MODEL, setting)
    kept: list[object] = []
    for action, look in zip(actions, looks, strict=False):
        session, unseen = act(session, action), act(unseen, action)
        if look in ("snapshot", "both"):
            kept.append(session.snapshot())
        if look in ("fork", "both"):
            kept.append(session.fork())
        assert same(session.logits, unseen.logits)
    kept.append(session.snapshot())
    assert_they_go_on_alike(session, unseen, 2 * NEXT)
    assert kept


def test_a_snapshot_does_not_change_what_the_default_model_writes_beside_a_pin(
    smollm2: Model,
) -> None:
    sessions = [smollm2.session(512) for _ in range(2)]
    for session in sessions:
        session.feed(topic_ids(smollm2)[:700])
        session.pin(600, 610)
    kept = sessions[0].snapshot()
    assert_they_go_on_alike(*sessions, 12)
    assert kept.cells == 512

"""A restored session continues bit-exactly, and taking a snapshot or a fork changes nothing.

These tests use the compiled kernels, which sum over cells in blocks: the place of a cell decides
the last bit.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from histories import ACTIONS, BY_HEADS, SAMPLING, SETTINGS, act, new
from hypothesis import example, given, settings
from hypothesis import strategies as st
from packed_model import packed_model, spec_of
from topics import topic_ids
from torch import Tensor

from kvkeep import Snapshot
from kvkeep.compiled.binding import kernel_library
from kvkeep.model import Model
from kvkeep.session.session import Session
from tests.examples import examples

pytestmark = pytest.mark.skipif(kernel_library() is None, reason="no compiled kernels here")
MODEL = packed_model(spec_of(), None)
NEXT = 16


def save_and_restore(session: Session, path: Path, model: Model = MODEL) -> Session:
    session.snapshot().save(path)
    return model.restore(Snapshot.load(path))


def assert_same_continuation(first: Session, second: Session, count: int = NEXT) -> None:
    assert first.tokens == second.tokens
    assert equal_logits(first.logits, second.logits)
    for index in range(count if first.logits is not None else 0):
        if first.room is None or first.room > 0:
            assert first.next_token(SAMPLING) == second.next_token(SAMPLING), f"token {index}"
            assert equal_logits(first.logits, second.logits), f"logits after token {index}"


def equal_logits(first: Tensor | None, second: Tensor | None) -> bool:
    return first is second if first is None or second is None else torch.equal(first, second)


@settings(max_examples=examples(8))
@given(SETTINGS, ACTIONS)
@example({"policy": "full"}, BY_HEADS)
@example({"policy": "full", "kv_bits": "8/4"}, BY_HEADS)
def test_a_restored_session_continues_bit_exactly_after_any_history(
    tmp_path_factory: pytest.TempPathFactory, setting: dict[str, Any], actions: list[Any]
) -> None:
    session = new(MODEL, setting)
    for action in actions:
        session = act(session, action)
    path = tmp_path_factory.getbasetemp() / "any.kvkeep"
    copy = save_and_restore(session, path)
    assert_same_continuation(session, copy)
    for action in actions:  # and after the same actions again
        session, copy = act(session, action), act(copy, action)
    assert_same_continuation(session, copy)


def test_the_default_model_continues_bit_exactly_after_an_edit(
    smollm2: Model, tmp_path: Path
) -> None:
    ids = topic_ids(smollm2)
    session = smollm2.session(512)
    session.feed(ids[:600])
    session.delete(590, 595)
    session.feed(ids[600:620])
    assert_same_continuation(session, save_and_restore(session, tmp_path / "a.kvkeep", smollm2), 8)


def test_a_fork_fed_past_its_window_continues_bit_exactly(tmp_path: Path) -> None:
    parent = new(MODEL, {"max_kv_size": 300})
    fork = parent.fork()
    for _ in range(3):
        fork.feed(parent.tokens[:77])
        assert_same_continuation(fork, save_and_restore(fork, tmp_path / "a.kvkeep"))


COPIES_TAKEN = st.lists(st.sampled_from(["no", "snapshot", "fork", "both"]), min_size=8, max_size=8)


@settings(max_examples=examples(8))
@given(SETTINGS, ACTIONS, COPIES_TAKEN)
@example({"policy": "full"}, BY_HEADS, ["both"] * len(BY_HEADS))
@example({"policy": "full", "kv_bits": "8/4"}, BY_HEADS, ["snapshot"] * len(BY_HEADS))
def test_taking_snapshots_and_forks_changes_nothing(
    setting: dict[str, Any], actions: list[Any], copies_taken: list[str]
) -> None:
    session, undisturbed = new(MODEL, setting), new(MODEL, setting)
    copies: list[object] = []
    for action, copy_taken in zip(actions, copies_taken, strict=False):
        session, undisturbed = act(session, action), act(undisturbed, action)
        if copy_taken in ("snapshot", "both"):
            copies.append(session.snapshot())
        if copy_taken in ("fork", "both"):
            copies.append(session.fork())
        assert equal_logits(session.logits, undisturbed.logits)
    copies.append(session.snapshot())
    assert_same_continuation(session, undisturbed, 2 * NEXT)
    assert copies


def test_a_snapshot_does_not_change_what_the_default_model_generates_after_a_pin(
    smollm2: Model,
) -> None:
    sessions = [smollm2.session(512) for _ in range(2)]
    for session in sessions:
        session.feed(topic_ids(smollm2)[:700])
        session.pin(600, 610)
    snapshot = sessions[0].snapshot()
    assert_same_continuation(*sessions, 12)
    assert snapshot.cells == 512

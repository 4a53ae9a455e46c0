"""Layers that see only a window: whatever the other layers hold, they hold that and no more."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from edit_actions import LOCAL_MODEL, MODEL
from small import local_spec
from topics import topic_text

from kvkeep import PrefixStore, SessionGroup, Snapshot
from kvkeep.errors import InvalidSnapshot, KvkeepError
from kvkeep.model import Model
from kvkeep.models.spec.cells import UNDO_TOKENS
from kvkeep.session.session import Session
from kvkeep.storage.snapshots.snapshot import describe

WINDOW = local_spec().window
TEXT = MODEL.text.encode(topic_text())[:120]


def fed(policy: str = "full", budget: int = 256, model: Model = LOCAL_MODEL, **settings) -> Session:
    session = model.session(budget, policy=policy, prefill_step=50, **settings)
    session.feed(TEXT)
    return session


def near(session: Session) -> int:
    assert session.cache.local is not None
    return session.cache.local.cells


@pytest.mark.parametrize("policy", ["full", "sliding", "shift", "archive", "self_extend"])
def test_they_hold_their_window_and_take_as_much(policy: str) -> None:
    settings = {"window": 16, "group": 4} if policy == "self_extend" else {}
    session = fed(policy, 256 if policy in ("full", "self_extend") else 48, **settings)
    for _ in range(20):
        session.next_token()
    held = min(WINDOW + UNDO_TOKENS, session.max_kv_size)
    assert near(session) == held
    layout = session.cache.local.layout
    assert layout.layers == 4
    assert session.cache.layout.layers == 1
    assert session.cache.local.nbytes == held * layout.cell_bytes


def test_a_budget_below_the_window_bounds_them_too() -> None:
    assert near(fed("sliding", 5)) == 5


# A last bit of a hidden state can make an 8-bit key of it the next one: a fifth of a percent.
@pytest.mark.parametrize(("bits", "most"), [(None, 1e-3), ("8", 0.1), ("4", 1.0)])
def test_rows_of_a_group_are_what_sessions_give_alone(bits: str | None, most: float) -> None:
    sessions = [fed("sliding", budget, kv_bits=bits) for budget in (20, 48)]
    sessions.append(sessions[0].fork())
    alone = [session.fork() for session in sessions]
    group = SessionGroup(sessions)
    for _ in range(12):
        tokens = group.next_tokens()
        assert tokens == [session.next_token() for session in alone]
        for one, other in zip(sessions, alone, strict=True):
            torch.testing.assert_close(one.logits, other.logits, rtol=1e-4, atol=most)


@pytest.mark.parametrize("method", ["kvzip", "kvzip+", "snapkv", "expected_attention", "average"])
def test_compressing_leaves_their_cells_as_they_are(method: str) -> None:
    session = fed()
    ((_, before),) = session.cache.local.read(0, near(session))
    report = session.compress(3, method=method, recent=20)
    assert report.cells_after < report.cells_before
    ((_, after),) = session.cache.local.read(0, near(session))
    assert torch.equal(after.keys, before.keys)
    assert torch.isfinite(session.logits).all()
    for _ in range(5):
        session.next_token()
    assert torch.isfinite(session.logits).all()


def test_a_file_names_their_segments_and_says_a_newer_format(tmp_path: Path) -> None:
    session, path = fed(), tmp_path / "a.kvkeep"
    session.snapshot().save(path, codec="zstd")
    document = describe(path)
    assert document["local_layout"]["layers"] == 4
    assert [each.get("local", False) for each in document["segments"]] == [False, True]
    assert document["segments"][-1]["length"] == near(session)
    assert Snapshot.load(path).cells == len(TEXT)
    restored = LOCAL_MODEL.restore(Snapshot.load(path))
    assert torch.equal(restored.logits, session.logits)
    assert restored.next_token() == session.next_token()


def test_more_than_their_window_is_refused(tmp_path: Path) -> None:
    wider = Snapshot.load(saved(fed(), tmp_path / "wide.kvkeep"))
    narrow = fed("sliding", 5).snapshot()
    with pytest.raises(InvalidSnapshot, match="cells of local layers, which hold 5"):
        LOCAL_MODEL.restore(replaced_local(narrow, wider))
    with pytest.raises(KvkeepError):
        MODEL.restore(wider)


def saved(session: Session, path: Path) -> Path:
    session.snapshot().save(path)
    return path


def replaced_local(snapshot: Snapshot, by: Snapshot) -> Snapshot:
    return replace(snapshot, local=by.local)


def test_a_clock_before_the_first_token_can_be_saved(tmp_path: Path) -> None:
    """What was put in before the first token stands before position 0."""
    session = MODEL.session(64)
    session.feed([1])
    session.insert(0, [5, 6, 7])
    session.delete(2, 4)
    assert session.cache.time < 0
    path = saved(session, tmp_path / "early.kvkeep")
    assert MODEL.restore(Snapshot.load(path)).next_token() == session.next_token()


def test_a_prefix_store_says_that_it_is_of_no_use(tmp_path: Path) -> None:
    session = LOCAL_MODEL.session(256, store=PrefixStore(tmp_path))
    report = session.feed(TEXT)
    assert "some layers of this model see the newest tokens alone" in report.store_error
    assert report.reused == 0
    assert not list(tmp_path.glob("**/*.safetensors"))

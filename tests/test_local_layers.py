"""Local layers hold their window and no more, whatever the other layers hold."""

from pathlib import Path

import pytest
import torch
from altered_snapshots import altered
from edit_actions import LOCAL_MODEL, MODEL
from small_models import local_spec
from topics import topic_text

from kvkeep import SessionGroup, Snapshot
from kvkeep.errors import InvalidSnapshot, KvkeepError
from kvkeep.model import Model
from kvkeep.models.spec.cells import UNDO_TOKENS
from kvkeep.session.session import Session
from kvkeep.storage.snapshots.snapshot import read_snapshot_document

WINDOW = local_spec().window
TEXT = MODEL.text.encode(topic_text())[:120]


def fed(policy: str = "full", budget: int = 256, model: Model = LOCAL_MODEL, **settings) -> Session:
    session = model.session(budget, policy=policy, prefill_step=50, **settings)
    session.feed(TEXT)
    return session


def local_cells(session: Session) -> int:
    assert session.cache.local_cache is not None
    return session.cache.local_cache.cells


@pytest.mark.parametrize("policy", ["full", "sliding", "shift", "archive", "self_extend"])
def test_local_layers_hold_their_window_and_spare_cells(policy: str) -> None:
    settings = {"window": 16, "group": 4} if policy == "self_extend" else {}
    session = fed(policy, 256 if policy in ("full", "self_extend") else 48, **settings)
    for _ in range(20):
        session.next_token()
    expected = min(WINDOW + UNDO_TOKENS, session.max_kv_size)
    assert local_cells(session) == expected
    layout = session.cache.local_cache.layout
    assert layout.layers == 4
    assert session.cache.layout.layers == 1
    assert session.cache.local_cache.nbytes == expected * layout.cell_bytes


def test_a_budget_below_the_window_bounds_local_layers() -> None:
    assert local_cells(fed("sliding", 5)) == 5


# The last bit of a hidden state can round an 8-bit key to its neighbour, a fifth of a percent off.
@pytest.mark.parametrize(("bits", "most"), [(None, 1e-3), ("8", 0.1), ("4", 1.0)])
def test_a_group_equals_its_sessions_alone(bits: str | None, most: float) -> None:
    sessions = [fed("sliding", budget, kv_bits=bits) for budget in (20, 48)]
    sessions.append(sessions[0].fork())
    alone = [session.fork() for session in sessions]
    group = SessionGroup(sessions)
    for _ in range(12):
        tokens = group.next_tokens()
        assert tokens == [session.next_token() for session in alone]
        for session, other in zip(sessions, alone, strict=True):
            torch.testing.assert_close(session.logits, other.logits, rtol=1e-4, atol=most)


@pytest.mark.parametrize("method", ["kvzip", "kvzip+", "snapkv", "expected_attention", "average"])
def test_compression_leaves_local_cells_unchanged(method: str) -> None:
    session = fed()
    ((_, before),) = session.cache.local_cache.read(0, local_cells(session))
    report = session.compress(3, method=method, recent=20)
    assert report.cells_after < report.cells_before
    ((_, after),) = session.cache.local_cache.read(0, local_cells(session))
    assert torch.equal(after.keys, before.keys)
    assert torch.isfinite(session.logits).all()
    for _ in range(5):
        session.next_token()
    assert torch.isfinite(session.logits).all()


def test_a_file_lists_local_segments(tmp_path: Path) -> None:
    session, path = fed(), tmp_path / "a.kvkeep"
    session.snapshot().save(path, codec="zstd")
    document = read_snapshot_document(path)
    assert document["local_layout"]["layers"] == 4
    assert [each.get("local", False) for each in document["segments"]] == [False, True]
    assert document["segments"][-1]["length"] == local_cells(session)
    assert Snapshot.load(path).cells == len(TEXT)
    restored = LOCAL_MODEL.restore(Snapshot.load(path))
    assert torch.equal(restored.logits, session.logits)
    assert restored.next_token() == session.next_token()


def test_more_local_cells_than_the_window_are_refused(tmp_path: Path) -> None:
    wider = Snapshot.load(saved(fed(), tmp_path / "wide.kvkeep"))
    narrow = fed("sliding", 5).snapshot()
    with pytest.raises(InvalidSnapshot, match="cells of local layers, which have room for 5"):
        LOCAL_MODEL.restore(replaced_local(narrow, wider))
    with pytest.raises(KvkeepError):
        MODEL.restore(wider)


def saved(session: Session, path: Path) -> Path:
    session.snapshot().save(path)
    return path


def replaced_local(snapshot: Snapshot, by: Snapshot) -> Snapshot:
    return altered(snapshot, local_segments=by.local)


def test_a_clock_before_the_first_token_can_be_saved(tmp_path: Path) -> None:
    """Tokens inserted before the first one are at negative positions."""
    session = MODEL.session(64)
    session.feed([1])
    session.insert(0, [5, 6, 7])
    session.delete(2, 4)
    assert session.cache.time < 0
    path = saved(session, tmp_path / "early.kvkeep")
    assert MODEL.restore(Snapshot.load(path)).next_token() == session.next_token()

"""Several residual streams (AltUp), and layers that look at others' cells: all that sessions do."""

from pathlib import Path

import pytest
import torch
from edit_actions import ALTUP_MODEL
from topics import topic_text

from kvkeep import SessionGroup, Snapshot
from kvkeep.session.session import Session

TEXT = ALTUP_MODEL.text.encode(topic_text())[:120]


def fed(policy: str = "sliding", budget: int = 48, **settings) -> Session:
    session = ALTUP_MODEL.session(budget, policy=policy, prefill_step=50, **settings)
    session.feed(TEXT)
    return session


@pytest.mark.parametrize("bits", [None, "8", "4"])
def test_restored_and_forked_sessions_continue_bit_exactly(
    bits: str | None, tmp_path: Path
) -> None:
    session = fed(kv_bits=bits)
    session.snapshot().save(tmp_path / "a.kvkeep")
    fork, restored = session.fork(), ALTUP_MODEL.restore(Snapshot.load(tmp_path / "a.kvkeep"))
    for _ in range(20):
        token = session.next_token()
        assert [fork.next_token(), restored.next_token()] == [token, token]
        assert torch.equal(fork.logits, session.logits)
        assert torch.equal(restored.logits, session.logits)


def test_only_layers_with_their_own_cells_hold_cells() -> None:
    session = fed()
    assert session.cache.layout.layers == 1  # of two that see everything
    assert session.cache.local_cache.layout.layers == 3  # of four local ones


@pytest.mark.parametrize(("bits", "most"), [("8", 0.1), ("4", 1.5)])
def test_quantised_cells_change_logits_little(bits: str, most: float) -> None:
    exact, rounded = fed("full", 256).logits, fed("full", 256, kv_bits=bits).logits
    assert 0 < (exact - rounded).square().mean().sqrt() <= most


def test_group_rows_equal_single_sessions() -> None:
    sessions = [fed("sliding", budget) for budget in (20, 48)]
    sessions.append(sessions[0].fork())
    alone = [session.fork() for session in sessions]
    group = SessionGroup(sessions)
    for _ in range(12):
        assert group.next_tokens() == [session.next_token() for session in alone]
        for one, other in zip(sessions, alone, strict=True):
            torch.testing.assert_close(one.logits, other.logits, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("method", ["kvzip", "kvzip+", "snapkv", "expected_attention", "average"])
def test_a_session_with_altup_can_be_compressed(method: str) -> None:
    session = fed("full", 256)
    report = session.compress(3, method=method, recent=20)
    assert report.cells_after < report.cells_before
    for _ in range(5):
        session.next_token()
    assert torch.isfinite(session.logits).all()


def test_tokens_outside_the_per_layer_vocabulary_use_the_first_row() -> None:
    """Of 256 tokens 200 have some."""
    tensors = dict(ALTUP_MODEL.decoder.tensors)
    assert tensors["model.embed_tokens_per_layer.weight"].shape[0] == 200
    session = ALTUP_MODEL.session(64)
    session.feed([199, 200, 255])
    assert torch.isfinite(session.logits).all()

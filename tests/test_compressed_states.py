"""Compression of models with states: cells of the layers that attend; states stay as they are."""

from pathlib import Path

import pytest
import torch
from listed_cells import ListedCells, biased
from session_state import same, whole_state
from small_models import small_model, state_specs

from kvkeep import Model, SessionGroup, Snapshot
from kvkeep.errors import InvalidArgument
from kvkeep.session.session import Session

MODELS = {kind: small_model(spec=spec) for kind, spec in state_specs().items()}
TEXT = [(i * i * 7 + 3 * i) % 255 + 1 for i in range(400)]


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Model:
    return MODELS[request.param]


def fed(model: Model) -> Session:
    session = model.session(policy="full", max_kv_size=600, prefill_step=50)
    session.feed(TEXT[:300])
    return session


@pytest.mark.parametrize(
    ("method", "budget"),
    [("keydiff", "uniform"), ("keydiff", "heads"), ("kvzip", "heads"), ("knorm", "uniform")],
)
def test_cells_are_compressed_and_states_stay(model: Model, method: str, budget: str) -> None:
    session = fed(model)
    before = whole_state(session)
    report = session.compress(3.0, method, recent=20, budget=budget)
    after = whole_state(session)
    assert report.cells_after < report.cells_before / 2
    assert same(after["states"], before["states"])
    assert torch.equal(session.logits, before["logits"])
    reference = ListedCells(biased(session), model.decoder)
    for first in (0, 3):
        expected = reference.feed(TEXT[first : first + 3])
        session.feed(TEXT[first : first + 3])
        assert (session.logits - expected).abs().max() <= 1e-3


def test_restored_sessions_and_forks_continue_to_the_bit(model: Model, tmp_path: Path) -> None:
    session = fed(model)
    session.compress(3.0, "keydiff", recent=60, budget="heads")
    session.snapshot().save(tmp_path / "a.kvkeep")
    restored = model.restore(Snapshot.load(tmp_path / "a.kvkeep"))
    fork = session.fork()
    tokens = [session.next_token() for _ in range(9)]
    assert [restored.next_token() for _ in range(9)] == tokens
    assert same(whole_state(restored)["states"], whole_state(session)["states"])
    assert torch.equal(restored.logits, session.logits)
    assert SessionGroup([fork]).next_tokens() == tokens[:1]


def test_a_rewind_goes_back_to_checkpoints_among_the_newest_cells(model: Model) -> None:
    session = fed(model)
    session.feed(TEXT[300:340])
    session.compress(3.0, "keydiff", recent=60, budget="heads")
    kept = whole_state(session)["segments"]
    with pytest.raises(InvalidArgument, match="only the last 40 "):
        session.rewind(60)
    assert same(whole_state(session)["segments"], kept)
    removed = session.rewind(10)
    assert removed == TEXT[330:340]
    assert len(session.tokens) == 330
    session.feed(TEXT[330:340])
    assert session.logits.isfinite().all()

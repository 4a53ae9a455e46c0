"""Chains of forks: each continues the one before it, as a server's stored responses do."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from edit_actions import loud_model
from session_state import Whole, differences, whole_state
from small_models import local_spec, small_model

from kvkeep import Snapshot
from kvkeep.cache import Segment
from kvkeep.cache.storage import MAX_BORDERS, MAX_SMALL_CELLS
from kvkeep.errors import NonFiniteLogits
from kvkeep.session.session import Session

MODEL = small_model()
MODELS = {"plain": MODEL, "local": loud_model(local_spec(window=150))}
TEXT = [(i * i * 7 + 3 * i) % 255 + 1 for i in range(3000)]
BOUNDED = ("sliding", "shift", "archive", "archive by heads")
KINDS: dict[str, dict[str, Any]] = {
    "full": {"policy": "full"},
    "sliding": {"policy": "sliding"},
    "sliding, all kept": {"policy": "sliding", "keep": 200},
    "shift": {"policy": "shift"},
    "archive": {"policy": "archive", "method": "keydiff", "ratio": 4.0},
    "archive by heads": {"policy": "archive", "method": "keydiff", "ratio": 4.0, "budget": "heads"},
    "self_extend": {"policy": "self_extend", "group": 4, "window": 32},
    "quantised": {"policy": "full", "kv_bits": "8/4"},
}


def new(kind: str, budget: int = 256, name: str = "plain") -> Session:
    return MODELS[name].session(budget, prefill_step=16, **KINDS[kind])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_chain_of_forks_has_few_segments_and_the_logits_of_one_session(
    kind: str, name: str
) -> None:
    budget = 96 if kind in BOUNDED else 256
    session, alone = (new(kind, budget, name) for _ in "ab")
    for each in (session, alone):
        each.feed(TEXT[:40])
    old: list[tuple[Session, Whole]] = []
    most = 0
    for index, token in enumerate(TEXT[40:140]):
        if index % 12 == 0:
            old.append((session, whole_state(session)))
        session = session.fork()
        for each in (session, alone):
            each.feed([token])
        for cache in filter(None, (session.cache, session.cache.local_cache)):
            kinds = Counter((s.position_map, s.is_anchor, s.compressed) for s in cache.segments)
            most = max([most, *kinds.values()])
        assert (session.logits - alone.logits).abs().max() <= 2e-3
    assert session.cache.serials() == alone.cache.serials()
    assert most <= MAX_BORDERS + 2
    for parent, state in old:
        assert list(differences(whole_state(parent), state)) == []


def copied_cells(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which the number of cells of each merged segment is added."""
    copied, make = [], Segment.from_cells.__func__  # type: ignore[attr-defined]

    def counting(cls: type[Segment], layout: Any, cells: Any, *others: Any) -> Segment:
        copied.append(len(cells))
        segment: Segment = make(cls, layout, cells, *others)
        return segment

    monkeypatch.setattr(Segment, "from_cells", classmethod(counting))
    return copied


@pytest.mark.parametrize(("count", "forks"), [(1, 300), (30, 80)])
def test_a_chain_of_forks_copies_each_cell_few_times(
    count: int, forks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied, session = copied_cells(monkeypatch), new("full", 3000)
    session.feed(TEXT[:500])
    first_storage = session.cache.segments[0].block.storage
    for start in range(500, 500 + count * forks, count):
        session = session.fork()
        session.feed(TEXT[start : start + count])
        assert len(session.cache.segments) <= MAX_BORDERS + 2
    assert sum(copied) <= 8 * count * forks + 500 + forks * MAX_SMALL_CELLS // MAX_BORDERS
    if count == 1:
        assert session.cache.segments[0].block.storage is first_storage  # still shared


def test_few_forks_copy_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    copied, session = copied_cells(monkeypatch), new("full")
    session.feed(TEXT[:40])
    for token in TEXT[: MAX_BORDERS + 1]:
        session = session.fork()
        session.feed([token])
    assert copied == []
    assert len(session.cache.segments) == MAX_BORDERS + 2


@pytest.mark.parametrize("kind", ["full", "sliding", "archive", "self_extend", "quantised"])
def test_a_chain_that_was_saved_goes_on_as_the_saved_one_to_the_bit(
    kind: str, tmp_path: Path
) -> None:
    session = new(kind)
    session.feed(TEXT[:40])
    for token in TEXT[40 : 40 + MAX_BORDERS - 2]:
        session = session.fork()
        session.feed([token])
    session.snapshot().save(tmp_path / "a.kvkeep")
    restored = MODEL.restore(Snapshot.load(tmp_path / "a.kvkeep"))
    for token in TEXT[100:108]:  # the segments are merged on the way
        session, restored = session.fork(), restored.fork()
        for each in (session, restored):
            each.feed([token])
        assert torch.equal(session.logits, restored.logits)
        states = [whole_state(each) for each in (session, restored)]
        for state in states:
            for segment in state["segments"]:
                del segment["lazy_growth"]
        assert list(differences(*states)) == []


def test_a_step_that_fails_leaves_the_segments_of_a_fork_as_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session = new("full")
    session.feed(TEXT[:40])
    for token in TEXT[: MAX_BORDERS + 1]:
        session = session.fork()
        session.feed([token])
    fork, decoder = session.fork(), MODEL.decoder
    before = whole_state(fork)

    def fail(*arguments: Any, **options: Any) -> None:
        raise NonFiniteLogits("failed")

    with monkeypatch.context() as patch:
        patch.setattr(type(decoder), "forward", fail)
        with pytest.raises(NonFiniteLogits):
            fork.feed([7])
    assert list(differences(whole_state(fork), before)) == []
    fork.feed([7])
    assert len(fork.cache.segments) < MAX_BORDERS


def test_cells_of_all_heads_are_not_merged_with_those_of_single_heads() -> None:
    """Restore a file that names another budget than that of its archive, and go on."""
    session = MODEL.session(40, 4, "archive", method="knorm", budget="heads", window=12)
    session.feed(TEXT[:80])
    snapshot = session.snapshot()
    policy = {**snapshot.policy, "budget": "uniform"}
    restored = MODEL.restore(replace(snapshot, policy=policy))
    restored.feed(TEXT[80:90])
    archived = [segment for segment in restored.cache.segments if segment.compressed]
    assert len(archived) == 2

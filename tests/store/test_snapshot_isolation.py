"""A snapshot and the sessions around it do not share mutable state."""

import copy
from dataclasses import fields
from typing import Any

import torch
from small_models import small_model

from kvkeep import Sampling, Snapshot

MODEL = small_model()
TEXT = [(i * 7) % 250 + 1 for i in range(60)]
SAMPLING = Sampling(temperature=1.0, seed=3)


def contents_of(snapshot: Snapshot) -> dict[str, Any]:
    """Copy every field of a snapshot, its memory and its cache, and the cells of its segments."""
    memory, cache = snapshot.memory, snapshot.memory.cache
    parts = [(snapshot, {"memory"}), (memory, {"cache"}), (cache, {"segments"})]
    contents = {
        f"{type(part).__name__}.{f.name}": copy.deepcopy(getattr(part, f.name))
        for part, left_out in parts
        for f in fields(part)
        if f.name not in left_out
    }
    for index, segment in enumerate(snapshot.segments):
        cells = segment.read(0, segment.length)
        contents |= {f"{index}.{f.name}": getattr(cells, f.name) for f in fields(cells)}
        contents[f"{index}.map"] = segment.position_map
    return contents


def assert_same(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert first.keys() == second.keys()
    for name, value in first.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, second[name]), name
        else:
            assert value == second[name], name


def test_later_changes_of_a_session_do_not_reach_its_snapshot() -> None:
    session = MODEL.session(32)
    session.feed(TEXT)
    session.name("said", 40, 45)
    session.next_token(SAMPLING)
    snapshot = session.snapshot()
    before = contents_of(snapshot)
    session.name("later", 50, 55)
    session.name("said", 41, 42)
    session.next_token(SAMPLING)
    session.pin(50, 54)
    session.keep = 6
    session.delete(45, 47)
    session.feed(TEXT)
    session.prefill_step = 7
    assert_same(contents_of(snapshot), before)
    assert list(MODEL.restore(snapshot).spans) == ["said"]


def test_changes_of_a_snapshot_or_a_restored_session_reach_no_other_session() -> None:
    session = MODEL.session(32)
    session.feed(TEXT)
    session.name("said", 40, 45)
    snapshot = session.snapshot()
    changed, restored = MODEL.restore(snapshot), MODEL.restore(snapshot)
    expected = session.logits
    snapshot.logits.zero_()
    snapshot.hidden.zero_()
    snapshot.settings["spans"]["more"] = (1, 2)
    changed.name("mine", 50, 55)
    changed.next_token(SAMPLING)
    for unchanged in (session, restored):
        assert torch.equal(unchanged.logits, expected)
        assert list(unchanged.spans) == ["said"]
        unchanged.rewind(1)
    assert torch.equal(session.logits, restored.logits)

"""A snapshot that was taken is what it was, whatever becomes of the session, and the reverse."""

import copy
from dataclasses import fields
from typing import Any

import torch
from small import small_model

from kvkeep import Sampling, Snapshot

MODEL = small_model()
TEXT = [(i * 7) % 250 + 1 for i in range(60)]
HOW = Sampling(temperature=1.0, seed=3)


def all_of(snapshot: Snapshot) -> dict[str, Any]:
    """Copies of all fields of a snapshot, its memory and its cache; cells as they are read."""
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
        contents[f"{index}.map"] = segment.map
    return contents


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, other[name]), name
        else:
            assert value == other[name], name


def test_what_a_session_does_later_is_not_in_a_snapshot_taken_before() -> None:
    session = MODEL.session(32)
    session.feed(TEXT)
    session.name("said", 40, 45)
    session.next_token(HOW)
    taken = session.snapshot()
    before = all_of(taken)
    session.name("later", 50, 55)
    session.name("said", 41, 42)
    session.next_token(HOW)
    session.pin(50, 54)
    session.keep = 6
    session.delete(45, 47)
    session.feed(TEXT)
    session.prefill_step = 7
    assert_same(all_of(taken), before)
    assert list(MODEL.restore(taken).spans) == ["said"]


def test_what_is_written_into_a_snapshot_or_comes_of_one_is_in_no_other_session() -> None:
    session = MODEL.session(32)
    session.feed(TEXT)
    session.name("said", 40, 45)
    taken = session.snapshot()
    one, other = MODEL.restore(taken), MODEL.restore(taken)
    expected = session.logits
    taken.logits.zero_()
    taken.hidden.zero_()
    taken.settings["spans"]["more"] = (1, 2)
    one.name("mine", 50, 55)
    one.next_token(HOW)
    for each in (session, other):
        assert torch.equal(each.logits, expected)
        assert list(each.spans) == ["said"]
        each.rewind(1)
    assert torch.equal(session.logits, other.logits)

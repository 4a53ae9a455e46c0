"""An edit costs what the edit costs: cells that it does not touch stay where they lie."""

import random
from collections.abc import Callable

import pytest
import torch
from dense_reference import DenseMemory
from edit_actions import MODEL
from test_edits import distances, held

from kvkeep import Snapshot
from kvkeep.cache import KVCache, Segment
from kvkeep.policies.base import count_cells_to_pin
from kvkeep.session.held_tokens import exact_serials
from kvkeep.session.history import History
from kvkeep.session.session import Session

TEXT = [(i * i * 7 + 3 * i) % 255 + 1 for i in range(3000)]
FEW = 512  # what small segments are made one of, and what one sets aside for cells to come


def storages(session: Session) -> dict[int, int]:
    """The cells that fit into each storage of keys, by its address."""
    found = {}
    for segment in session.cache.segments:
        keys = segment.block.slots.keys
        storage = keys.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes() // max(
            1, keys.nbytes // len(segment.block.slots)
        )
    return found


def fed(count: int, policy: str, budget: int) -> Session:
    session = MODEL.session(budget, policy=policy)
    session.feed(TEXT[:count])
    session.next_token()  # a prompt's storage has no room for another
    return session


def pinned() -> Session:
    """A window that turned long ago, and a stretch before it that is pinned."""
    session = fed(300, "sliding", 2000)
    with session.span("tool"):
        session.feed(TEXT[:20])
    session.pin("tool")
    session.feed(TEXT)
    return session


BEGUN = {
    "full": lambda: fed(2800, "full", 4000),
    "window to be filled": lambda: fed(2500, "sliding", 4000),
    "window that turns": lambda: fed(2800, "sliding", 2000),
    "shift": lambda: fed(2500, "shift", 2400),
    "archive": lambda: fed(2800, "archive", 2400),
}
EDITS: dict[str, Callable[[Session, int], object]] = {
    "delete": lambda session, at: session.delete(at, at + 9),
    "insert": lambda session, at: session.insert(at, TEXT[:9]),
    "replace": lambda session, at: session.replace(at, at + 9, TEXT[:9]),
}


def copied(session: Session, call: Callable[[], object]) -> int:
    """How many cells fit into storage that a call and the next token made."""
    before = storages(session)
    call()
    session.next_token()
    return sum(cells for address, cells in storages(session).items() if address not in before)


@pytest.mark.parametrize("begun", ["full", "window to be filled"])
@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_an_edit_in_place_copies_no_cell(begun, edit) -> None:
    session = BEGUN[begun]()
    assert copied(session, lambda: edit(session, 200)) <= FEW
    assert copied(session, lambda: edit(session, len(session.tokens) - 90)) <= FEW


@pytest.mark.parametrize("begun", BEGUN.values(), ids=BEGUN)
@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_many_edits_copy_fewer_cells_than_are_held_times_edits(begun, edit) -> None:
    """Now and then segments are made one, or storage is given back that stands idle."""
    session, total = begun(), 0
    for back in range(190, 1090, 90):
        at = len(session.tokens) - back
        total += copied(session, lambda at=at: edit(session, at))
    assert total <= 0.4 * 10 * session.cache.cells


def test_an_edit_in_place_makes_no_list_of_all_tokens_or_cells(monkeypatch) -> None:
    session = BEGUN["full"]()
    session.name("tool", 300, 340)

    def refuse(*args: object) -> None:
        raise AssertionError("all tokens or cells are listed")

    for owner, name in ((History, "tolist"), (History, "__iter__"), (Segment, "serials")):
        monkeypatch.setattr(owner, name, refuse)
    for edit in EDITS.values():
        edit(session, 200)
        edit(session, len(session.tokens) - 90)
    session.replace("tool", None, TEXT[:9])
    session.pin("tool")
    session.delete("tool")


def test_pins_are_not_counted_in_a_window_without_any(monkeypatch) -> None:
    session, calls = BEGUN["window to be filled"](), list[int]()
    serials = KVCache.serials
    monkeypatch.setattr(KVCache, "serials", lambda cache: calls.append(1) or serials(cache))
    for edit in EDITS.values():
        edit(session, 200)
    assert not calls
    session.pin(300, 310)
    assert calls


@pytest.mark.parametrize("begin", [BEGUN["full"], BEGUN["window that turns"], pinned])
def test_cells_to_pin_are_counted(begin: Callable[[], Session]) -> None:
    memory, draw = begin().core.memory, random.Random(2)
    held, forgotten = memory.cache.serials(), list(range(-3, 0))
    for count in (0, 1, 20):
        pins = frozenset(draw.sample(held, count) + forgotten[:count])
        for keep in (0, 4, 400):
            expected = sum(serial in pins for serial in held[keep:])
            assert count_cells_to_pin(memory.cache, keep, pins) == expected


def forgetful() -> Session:
    """A session with forgotten tokens, pins among them, and tokens inserted between others."""
    session = pinned()
    total = len(session.tokens)
    session.insert(total - 50, TEXT[:7])
    session.delete(total - 400, total - 390)
    session.replace(310, 315, TEXT[:2])  # of the pinned stretch
    return session


def compressed() -> Session:
    """A session of which the older half is compressed, but for a pinned stretch."""
    session = fed(600, "full", 700)
    session.pin(200, 220)
    session.compress(2.0, recent=200, method="knorm")
    session.insert(500, TEXT[:7])
    return session


@pytest.mark.parametrize("begin", [BEGUN["full"], BEGUN["archive"], forgetful, compressed])
def test_the_tokens_of_a_range_that_have_cells_are_counted(begin: Callable[[], Session]) -> None:
    memory, draw = begin().core.memory, random.Random(1)
    held_serials, total = set(memory.cache.serials()), len(memory.tokens)
    is_held = [serial in held_serials for serial in memory.serials]
    assert exact_serials(memory.cache.segments).tolist() == [
        s for s in memory.serials if s in held_serials
    ]
    for _ in range(200):
        start = draw.randint(0, total)
        end = min(total, start + draw.choice([0, 1, 5, 50, total]))
        assert memory.count_exact(start, end) == sum(is_held[start:end])


@pytest.mark.parametrize("count", [20, 15, 25])
def test_a_pinned_stretch_is_replaced_beside_a_window_that_stays(count: int) -> None:
    session = pinned()
    assert copied(session, lambda: session.replace("tool", None, TEXT[:count])) <= FEW
    assert copied(session, lambda: session.replace("tool", None, TEXT[7:][:20])) <= FEW


def test_a_pin_in_a_window_that_turns_copies_no_cell() -> None:
    session = fed(2800, "sliding", 2000)
    assert copied(session, lambda: session.pin(2000, 2020)) <= FEW
    assert copied(session, lambda: session.unpin(2000, 2020)) <= FEW


@pytest.mark.parametrize("policy", ["full", "sliding"])
def test_many_small_edits_do_not_leave_many_segments(policy: str) -> None:
    session, draw = fed(1000, policy, 1024), random.Random(0)
    for _ in range(150):
        at = draw.randrange(600, len(session.tokens) - 9)
        session.replace(at, at + 4, TEXT[at:][:4])
        assert len(session.cache.segments) <= 24


@pytest.mark.parametrize(("policy", "budget"), [("full", 700), ("sliding", 420), ("shift", 420)])
def test_long_segments_that_were_cut_say_what_the_naive_memory_says(
    policy: str, budget: int, tmp_path
) -> None:
    """So long that no two of them are made one again."""
    keep, draw = (budget if policy == "full" else 4), random.Random(3)
    session = MODEL.session(budget, policy=policy, keep=None if policy == "full" else 4)
    dense = DenseMemory(
        MODEL.decoder, budget, keep, 0 if policy == "shift" else 1, bounded=policy != "full"
    )
    for each in (session, dense):
        each.feed(TEXT[:560])
    for turn in range(8):
        start = len(session.tokens) - draw.randint(20, 200)
        end, new = start + draw.randint(0, 6), TEXT[turn:][: draw.randint(0, 6) or 6]
        session.replace(start, end, new) if end > start else session.insert(start, new)
        dense.edit(start, end, new, False)
        if turn == 3:
            for each in (session, dense):
                each.pin(start - 40, start - 30)
        if turn == 5:
            session.snapshot().save(tmp_path / "file")
            session = MODEL.restore(Snapshot.load(tmp_path / "file"))
        for each in (session, dense):
            each.feed(TEXT[turn:][:3])
        assert held(session) == [i for i, t in enumerate(dense.tokens) if t.held]
        assert distances(session) == list(range(session.cache.cells - 1, -1, -1))
        assert (session.logits - dense.logits()).abs().max() <= 1e-3
    assert torch.isfinite(session.logits).all()

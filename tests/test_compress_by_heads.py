"""Compressing a session where heads compete for cells: who gets how many, and what that costs."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from policies.archives import same, state
from small import small_model
from test_compress import TEXT, calibration, cells_of, fed, require_untouched

from kvkeep.cache import NO_TOKEN, Ragged
from kvkeep.compression.methods import BUDGETS, METHODS, Candidates, Eviction, make_method
from kvkeep.compression.plan import newest_queries
from kvkeep.errors import InvalidArgument
from kvkeep.session.session import Session

SCORING = [name for name, method in METHODS.items() if issubclass(method, Eviction)]
OF_CELLS = [
    name for name in SCORING if not METHODS[name].uses_reconstruction
]  # and of nothing else
OTHERS = [name for name in METHODS if name not in SCORING]
HEADS = 4  # layers times KV heads of the small model


def ragged_in(session: Session) -> list[Ragged]:
    slots = [segment.block.slots for segment in session.cache.segments]
    return [cells for cells in slots if isinstance(cells, Ragged)]


def total_in(session: Session) -> int:
    """Of all heads, those that are compressed."""
    return sum(cells.total for cells in ragged_in(session))


@settings(max_examples=40)
@given(
    st.sampled_from(SCORING),
    st.integers(20, 700),
    st.floats(1.01, 12),
    st.integers(1, 120),
    st.lists(st.integers(4, 500), max_size=3),
)
def test_it_leaves_exactly_as_many_as_asked_for_in_all_heads_or_changes_nothing(
    method: str, total: int, ratio: float, recent: int, pins: list[int]
) -> None:
    session = fed(total)
    for start in pins:
        if start + 3 < total and not set(range(start, start + 3)) & session.core.memory.pins:
            session.pin(start, start + 3)
    before, cells, pinned = state(session), cells_of(session), sorted(session.core.memory.pins)
    try:
        known = calibration() if METHODS[method].uses_surrogate else None
        report = session.compress(ratio, method, recent, budget="heads", calibration=known)
    except InvalidArgument:
        assert same(state(session), before)
        return
    kept = sorted({*range(4), *range(total - recent, total), *pinned})
    require_untouched(cells, cells_of(session), kept)
    assert sorted(cells_of(session)) == kept
    asked = math.ceil(total / ratio) - len(kept)
    assert total_in(session) == asked * HEADS
    runs = sum(b - a > 1 for a, b in pairwise(kept))
    assert report.budget == "heads"
    assert report.cells_before == total
    assert report.cells_after == session.cache.cells
    assert 0 <= report.cells_after - math.ceil(total / ratio) < runs  # each run is rounded up
    assert report.bytes_after == session.cache.nbytes
    assert len(report.chunks) == runs
    assert sum(chunk.cells_before for chunk in report.chunks) == total - len(kept)
    session.feed(TEXT[:5])
    assert session.cache.cells == report.cells_after + 5


@pytest.mark.parametrize("method", OF_CELLS)
def test_what_is_worth_most_stays_whichever_head_it_is_in(method: str) -> None:
    """Each chunk of 512 is scored by itself, and the best of all scores stay."""
    session = fed(700)
    cells = session.cache.segments[0].read(4, 676)
    chosen = make_method(method)
    known = calibration() if chosen.uses_surrogate else None
    candidates = Candidates(cells, session.cache.rope, session.cache.scale)
    candidates = replace(candidates, statistics=known.statistics if known else None)
    assert isinstance(chosen, Eviction)
    if chosen.needs_queries(None):
        candidates = replace(candidates, queries=newest_queries(session.core.memory))
    scores = torch.cat(
        [
            chosen.score(candidates.part(slice(0, 512))),
            chosen.score(candidates.part(slice(512, 676))),
        ],
        -1,
    )
    session.compress(4.0, method, recent=20, budget="heads", calibration=known)
    (left,) = ragged_in(session)
    stays = [torch.isin(cells.positions, own.positions.flatten()) for _, _, own in left.heads()]
    every = torch.stack(stays).view(scores.shape)
    assert int(every.sum()) == left.total == (700 // 4 - 24) * HEADS
    assert scores[every].min() >= scores[~every].max()
    for layer, head, own in left.heads():
        there = every[layer, head]
        assert torch.equal(own.keys[0, 0], cells.keys[layer, head, there])
        assert torch.equal(own.values[0, 0], cells.values[layer, head, there])
        assert own.bias is not None
        assert not own.bias.any()


def test_heads_get_numbers_of_their_own_and_bytes_fall_by_the_ratio() -> None:
    session = fed(800)
    before = session.cache.nbytes
    report = session.compress(4.0, "keydiff", recent=20, budget="heads")
    (left,) = ragged_in(session)
    assert int(left.counts.max()) > 1.1 * int(left.counts.min())
    assert (report.bytes_before, report.bytes_after) == (before, session.cache.nbytes)
    beside = 12 / (2 * 16 * 4)  # bias and position beside a key and a value
    assert session.cache.nbytes <= (1 + beside) * before / 4


@pytest.mark.parametrize(
    ("ratio", "pinned", "newest"), [(2, 0, 200), (4, 0, 100), (5, 0, 64), (8, 0, 32), (4, 150, 32)]
)
def test_half_of_what_is_left_is_the_newest_and_less_where_little_is_left(
    ratio: float, pinned: int, newest: int
) -> None:
    session = fed(800)
    if pinned:
        session.pin(100, 100 + pinned)
    session.compress(ratio, "keydiff", budget="heads")
    exact = [serial for serial in session.cache.serials() if serial != NO_TOKEN]
    assert exact == [*range(4), *range(100, 100 + pinned), *range(800 - newest, 800)]


@pytest.mark.parametrize(
    ("ratio", "recent", "said"), [(0.5, None, "a ratio above 1; found 0.5$"), (2, 0, "found 0$")]
)
def test_a_ratio_or_a_number_that_cannot_be_is_named(
    ratio: float, recent: int | None, said: str
) -> None:
    with pytest.raises(InvalidArgument, match=said):
        fed().compress(ratio, "keydiff", recent, budget="heads")


def test_progress_counts_every_cell_once_and_none_that_stays() -> None:
    session = fed(700)
    session.pin(300, 310)
    told: list[int] = []
    session.compress(4.0, "keydiff", recent=20, budget="heads", progress=told.append)
    assert told == [296, 370]


@pytest.mark.parametrize("method", OTHERS)
def test_a_method_without_scores_is_refused_before_anything_is_changed(method: str) -> None:
    session = fed()
    before, told = state(session), list[int]()
    with pytest.raises(InvalidArgument, match=r'has no scores.*budget="uniform"'):
        session.compress(2.0, method, budget="heads", progress=told.append)
    assert same(state(session), before)
    assert told == []


@pytest.mark.parametrize("budget", ["head", "", "Heads", 3, True])
def test_a_budget_of_another_name_is_refused(budget: object) -> None:
    session = fed()
    before = state(session)
    with pytest.raises(InvalidArgument, match=f"one of {', '.join(BUDGETS)}"):
        session.compress(2.0, "keydiff", budget=budget)  # type: ignore[arg-type]
    assert same(state(session), before)


def test_uniform_is_what_no_head_gets_more_than_another_by() -> None:
    one, other = fed(), fed()
    assert one.compress(3.0, "keydiff").budget == "uniform"
    other.compress(3.0, "keydiff", budget="uniform")
    assert same(state(one), state(other))
    assert not ragged_in(one)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("ratio", [1.001, 1.01, 1.5, 4.0])
@pytest.mark.parametrize("recent", [5, 20, 40])
def test_what_heads_left_can_be_compressed_again(budget: str, ratio: float, recent: int) -> None:
    """However few, and although of `recent` tokens some are compressed already."""
    session = fed(300)
    session.pin(100, 103)
    session.compress(2.0, "keydiff", recent=20, budget="heads")
    before, exact = session.cache.cells, cells_of(session)
    total = total_in(session)
    report = session.compress(ratio, "keydiff", recent, budget=budget)  # type: ignore[arg-type]
    assert report.cells_before == before
    assert report.cells_after == session.cache.cells
    assert 0 <= report.cells_after <= math.ceil(before / ratio) + 1  # two runs of them
    assert total_in(session) <= total + 15 * HEADS
    kept = [s for s in exact if s < 4 or s >= 300 - recent or s in session.core.memory.pins]
    require_untouched(exact, cells_of(session), kept)
    assert set(cells_of(session)) == set(kept)
    session.feed(TEXT[:9])
    assert session.logits.isfinite().all()


def test_as_large_a_share_of_each_heads_cells_stays_when_all_become_fewer() -> None:
    session = fed(400)
    session.compress(2.0, "keydiff", recent=20, budget="heads")
    (before,) = ragged_in(session)
    session.compress(2.0, "keydiff", recent=20, budget="uniform")
    (after,) = ragged_in(session)
    share = after.total / before.total
    assert (after.counts - before.counts * share).abs().max() <= 1
    assert len(after) + 24 == session.cache.cells == 100


@pytest.mark.parametrize("method", [*OF_CELLS, *OTHERS])
def test_every_method_takes_what_heads_left(method: str) -> None:
    session = fed(300)
    session.compress(2.0, "keydiff", recent=20, budget="heads")
    known = calibration() if METHODS[method].uses_surrogate else None
    session.compress(2.0, method, recent=20, budget="uniform", calibration=known)
    assert session.cache.cells == 75
    session.feed(TEXT[:9])
    assert session.logits.isfinite().all()


def test_what_heads_left_cannot_be_repeated() -> None:
    session = fed(300)
    session.compress(2.0, "keydiff", recent=20, budget="heads")
    before = state(session)
    with pytest.raises(InvalidArgument, match="126 compressed ones of 150"):
        session.compress(2.0, "kvzip", recent=20)
    assert same(state(session), before)


def test_after_the_sinks_are_deleted_it_can_be_compressed_again() -> None:
    session = fed(300)
    session.compress(2.0, "keydiff", recent=20, budget="heads")
    session.delete(0, 4)
    session.compress(2.0, "keydiff", recent=20, budget="heads")
    assert session.cache.cells == 73
    assert len(cells_of(session)) == 20


def test_the_fork_from_before_is_what_it_was_and_forks_after_share_storage() -> None:
    session, alone = fed(), fed()
    fork = session.fork()
    session.compress(3.0, "keydiff", recent=40, budget="heads")
    assert torch.equal(session.logits, alone.logits)  # of the last token, which stays
    later = session.fork()
    (cells,), (shared,) = ragged_in(session), ragged_in(later)
    assert cells.keys.data_ptr() == shared.keys.data_ptr()
    for _ in range(5):
        assert session.next_token() == later.next_token()
        assert fork.next_token() == alone.next_token()
    assert (session.logits - later.logits).abs().max() <= 1e-4
    assert (fork.logits - alone.logits).abs().max() <= 1e-4


@pytest.mark.parametrize("bits", ["8", "8/4", "4"])
def test_quantised_cells_are_chosen_as_they_are_kept(bits: str) -> None:
    """None is quantised twice: what stays has the bytes that it had."""
    session = small_model().session(policy="full", kv_bits=bits)  # type: ignore[arg-type]
    session.feed(TEXT[:300])
    before = session.cache.segments[0].read(4, 276)
    session.compress(3.0, "keydiff", recent=20, budget="heads")
    (left,) = ragged_in(session)
    for layer, head, own in left.heads():
        there = torch.isin(before.positions, own.positions.flatten())
        for name in ("stored_keys", "stored_values"):
            mine, its = getattr(own, name), getattr(before, name)
            assert torch.equal(mine.data[0, 0], its.data[layer, head, there])
            assert torch.equal(mine.scale[0, 0], its.scale[layer, head, there])


def test_an_edit_behind_them_copies_none_and_a_rewind_leaves_them() -> None:
    session = fed(300)
    session.compress(2.0, "keydiff", recent=40, budget="heads")
    (before,) = ragged_in(session)
    session.replace(290, 294, TEXT[:2])
    session.rewind(5)
    session.insert(280, TEXT[:3])
    (after,) = ragged_in(session)
    assert after.keys.data_ptr() == before.keys.data_ptr()
    (segment,) = (s for s in session.cache.segments if s.compressed)
    assert segment.map.offset == 1  # two for four, and three more
    with pytest.raises(InvalidArgument):
        session.delete(100, 103)
    with pytest.raises(InvalidArgument, match="rewind takes 0 to"):
        session.rewind(100)

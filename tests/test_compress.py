"""Compressing a session at once: what stays, what it costs, and how the session goes on."""

import math
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from policies.archives import same, state
from small import small_model

from kvkeep import Calibration, calibrate
from kvkeep.cache import Cells
from kvkeep.compression.methods import METHODS, Candidates, make_method
from kvkeep.compression.plan import CompressionReport, newest_queries
from kvkeep.errors import ContextFull, InvalidArgument
from kvkeep.session.session import Session

MODEL = small_model()
TEXT = [(i * i * 7 + 3 * i) % 255 + 1 for i in range(900)]
Cell = tuple[torch.Tensor, torch.Tensor, int]


@cache
def calibration() -> Calibration:
    return calibrate(MODEL, [TEXT[i % 900] for i in range(8 * 512)])


def compressed(session: Session, ratio: float, method: str, recent: int) -> CompressionReport:
    """In each head alike; by what is known of the model, if the method cannot do without it."""
    known = calibration() if make_method(method).uses_surrogate else None
    return session.compress(ratio, method, recent, calibration=known, budget="uniform")


def fed(count: int = 300, model=MODEL) -> Session:  # type: ignore[no-untyped-def]
    session = model.session(policy="full")
    session.feed(TEXT[:count])
    return session


def cells_of(session: Session) -> dict[int, Cell]:
    """Keys, values and position of each cell that is a token's, by its serial."""
    found = {}
    for segment in session.cache.segments:
        cells = segment.read(0, segment.length)
        if not segment.compressed:
            for index, serial in enumerate(cells.serials.tolist()):
                position = int(cells.positions[index]) - segment.map.offset
                found[serial] = (cells.keys[:, :, index], cells.values[:, :, index], position)
    return found


def require_untouched(before: dict[int, Cell], after: dict[int, Cell], serials: list[int]) -> None:
    for serial in serials:
        for one, other in zip(before[serial], after[serial], strict=True):
            assert one == other if isinstance(one, int) else torch.equal(one, other)


@settings(max_examples=40)
@given(
    st.sampled_from(list(METHODS)),
    st.integers(20, 700),
    st.floats(1.01, 12),
    st.integers(1, 120),
    st.lists(st.integers(4, 500), max_size=3),
)
def test_it_leaves_as_many_as_asked_for_or_changes_nothing(
    method: str, total: int, ratio: float, recent: int, pins: list[int]
) -> None:
    session = fed(total)
    for start in pins:
        if start + 3 < total and not set(range(start, start + 3)) & session.core.memory.pins:
            session.pin(start, start + 3)
    before, cells, pinned = state(session), cells_of(session), sorted(session.core.memory.pins)
    try:
        report = compressed(session, ratio, method, recent)
    except InvalidArgument:
        assert same(state(session), before)
        return
    assert report.cells_before == total
    assert report.cells_after == session.cache.cells <= math.ceil(total / ratio)
    assert report.bytes_after == session.cache.nbytes
    kept = sorted({*range(4), *range(total - recent, total), *pinned})
    require_untouched(cells, cells_of(session), kept)
    assert sorted(cells_of(session)) == kept
    assert sum(chunk.cells_before for chunk in report.chunks) <= total - len(kept)
    session.feed(TEXT[:5])
    assert session.cache.cells == report.cells_after + 5


@pytest.mark.parametrize("method", METHODS)
def test_memory_is_freed(method: str) -> None:
    session = fed(800)
    before = session.cache.nbytes
    report = compressed(session, 4.0, method, recent=20)
    assert (report.bytes_before, report.bytes_after) == (before, session.cache.nbytes)
    beside = 12 / (2 * 16 * 4)  # bias and position beside a key and a value
    assert session.cache.nbytes <= (1 + beside) * before / 4


@pytest.mark.parametrize("method", METHODS)
def test_a_session_goes_on_and_a_fork_from_before_is_what_it_was(method: str) -> None:
    session, alone = fed(), fed()
    fork = session.fork()
    compressed(session, 3.0, method, recent=40)
    assert torch.equal(session.logits, alone.logits)  # of the last token, which stays
    written = session.next_token()
    assert session.rewind(12) == [*TEXT[289:300], written]
    session.delete(280, 283)
    session.insert(270, TEXT[:6])
    session.feed(TEXT[300:340])
    assert session.logits.isfinite().all()
    for _ in range(5):
        assert fork.next_token() == alone.next_token()
    assert (fork.logits - alone.logits).abs().max() <= 1e-4


def test_rewinding_within_the_recent_is_as_if_it_had_not_been_said() -> None:
    session, straight = fed(300), fed(300)
    for each in (session, straight):
        each.compress(3.0, "keydiff", recent=40)
        each.feed(TEXT[:1])
    session.feed(TEXT[1:9])
    session.rewind(8)
    assert (session.logits - straight.logits).abs().max() <= 1e-4
    with pytest.raises(InvalidArgument, match="rewind takes 0 to 40"):
        session.rewind(41)


@pytest.mark.parametrize("ratio", [1.0, 0.5, 0.0, -2.0, math.nan, math.inf, 1e9])
def test_a_ratio_that_cannot_be_is_refused(ratio: float) -> None:
    session = fed()
    before = state(session)
    with pytest.raises(InvalidArgument):
        session.compress(ratio)
    assert same(state(session), before)


@pytest.mark.parametrize("wrong", [{"method": "best"}, {"recent": 0}, {"recent": 299}])
def test_what_is_asked_wrongly_changes_nothing(wrong: dict) -> None:
    session = fed()
    before = state(session)
    with pytest.raises(InvalidArgument):
        session.compress(2.0, **wrong)
    assert same(state(session), before)


@pytest.mark.parametrize("policy", ["sliding", "shift", "archive", "self_extend"])
def test_other_policies_are_told_which_to_take(policy: str) -> None:
    session = MODEL.session(400, policy=policy, **{"window": 64} if policy == "self_extend" else {})
    session.feed(TEXT[:200])
    before = state(session)
    with pytest.raises(InvalidArgument, match='policy="full" when it is asked to'):
        session.compress(2.0)
    assert same(state(session), before)


def test_no_distance_exceeds_the_trained_length_afterwards() -> None:
    model = small_model(max_positions=400)
    session = fed(300, model)
    session.compress(4.0, "keydiff", recent=20)
    assert session.cache.cells == 75
    assert session.room == 100
    session.feed(TEXT[:100])
    with pytest.raises(ContextFull):
        session.feed([1])
    now = session.cache.time - 1
    for segment in session.cache.segments:
        positions = segment.read(0, segment.length).positions
        assert int((segment.map(now) - positions).max()) < 400


def test_observing_methods_look_from_where_an_edit_has_put_them() -> None:
    session = fed(300)
    session.delete(250, 280)
    segment, queries = session.cache.segments[0], newest_queries(session.core.memory)
    assert segment.map.offset == -30
    cells = segment.read(4, 246)
    there = Cells(
        session.cache.rope.shifted(cells.keys, torch.tensor([30])),
        cells.values,
        cells.positions + 30,
        cells.serials,
    )
    candidates = Candidates(there, session.cache.rope, session.cache.scale, queries)
    session.compress(1.5, "snapkv", recent=20)
    chosen = session.cache.segments[1].block.slots
    expected = make_method("snapkv").compress(candidates, len(chosen)).cells
    assert torch.equal(chosen.positions + 30, expected.positions)


def test_the_report_tells_of_every_chunk_also_of_those_that_vanish() -> None:
    session = MODEL.session(policy="full")
    session.feed(TEXT * 3)
    told: list[int] = []
    report = session.compress(35, "knorm", recent=70, progress=told.append)
    compressible = 3 * len(TEXT) - 4 - 70
    assert min(chunk.cells_after for chunk in report.chunks) == 0
    assert sum(chunk.cells_before for chunk in report.chunks) == sum(told) == compressible
    assert sum(chunk.cells_after for chunk in report.chunks) == report.cells_after - 74

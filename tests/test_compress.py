"""Session.compress: which cells are kept, freed memory, and how the session continues."""

import math
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from policies.archives import same, state
from small_models import small_model

from kvkeep import Calibration, calibrate
from kvkeep.cache import Cells
from kvkeep.compression.methods import METHODS, make_method
from kvkeep.compression.methods.base import Candidates
from kvkeep.errors import ContextFull, InvalidArgument
from kvkeep.session.compression import CompressionReport, reevaluate_newest_queries
from kvkeep.session.session import Session
from tests.examples import examples

MODEL = small_model()
TEXT = [(i * i * 7 + 3 * i) % 255 + 1 for i in range(900)]
Cell = tuple[torch.Tensor, torch.Tensor, int]


@cache
def calibration() -> Calibration:
    return calibrate(MODEL, [TEXT[i % 900] for i in range(8 * 512)])


def compress_uniformly(
    session: Session, ratio: float, method: str, recent: int
) -> CompressionReport:
    """Compress with budget "uniform", and with a calibration if the method requires one."""
    calibration_used = calibration() if make_method(method).uses_surrogate else None
    return session.compress(ratio, method, recent, calibration=calibration_used, budget="uniform")


def fed(count: int = 300, model=MODEL) -> Session:  # type: ignore[no-untyped-def]
    session = model.session(policy="full")
    session.feed(TEXT[:count])
    return session


def cells_of(session: Session) -> dict[int, Cell]:
    """Return the keys, values and position of each uncompressed cell, by its serial."""
    cells = {}
    for segment in session.cache.segments:
        segment_cells = segment.read(0, segment.length)
        if not segment.compressed:
            for index, serial in enumerate(segment_cells.serials.tolist()):
                position = int(segment_cells.positions[index]) - segment.position_map.offset
                cells[serial] = (
                    segment_cells.keys[:, :, index],
                    segment_cells.values[:, :, index],
                    position,
                )
    return cells


def pinned_tokens(session: Session) -> list[int]:
    """Return the indices of pinned tokens, which equal their serials in an unedited session."""
    return [index for index, status in enumerate(session.token_status) if status == "pinned"]


def require_unchanged(before: dict[int, Cell], after: dict[int, Cell], serials: list[int]) -> None:
    """Require that the cells with these serials are bit-identical."""
    for serial in serials:
        for expected, actual in zip(before[serial], after[serial], strict=True):
            assert (
                expected == actual if isinstance(expected, int) else torch.equal(expected, actual)
            )


@settings(max_examples=examples(15))
@given(
    st.sampled_from(list(METHODS)),
    st.integers(20, 700),
    st.floats(1.01, 12),
    st.integers(1, 120),
    st.lists(st.integers(4, 500), max_size=3),
)
def test_compress_reaches_the_ratio_or_changes_nothing(
    method: str, total: int, ratio: float, recent: int, pins: list[int]
) -> None:
    session = fed(total)
    for start in pins:
        if start + 3 < total and not set(range(start, start + 3)) & set(pinned_tokens(session)):
            session.pin(start, start + 3)
    before, cells, pinned = state(session), cells_of(session), pinned_tokens(session)
    try:
        report = compress_uniformly(session, ratio, method, recent)
    except InvalidArgument:
        assert same(state(session), before)
        return
    assert report.cells_before == total
    assert report.cells_after == session.cache.cells <= math.ceil(total / ratio)
    assert report.bytes_after == session.cache.nbytes
    kept_serials = sorted({*range(4), *range(total - recent, total), *pinned})
    require_unchanged(cells, cells_of(session), kept_serials)
    assert sorted(cells_of(session)) == kept_serials
    assert sum(chunk.cells_before for chunk in report.chunks) <= total - len(kept_serials)
    session.feed(TEXT[:5])
    assert session.cache.cells == report.cells_after + 5


@pytest.mark.parametrize("method", METHODS)
def test_compress_frees_memory(method: str) -> None:
    session = fed(800)
    before = session.cache.nbytes
    report = compress_uniformly(session, 4.0, method, recent=20)
    assert (report.bytes_before, report.bytes_after) == (before, session.cache.nbytes)
    overhead = 12 / (2 * 16 * 4)  # of bias and position, relative to a key and a value
    assert session.cache.nbytes <= (1 + overhead) * before / 4


@pytest.mark.parametrize("method", METHODS)
def test_a_compressed_session_continues_and_an_earlier_fork_is_unchanged(method: str) -> None:
    session, uncompressed = fed(), fed()
    fork = session.fork()
    compress_uniformly(session, 3.0, method, recent=40)
    assert torch.equal(
        session.logits, uncompressed.logits
    )  # those of the last token, which is kept
    generated = session.next_token()
    assert session.rewind(12) == [*TEXT[289:300], generated]
    session.delete(280, 283)
    session.insert(270, TEXT[:6])
    session.feed(TEXT[300:340])
    assert session.logits.isfinite().all()
    for _ in range(5):
        assert fork.next_token() == uncompressed.next_token()
    assert (fork.logits - uncompressed.logits).abs().max() <= 1e-4


def test_rewinding_recent_tokens_equals_never_feeding_them() -> None:
    session, expected_session = fed(300), fed(300)
    for fed_session in (session, expected_session):
        fed_session.compress(3.0, "keydiff", recent=40)
        fed_session.feed(TEXT[:1])
    session.feed(TEXT[1:9])
    session.rewind(8)
    assert (session.logits - expected_session.logits).abs().max() <= 1e-4
    with pytest.raises(InvalidArgument, match="rewind takes 0 to 40"):
        session.rewind(41)


@pytest.mark.parametrize("ratio", [1.0, 0.5, 0.0, -2.0, math.nan, math.inf, 1e9])
def test_an_invalid_ratio_is_refused(ratio: float) -> None:
    session = fed()
    before = state(session)
    with pytest.raises(InvalidArgument):
        session.compress(ratio)
    assert same(state(session), before)


@pytest.mark.parametrize("arguments", [{"method": "best"}, {"recent": 0}, {"recent": 299}])
def test_invalid_arguments_change_nothing(arguments: dict) -> None:
    session = fed()
    before = state(session)
    with pytest.raises(InvalidArgument):
        session.compress(2.0, **arguments)
    assert same(state(session), before)


@pytest.mark.parametrize("policy", ["sliding", "shift", "archive", "self_extend"])
def test_other_policies_are_refused_with_a_hint(policy: str) -> None:
    session = MODEL.session(400, policy=policy, **{"window": 64} if policy == "self_extend" else {})
    session.feed(TEXT[:200])
    before = state(session)
    with pytest.raises(InvalidArgument, match='policy="full" on request'):
        session.compress(2.0)
    assert same(state(session), before)


def test_no_distance_exceeds_the_trained_length_after_compression() -> None:
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
        assert int((segment.position_map(now) - positions).max()) < 400


def test_methods_that_use_queries_see_cells_at_their_edited_positions() -> None:
    session = fed(300)
    session.delete(250, 280)
    segment, queries = session.cache.segments[0], reevaluate_newest_queries(session.core.memory)
    assert segment.position_map.offset == -30
    cells = segment.read(4, 246)
    moved_cells = Cells(
        session.cache.rope.shift(cells.keys, torch.tensor([30])),
        cells.values,
        cells.positions + 30,
        cells.serials,
    )
    candidates = Candidates(moved_cells, session.cache.rope, session.cache.scale, queries)
    session.compress(1.5, "snapkv", recent=20)
    chosen = session.cache.segments[1].block.slots
    expected = make_method("snapkv").compress(candidates, len(chosen)).cells
    assert torch.equal(chosen.positions + 30, expected.positions)


def test_the_report_lists_every_chunk_including_fully_evicted_ones() -> None:
    session = MODEL.session(policy="full")
    session.feed(TEXT * 3)
    progress_counts: list[int] = []
    report = session.compress(35, "knorm", recent=70, progress=progress_counts.append)
    compressible = 3 * len(TEXT) - 4 - 70
    assert min(chunk.cells_after for chunk in report.chunks) == 0
    assert (
        sum(chunk.cells_before for chunk in report.chunks) == sum(progress_counts) == compressible
    )
    assert sum(chunk.cells_after for chunk in report.chunks) == report.cells_after - 74


def test_an_edit_in_place_stays_within_the_trained_length() -> None:
    """Compressed cells keep their distance: fewer cells make no room beyond it."""
    model = small_model(max_positions=400)
    session = model.session(policy="full")
    session.feed(TEXT[:380])
    session.compress(4, method="knorm")
    assert (session.cache.cells, session.room) == (95, 20)
    before = state(session)
    with pytest.raises(ContextFull, match="can become 20 tokens longer"):
        session.insert(370, TEXT[:21])
    assert same(state(session), before)
    session.insert(370, TEXT[:20])
    assert session.cache.reach == 400
    session.delete(375, 378)
    assert session.room == 3

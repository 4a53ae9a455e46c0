"""Session.compress with budget "heads": KV heads compete for cells."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from policies.archives import same, state
from small_models import small_model
from test_compress import TEXT, calibration, cells_of, fed, pinned_tokens, require_unchanged

from kvkeep.cache import NO_TOKEN, RaggedCells
from kvkeep.compression.methods import METHODS, make_method
from kvkeep.compression.methods.base import BUDGETS, Candidates, Eviction
from kvkeep.errors import InvalidArgument
from kvkeep.session.compression import reevaluate_newest_queries
from kvkeep.session.session import Session
from tests.examples import examples

SCORING = [name for name, method in METHODS.items() if issubclass(method, Eviction)]
SCORING_WITHOUT_TEXT = [
    name for name in SCORING if not METHODS[name].reconstruction_kind and not METHODS[name].residual
]
WITHOUT_SCORES = [name for name in METHODS if name not in SCORING]
HEADS = 4  # layers times KV heads of the small model


def ragged_cells(session: Session) -> list[RaggedCells]:
    slots = [segment.block.slots for segment in session.cache.segments]
    return [cells for cells in slots if isinstance(cells, RaggedCells)]


def ragged_total(session: Session) -> int:
    """Return the number of ragged cells over all heads."""
    return sum(cells.total for cells in ragged_cells(session))


@settings(max_examples=examples(15))
@given(
    st.sampled_from(SCORING),
    st.integers(20, 700),
    st.floats(1.01, 12),
    st.integers(1, 120),
    st.lists(st.integers(4, 500), max_size=3),
)
def test_compress_by_heads_keeps_the_exact_total_or_changes_nothing(
    method: str, total: int, ratio: float, recent: int, pins: list[int]
) -> None:
    session = fed(total)
    for start in pins:
        if start + 3 < total and not set(range(start, start + 3)) & set(pinned_tokens(session)):
            session.pin(start, start + 3)
    before, cells, pinned = state(session), cells_of(session), pinned_tokens(session)
    try:
        calibration_used = calibration() if METHODS[method].uses_surrogate else None
        report = session.compress(
            ratio, method, recent, budget="heads", calibration=calibration_used
        )
    except InvalidArgument:
        assert same(state(session), before)
        return
    kept_serials = sorted({*range(4), *range(total - recent, total), *pinned})
    require_unchanged(cells, cells_of(session), kept_serials)
    assert sorted(cells_of(session)) == kept_serials
    expected_per_head = math.ceil(total / ratio) - len(kept_serials)
    expected_total = expected_per_head * HEADS
    if METHODS[method].residual:  # heads that evict fewer cells have fewer residual ones
        assert expected_total - 0.2 * expected_total - HEADS <= ragged_total(session)
        assert ragged_total(session) <= expected_total
    else:
        assert ragged_total(session) == expected_total
    runs = sum(b - a > 1 for a, b in pairwise(kept_serials))
    assert report.budget == "heads"
    assert report.cells_before == total
    assert report.cells_after == session.cache.cells
    if not METHODS[method].residual:  # each run is rounded up
        assert 0 <= report.cells_after - math.ceil(total / ratio) < runs
    assert report.bytes_after == session.cache.nbytes
    assert len(report.chunks) == runs
    assert sum(chunk.cells_before for chunk in report.chunks) == total - len(kept_serials)
    session.feed(TEXT[:5])
    assert session.cache.cells == report.cells_after + 5


@pytest.mark.parametrize("method", SCORING_WITHOUT_TEXT)
def test_the_highest_scores_over_all_heads_are_kept(method: str) -> None:
    """Each chunk of 512 is scored separately, and the highest of all scores are kept."""
    session = fed(700)
    cells = session.cache.segments[0].read(4, 676)
    chosen = make_method(method)
    calibration_used = calibration() if chosen.uses_surrogate else None
    candidates = Candidates(cells, session.cache.rope, session.cache.scale)
    candidates = replace(
        candidates, statistics=calibration_used.statistics if calibration_used else None
    )
    assert isinstance(chosen, Eviction)
    if chosen.needs_queries(None):
        candidates = replace(candidates, queries=reevaluate_newest_queries(session.core.memory))
    scores = torch.cat(
        [
            chosen.score(candidates.part(slice(0, 512))),
            chosen.score(candidates.part(slice(512, 676))),
        ],
        -1,
    )
    session.compress(4.0, method, recent=20, budget="heads", calibration=calibration_used)
    (ragged,) = ragged_cells(session)
    kept_by_head = [
        torch.isin(cells.positions, head_cells.positions.flatten())
        for _, _, head_cells in ragged.heads()
    ]
    kept_mask = torch.stack(kept_by_head).view(scores.shape)
    assert int(kept_mask.sum()) == ragged.total == (700 // 4 - 24) * HEADS
    assert scores[kept_mask].min() >= scores[~kept_mask].max()
    for layer, head, head_cells in ragged.heads():
        in_head = kept_mask[layer, head]
        assert torch.equal(head_cells.keys[0, 0], cells.keys[layer, head, in_head])
        assert torch.equal(head_cells.values[0, 0], cells.values[layer, head, in_head])
        assert head_cells.bias is not None
        assert not head_cells.bias.any()


def test_a_method_does_not_use_the_scores_that_compaction_stored() -> None:
    session = fed(800)
    session.compact(400)
    (before,) = ragged_cells(session)
    assert before.scores is not None
    session.compress(2.0, "knorm", budget="heads", recent=session.cache.cells - len(before) - 4)
    (after,) = ragged_cells(session)
    norms, kept_norms = (cells.keys.norm(dim=-1).sort().values for cells in (before, after))
    assert 0 < len(kept_norms) < len(norms)
    assert torch.equal(kept_norms, norms[: len(kept_norms)])


def test_heads_keep_different_counts_and_memory_falls_by_the_ratio() -> None:
    session = fed(800)
    before = session.cache.nbytes
    report = session.compress(4.0, "keydiff", recent=20, budget="heads")
    (ragged,) = ragged_cells(session)
    assert int(ragged.counts.max()) > 1.1 * int(ragged.counts.min())
    assert (report.bytes_before, report.bytes_after) == (before, session.cache.nbytes)
    overhead = 12 / (2 * 16 * 4)  # of bias and position, relative to a key and a value
    assert session.cache.nbytes <= (1 + overhead) * before / 4


@pytest.mark.parametrize(
    ("ratio", "pinned", "newest"), [(2, 0, 200), (4, 0, 100), (5, 0, 64), (8, 0, 32), (4, 150, 32)]
)
def test_by_default_up_to_half_of_the_kept_cells_are_the_newest(
    ratio: float, pinned: int, newest: int
) -> None:
    session = fed(800)
    if pinned:
        session.pin(100, 100 + pinned)
    session.compress(ratio, "keydiff", budget="heads")
    exact = [serial for serial in session.cache.serials() if serial != NO_TOKEN]
    assert exact == [*range(4), *range(100, 100 + pinned), *range(800 - newest, 800)]


@pytest.mark.parametrize(
    ("ratio", "recent", "message"),
    [(0.5, None, "ratio must be above 1; found 0.5$"), (2, 0, "found 0$")],
)
def test_an_invalid_ratio_or_number_of_recent_tokens_is_named(
    ratio: float, recent: int | None, message: str
) -> None:
    with pytest.raises(InvalidArgument, match=message):
        fed().compress(ratio, "keydiff", recent, budget="heads")


def test_progress_counts_every_compressible_cell_once() -> None:
    session = fed(700)
    session.pin(300, 310)
    progress_counts: list[int] = []
    session.compress(4.0, "keydiff", recent=20, budget="heads", progress=progress_counts.append)
    assert progress_counts == [296, 370]


@pytest.mark.parametrize("method", WITHOUT_SCORES)
def test_a_method_without_scores_is_refused_and_changes_nothing(method: str) -> None:
    session = fed()
    before, progress_counts = state(session), list[int]()
    with pytest.raises(InvalidArgument, match=r'has no scores.*budget="uniform"'):
        session.compress(2.0, method, budget="heads", progress=progress_counts.append)
    assert same(state(session), before)
    assert progress_counts == []


@pytest.mark.parametrize("budget", ["head", "", "Heads", 3, True])
def test_an_unknown_budget_is_refused(budget: object) -> None:
    session = fed()
    before = state(session)
    with pytest.raises(InvalidArgument, match=f"one of {', '.join(BUDGETS)}"):
        session.compress(2.0, "keydiff", budget=budget)  # type: ignore[arg-type]
    assert same(state(session), before)


def test_budget_uniform_leaves_no_ragged_cells() -> None:
    default, explicit = fed(), fed()
    assert default.compress(3.0, "keydiff").budget == "uniform"
    explicit.compress(3.0, "keydiff", budget="uniform")
    assert same(state(default), state(explicit))
    assert not ragged_cells(default)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("ratio", [1.001, 1.01, 1.5, 4.0])
@pytest.mark.parametrize("recent", [5, 20, 40])
def test_ragged_cells_can_be_compressed_again(budget: str, ratio: float, recent: int) -> None:
    """This works at every ratio, and if some of the `recent` tokens are compressed already."""
    session = fed(300)
    session.pin(100, 103)
    session.compress(2.0, "keydiff", recent=20, budget="heads")
    before, exact = session.cache.cells, cells_of(session)
    total = ragged_total(session)
    report = session.compress(ratio, "keydiff", recent, budget=budget)  # type: ignore[arg-type]
    assert report.cells_before == before
    assert report.cells_after == session.cache.cells
    assert 0 <= report.cells_after <= math.ceil(before / ratio) + 1  # two runs, each rounded up
    assert ragged_total(session) <= total + 15 * HEADS
    pinned = pinned_tokens(session)
    kept_serials = [s for s in exact if s < 4 or s >= 300 - recent or s in pinned]
    require_unchanged(exact, cells_of(session), kept_serials)
    assert set(cells_of(session)) == set(kept_serials)
    session.feed(TEXT[:9])
    assert session.logits.isfinite().all()


def test_uniform_compression_keeps_an_equal_share_of_each_heads_ragged_cells() -> None:
    session = fed(400)
    session.compress(2.0, "keydiff", recent=20, budget="heads")
    (before,) = ragged_cells(session)
    session.compress(2.0, "keydiff", recent=20, budget="uniform")
    (after,) = ragged_cells(session)
    share = after.total / before.total
    assert (after.counts - before.counts * share).abs().max() <= 1
    assert len(after) + 24 == session.cache.cells == 100


@pytest.mark.parametrize("method", [*SCORING_WITHOUT_TEXT, *WITHOUT_SCORES])
def test_every_method_compresses_ragged_cells(method: str) -> None:
    session = fed(300)
    session.compress(2.0, "keydiff", recent=20, budget="heads")
    calibration_used = calibration() if METHODS[method].uses_surrogate else None
    session.compress(2.0, method, recent=20, budget="uniform", calibration=calibration_used)
    assert session.cache.cells == 75
    session.feed(TEXT[:9])
    assert session.logits.isfinite().all()


def test_kvzip_refuses_a_session_with_ragged_cells() -> None:
    session = fed(300)
    session.compress(2.0, "keydiff", recent=20, budget="heads")
    before = state(session)
    with pytest.raises(InvalidArgument, match="126 compressed of 150"):
        session.compress(2.0, "kvzip", recent=20)
    assert same(state(session), before)


def test_ragged_cells_can_be_compressed_again_after_deleting_the_sinks() -> None:
    session = fed(300)
    session.compress(2.0, "keydiff", recent=20, budget="heads")
    session.delete(0, 4)
    session.compress(2.0, "keydiff", recent=20, budget="heads")
    assert session.cache.cells == 73
    assert len(cells_of(session)) == 20


def test_earlier_forks_are_unchanged_and_later_forks_share_storage() -> None:
    session, uncompressed = fed(), fed()
    fork = session.fork()
    session.compress(3.0, "keydiff", recent=40, budget="heads")
    assert torch.equal(
        session.logits, uncompressed.logits
    )  # those of the last token, which is kept
    later = session.fork()
    (cells,), (shared,) = ragged_cells(session), ragged_cells(later)
    assert cells.keys.data_ptr() == shared.keys.data_ptr()
    for _ in range(5):
        assert session.next_token() == later.next_token()
        assert fork.next_token() == uncompressed.next_token()
    assert (session.logits - later.logits).abs().max() <= 1e-4
    assert (fork.logits - uncompressed.logits).abs().max() <= 1e-4


@pytest.mark.parametrize("bits", ["8", "8/4", "4"])
def test_kept_quantised_cells_are_bit_exact(bits: str) -> None:
    """No cell is quantised twice: kept cells have the same bytes."""
    session = small_model().session(policy="full", kv_bits=bits)  # type: ignore[arg-type]
    session.feed(TEXT[:300])
    before = session.cache.segments[0].read(4, 276)
    session.compress(3.0, "keydiff", recent=20, budget="heads")
    (ragged,) = ragged_cells(session)
    for layer, head, head_cells in ragged.heads():
        in_head = torch.isin(before.positions, head_cells.positions.flatten())
        for name in ("stored_keys", "stored_values"):
            kept_vectors, original_vectors = getattr(head_cells, name), getattr(before, name)
            assert torch.equal(kept_vectors.data[0, 0], original_vectors.data[layer, head, in_head])
            assert torch.equal(
                kept_vectors.scale[0, 0], original_vectors.scale[layer, head, in_head]
            )


def test_edits_and_rewinds_after_ragged_cells_do_not_copy_them() -> None:
    session = fed(300)
    session.compress(2.0, "keydiff", recent=40, budget="heads")
    (before,) = ragged_cells(session)
    session.replace(290, 294, TEXT[:2])
    session.rewind(5)
    session.insert(280, TEXT[:3])
    (after,) = ragged_cells(session)
    assert after.keys.data_ptr() == before.keys.data_ptr()
    (segment,) = (s for s in session.cache.segments if s.compressed)
    assert segment.position_map.offset == 1  # 4 tokens replaced by 2, then 3 inserted
    with pytest.raises(InvalidArgument):
        session.delete(100, 103)
    with pytest.raises(InvalidArgument, match="rewind takes 0 to"):
        session.rewind(100)

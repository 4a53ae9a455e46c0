"""Budget "heads": KV heads compete for cells, and the highest scores over all heads are kept."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from methods.candidates import HEAD_INDICES, KV_HEADS, LAYERS, random_candidates
from torch import Tensor

from kvkeep.cache import Cells, RaggedCells
from kvkeep.compression.methods import METHODS, make_method
from kvkeep.compression.methods.apply import (
    check_budget,
    compress_across_heads,
    compress_and_join,
    score,
    top_score_masks,
)
from kvkeep.compression.methods.base import Candidates, CellwiseEviction, Eviction
from kvkeep.errors import InvalidArgument
from tests.examples import examples

EVICTIONS = [name for name, method in METHODS.items() if issubclass(method, Eviction)]
# Methods whose result is some of the cells, chosen without queries: no residual cells.
SELECTIONS = [
    name for name in EVICTIONS if not (METHODS[name].reconstruction_kind or METHODS[name].residual)
]
CELLWISE = [name for name in EVICTIONS if issubclass(METHODS[name], CellwiseEviction)]


def ragged(candidates: Candidates, seed: int = 0) -> tuple[Candidates, Tensor]:
    """Keep about half of the cells as ragged ones. Returns them and the mask of the kept cells,
    `[layers, kv_heads, n]`.
    """
    heads = torch.tensor([[0.2, 0.9], [0.5, 1.0]]).unsqueeze(-1)
    random = torch.Generator().manual_seed(seed)
    which = torch.rand(LAYERS, KV_HEADS, len(candidates), generator=random) < heads
    cells = RaggedCells.select_from(RaggedCells.from_cells(candidates.cells), which.flatten())
    return replace(candidates, cells=cells), which


@settings(max_examples=examples(50))
@given(st.lists(st.integers(1, 30), min_size=1, max_size=4), st.data())
def test_no_evicted_cell_has_a_higher_score_than_a_kept_one(
    lengths: list[int], data: st.DataObject
) -> None:
    random = torch.Generator().manual_seed(len(lengths))
    scores = [torch.randn(LAYERS, KV_HEADS, n, generator=random) for n in lengths]
    count = data.draw(st.integers(1, sum(score.numel() for score in scores)))
    best = top_score_masks(scores, count)
    assert [part.shape for part in best] == [part.shape for part in scores]
    pairs = list(zip(scores, best, strict=True))
    kept, evicted = (torch.cat([s[b == x] for s, b in pairs]) for x in (True, False))
    assert len(kept) == count
    assert not len(evicted) or kept.min() >= evicted.max()


@pytest.mark.parametrize("name", CELLWISE)
def test_the_score_of_a_cell_does_not_depend_on_its_storage(name: str) -> None:
    candidates = random_candidates(1300, compressed=True, statistics=True)
    for ageing in (False, True):
        candidates = replace(candidates, ageing=ageing)
        expected = score(make_method(name), candidates)  # type: ignore[arg-type]
        row, which = ragged(candidates)
        # Age is counted from the newest cell of all heads, so that cell must be kept.
        which[..., -1] |= candidates.positions[..., -1] == candidates.positions.max()
        cells = RaggedCells.select_from(RaggedCells.from_cells(candidates.cells), which.flatten())
        result = score(make_method(name), replace(row, cells=cells))  # type: ignore[arg-type]
        torch.testing.assert_close(result, expected[which], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", SELECTIONS)
def test_ragged_cells_are_compressed_again_to_the_given_count(name: str) -> None:
    candidates, _ = ragged(random_candidates(60, compressed=True, queries=20, statistics=True))
    before = candidates.cells
    assert isinstance(before, RaggedCells)
    ((fewer, report),) = compress_across_heads(make_method(name), [candidates], 9)  # type: ignore[arg-type]
    assert fewer.total == 9 * LAYERS * KV_HEADS
    assert len(fewer) == report.cells_after == 9
    for layer, head in HEAD_INDICES:
        rows, kept_rows = before.head(layer, head), fewer.head(layer, head)
        positions = rows.positions[0, 0].tolist()
        indices = [
            positions.index(kept_position) for kept_position in kept_rows.positions[0, 0].tolist()
        ]
        assert indices == sorted(set(indices))
        assert torch.equal(kept_rows.keys, rows.keys[:, :, indices])
        assert torch.equal(kept_rows.values, rows.values[:, :, indices])


@pytest.mark.parametrize("name", SELECTIONS)
def test_compress_and_join_equals_joining_before_compression(name: str) -> None:
    old, _ = ragged(random_candidates(60, compressed=True, queries=20, statistics=True))
    new = replace(old, cells=random_candidates(20, seed=1).cells)
    newest = max(int(run.cells.positions.max()) for run in (old, new))
    old, new = (replace(run, ageing=True, newest_position=newest) for run in (old, new))
    joined = replace(old, cells=Cells.concatenate([old.cells, new.cells.to_compressed_format()]))
    method = make_method(name)
    assert isinstance(method, Eviction)
    ((expected, _),) = compress_across_heads(method, [joined], 15)
    merged, report = compress_and_join(method, [old, new], 15)
    assert isinstance(merged, RaggedCells)
    assert report.cells_before == len(old) + len(new)
    for expected_tensor, actual_tensor in zip(expected.tensors(), merged.tensors(), strict=False):
        assert torch.equal(expected_tensor, actual_tensor)
    if isinstance(method, CellwiseEviction):
        assert merged.scores is not None
        fresh = method.cell_score(replace(old, cells=replace(merged, scores=None)))
        torch.testing.assert_close(merged.scores, fresh, atol=1e-4, rtol=1e-4)
        compressed_again, _ = compress_and_join(method, [replace(old, cells=merged)], 7)
        assert compressed_again.scores is not None
        assert set(compressed_again.scores.tolist()) <= set(merged.scores.tolist())


@pytest.mark.parametrize("name", [name for name in METHODS if name not in EVICTIONS])
def test_a_method_without_scores_is_refused_for_budget_heads(name: str) -> None:
    check_budget(make_method(name), "uniform")
    with pytest.raises(InvalidArgument, match="no scores"):
        check_budget(make_method(name), "heads")


def test_an_unknown_budget_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="heads, uniform"):
        check_budget(make_method("knorm"), "each")

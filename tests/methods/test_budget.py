"""Heads that compete for cells: whoever has those that are worth most keeps more."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from methods.some_cells import KV_HEADS, LAYERS, PLACES, some_cells
from torch import Tensor

from kvkeep.cache import Cells, Ragged
from kvkeep.compression.methods import (
    METHODS,
    Candidates,
    Eviction,
    as_compressed,
    check_shares,
    compress_and_join,
    compress_by_heads,
    make_method,
    score,
    top_over_heads,
)
from kvkeep.compression.methods.base import CellwiseEviction
from kvkeep.errors import InvalidArgument

EVICTIONS = [name for name, method in METHODS.items() if issubclass(method, Eviction)]
ALONE = [name for name in EVICTIONS if issubclass(METHODS[name], CellwiseEviction)]


def ragged(candidates: Candidates, seed: int = 0) -> tuple[Candidates, Tensor]:
    """About half of the cells, in a row; which these are, `[layers, kv_heads, n]`."""
    heads = torch.tensor([[0.2, 0.9], [0.5, 1.0]]).unsqueeze(-1)
    random = torch.Generator().manual_seed(seed)
    which = torch.rand(LAYERS, KV_HEADS, len(candidates), generator=random) < heads
    cells = Ragged.from_cells(as_compressed(candidates.cells)).select(which.flatten())
    return replace(candidates, cells=cells), which


@settings(max_examples=50)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=4), st.data())
def test_no_cell_that_goes_is_worth_more_than_one_that_stays(
    lengths: list[int], data: st.DataObject
) -> None:
    random = torch.Generator().manual_seed(len(lengths))
    scores = [torch.randn(LAYERS, KV_HEADS, n, generator=random) for n in lengths]
    count = data.draw(st.integers(1, sum(score.numel() for score in scores)))
    best = top_over_heads(scores, count)
    assert [each.shape for each in best] == [each.shape for each in scores]
    pairs = list(zip(scores, best, strict=True))
    stays, goes = (torch.cat([s[b == x] for s, b in pairs]) for x in (True, False))
    assert len(stays) == count
    assert not len(goes) or stays.min() >= goes.max()


@pytest.mark.parametrize("name", ALONE)
def test_a_cell_is_worth_the_same_wherever_it_lies(name: str) -> None:
    candidates = some_cells(1300, compressed=True, statistics=True)
    for ageing in (False, True):
        candidates = replace(candidates, ageing=ageing)
        there = score(make_method(name), candidates)  # type: ignore[arg-type]
        row, which = ragged(candidates)
        # Age is counted from the newest cell of all, which must be there.
        which[..., -1] |= candidates.positions[..., -1] == candidates.positions.max()
        cells = Ragged.from_cells(candidates.cells).select(which.flatten())
        found = score(make_method(name), replace(row, cells=cells))  # type: ignore[arg-type]
        torch.testing.assert_close(found, there[which], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "name", [name for name in EVICTIONS if not METHODS[name].uses_reconstruction]
)
def test_ragged_cells_are_compressed_again_to_as_many_as_asked_for(name: str) -> None:
    candidates, _ = ragged(some_cells(60, compressed=True, queries=20, statistics=True))
    before = candidates.cells
    assert isinstance(before, Ragged)
    ((fewer, told),) = compress_by_heads(make_method(name), [candidates], 9)  # type: ignore[arg-type]
    assert fewer.total == 9 * LAYERS * KV_HEADS
    assert len(fewer) == told.cells_after == 9
    for layer, head in PLACES:
        rows, kept = before.head(layer, head), fewer.head(layer, head)
        positions = rows.positions[0, 0].tolist()
        where = [positions.index(place) for place in kept.positions[0, 0].tolist()]
        assert where == sorted(set(where))
        assert torch.equal(kept.keys, rows.keys[:, :, where])
        assert torch.equal(kept.values, rows.values[:, :, where])


@pytest.mark.parametrize(
    "name", [name for name in EVICTIONS if not METHODS[name].uses_reconstruction]
)
def test_runs_that_become_one_keep_what_they_would_joined(name: str) -> None:
    old, _ = ragged(some_cells(60, compressed=True, queries=20, statistics=True))
    new = replace(old, cells=some_cells(20, seed=1).cells)
    newest = max(int(run.cells.positions.max()) for run in (old, new))
    old, new = (replace(run, ageing=True, newest=newest) for run in (old, new))
    joined = replace(old, cells=Cells.concatenate([old.cells, as_compressed(new.cells)]))
    method = make_method(name)
    assert isinstance(method, Eviction)
    ((expected, _),) = compress_by_heads(method, [joined], 15)
    together, told = compress_and_join(method, [old, new], 15)
    assert isinstance(together, Ragged)
    assert told.cells_before == len(old) + len(new)
    for one, other in zip(expected.tensors(), together.tensors(), strict=False):
        assert torch.equal(one, other)
    if isinstance(method, CellwiseEviction):
        assert together.scores is not None
        fresh = method.cell_score(replace(old, cells=replace(together, scores=None)))
        torch.testing.assert_close(together.scores, fresh, atol=1e-4, rtol=1e-4)
        again, _ = compress_and_join(method, [replace(old, cells=together)], 7)
        assert again.scores is not None
        assert set(again.scores.tolist()) <= set(together.scores.tolist())


@pytest.mark.parametrize("name", [name for name in METHODS if name not in EVICTIONS])
def test_a_method_without_scores_has_no_heads_that_compete(name: str) -> None:
    check_shares(make_method(name), "uniform")
    with pytest.raises(InvalidArgument, match="no scores"):
        check_shares(make_method(name), "heads")


def test_a_name_that_is_no_budget_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="heads, uniform"):
        check_shares(make_method("knorm"), "each")

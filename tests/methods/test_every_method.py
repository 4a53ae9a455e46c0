"""Properties of the cells that every compression method keeps."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from methods.candidates import HEAD_INDICES, KV_HEADS, LAYERS, random_candidates

from kvkeep.cache import NO_TOKEN
from kvkeep.compression.methods import METHODS, make_method
from kvkeep.compression.methods.apply import compress
from kvkeep.compression.methods.base import Candidates, Eviction
from kvkeep.errors import InvalidArgument
from tests.examples import examples

EVICTIONS = [name for name, method in METHODS.items() if issubclass(method, Eviction)]


@st.composite
def compressions(draw: st.DrawFn) -> tuple[Candidates, int]:
    """Draw candidates and the number of cells to keep."""
    total = draw(st.integers(1, 40))
    candidates = random_candidates(
        total,
        seed=draw(st.integers(0, 99)),
        compressed=draw(st.booleans()),
        queries=draw(st.integers(1, 40)),
        statistics=draw(st.booleans()),
    )
    return candidates, draw(st.integers(1, total))


def with_statistics_if_needed(name: str, candidates: Candidates) -> Candidates:
    """Give the candidates statistics with a surrogate if the method requires one."""
    if not make_method(name).uses_surrogate:
        return candidates
    return replace(candidates, statistics=random_candidates(1, statistics=True).statistics)


@pytest.mark.parametrize("name", METHODS)
@settings(max_examples=examples(25))
@given(compressions())
def test_every_layer_and_kv_head_keeps_the_given_number_of_cells(
    name: str, compression: tuple[Candidates, int]
) -> None:
    candidates, count = compression
    result = make_method(name).compress(with_statistics_if_needed(name, candidates), count)
    cells = result.cells
    shape = (LAYERS, KV_HEADS, count)
    assert len(cells) == count
    assert cells.keys.shape == cells.values.shape == (*shape, candidates.cells.keys.shape[-1])
    assert cells.positions.shape == shape
    assert cells.bias is not None
    assert cells.bias.shape == shape
    assert cells.bias.dtype == torch.float32
    assert set(cells.serials.tolist()) == {NO_TOKEN}
    assert cells.keys.isfinite().all()
    assert cells.values.isfinite().all()
    assert cells.bias.isfinite().all()
    assert (cells.positions.diff() > 0).all()
    assert 0 <= result.merged <= len(candidates) - count


@pytest.mark.parametrize("name", EVICTIONS)
@settings(max_examples=examples(25))
@given(compressions())
def test_evictions_keep_cells_bit_exactly(name: str, compression: tuple[Candidates, int]) -> None:
    candidates, count = compression
    cells = make_method(name).compress(with_statistics_if_needed(name, candidates), count).cells
    assert cells.bias is not None
    for layer, head in HEAD_INDICES:
        positions = candidates.positions[layer, head].tolist()
        indices = [positions.index(p) for p in cells.positions[layer, head].tolist()]
        assert indices == sorted(set(indices))
        assert torch.equal(cells.keys[layer, head], candidates.cells.keys[layer, head, indices])
        assert torch.equal(cells.values[layer, head], candidates.cells.values[layer, head, indices])
        assert torch.equal(cells.bias[layer, head], candidates.bias[layer, head, indices])


@pytest.mark.parametrize("name", [name for name in [*EVICTIONS, "fitted"] if name != "tova"])
def test_each_kv_head_keeps_its_own_cells(name: str) -> None:
    cells = (
        make_method(name)
        .compress(with_statistics_if_needed(name, random_candidates(40, queries=20)), 10)
        .cells
    )
    distinct_positions = {
        tuple(cells.positions[head_index].tolist()) for head_index in HEAD_INDICES
    }
    assert len(distinct_positions) == len(HEAD_INDICES)


@pytest.mark.parametrize("name", METHODS)
def test_bfloat16_cells_stay_bfloat16(name: str) -> None:
    plain = random_candidates(20, queries=8).cells
    bfloat16_cells = type(plain)(
        plain.keys.bfloat16(), plain.values.bfloat16(), plain.positions, plain.serials
    )
    candidates = replace(random_candidates(20, queries=8), cells=bfloat16_cells)
    cells = make_method(name).compress(with_statistics_if_needed(name, candidates), 5).cells
    assert cells.keys.dtype == cells.values.dtype == torch.bfloat16


@settings(max_examples=examples(40))
@given(st.integers(1, 1700), st.data())
def test_a_long_run_is_thinned_evenly_chunk_by_chunk(total: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, total))
    result = list(compress(make_method("knorm"), random_candidates(total), count))
    assert sum(len(cells) for cells, _ in result) == count
    assert all(len(cells) == report.cells_after for cells, report in result)
    assert all(report.cells_before <= 512 for _, report in result)
    for _, report in result:
        assert abs(report.cells_after - report.cells_before * count / total) <= 1
    positions = torch.cat([cells.positions for cells, _ in result], -1)
    assert (positions.diff() > 0).all()


@pytest.mark.parametrize("name", ["snapkv", "tova", "h2o", "expected_attention"])
def test_methods_that_use_queries_refuse_candidates_without_them(name: str) -> None:
    with pytest.raises(ValueError, match="needs observed queries"):
        make_method(name).compress(random_candidates(9), 3)


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="found 'best'"):
        make_method("best")

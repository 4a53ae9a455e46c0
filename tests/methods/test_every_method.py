"""What every compression method leaves."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from methods.some_cells import KV_HEADS, LAYERS, PLACES, some_cells

from kvkeep.cache import NO_TOKEN
from kvkeep.compression.methods import METHODS, Candidates, Eviction, compress, make_method
from kvkeep.errors import InvalidArgument

EVICTIONS = [name for name, method in METHODS.items() if issubclass(method, Eviction)]


@st.composite
def asked(draw: st.DrawFn) -> tuple[Candidates, int]:
    total = draw(st.integers(1, 40))
    found = some_cells(
        total,
        seed=draw(st.integers(0, 99)),
        compressed=draw(st.booleans()),
        queries=draw(st.integers(1, 40)),
        statistics=draw(st.booleans()),
    )
    return found, draw(st.integers(1, total))


def known(name: str, candidates: Candidates) -> Candidates:
    """The candidates with a calibration, if the method cannot do without one."""
    if not make_method(name).uses_surrogate:
        return candidates
    return replace(candidates, statistics=some_cells(1, statistics=True).statistics)


@pytest.mark.parametrize("name", METHODS)
@settings(max_examples=25)
@given(asked())
def test_it_leaves_as_many_cells_as_asked_for_in_every_layer_and_kv_head(
    name: str, asked: tuple[Candidates, int]
) -> None:
    candidates, count = asked
    found = make_method(name).compress(known(name, candidates), count)
    cells = found.cells
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
    assert 0 <= found.merged <= len(candidates) - count


@pytest.mark.parametrize("name", EVICTIONS)
@settings(max_examples=25)
@given(asked())
def test_what_evictions_leave_was_there_to_the_bit(
    name: str, asked: tuple[Candidates, int]
) -> None:
    candidates, count = asked
    cells = make_method(name).compress(known(name, candidates), count).cells
    assert cells.bias is not None
    for layer, head in PLACES:
        positions = candidates.positions[layer, head].tolist()
        which = [positions.index(p) for p in cells.positions[layer, head].tolist()]
        assert which == sorted(set(which))
        assert torch.equal(cells.keys[layer, head], candidates.cells.keys[layer, head, which])
        assert torch.equal(cells.values[layer, head], candidates.cells.values[layer, head, which])
        assert torch.equal(cells.bias[layer, head], candidates.bias[layer, head, which])


@pytest.mark.parametrize("name", [name for name in [*EVICTIONS, "fitted"] if name != "tova"])
def test_each_kv_head_keeps_its_own(name: str) -> None:
    cells = make_method(name).compress(known(name, some_cells(40, queries=20)), 10).cells
    kept = {tuple(cells.positions[place].tolist()) for place in PLACES}
    assert len(kept) == len(PLACES)


@pytest.mark.parametrize("name", METHODS)
def test_bfloat16_stays_bfloat16(name: str) -> None:
    plain = some_cells(20, queries=8).cells
    halves = type(plain)(
        plain.keys.bfloat16(), plain.values.bfloat16(), plain.positions, plain.serials
    )
    candidates = replace(some_cells(20, queries=8), cells=halves)
    cells = make_method(name).compress(known(name, candidates), 5).cells
    assert cells.keys.dtype == cells.values.dtype == torch.bfloat16


@settings(max_examples=40)
@given(st.integers(1, 1700), st.data())
def test_a_long_run_is_thinned_evenly_chunk_by_chunk(total: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, total))
    found = list(compress(make_method("knorm"), some_cells(total), count))
    assert sum(len(cells) for cells, _ in found) == count
    assert all(len(cells) == told.cells_after for cells, told in found)
    assert all(told.cells_before <= 512 for _, told in found)
    for _, told in found:
        assert abs(told.cells_after - told.cells_before * count / total) <= 1
    positions = torch.cat([cells.positions for cells, _ in found], -1)
    assert (positions.diff() > 0).all()


@pytest.mark.parametrize("name", ["snapkv", "tova", "h2o", "expected_attention"])
def test_without_queries_nothing_is_guessed(name: str) -> None:
    with pytest.raises(ValueError, match="none were observed"):
        make_method(name).compress(some_cells(9), 3)


def test_a_method_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(InvalidArgument, match="found 'best'"):
        make_method("best")

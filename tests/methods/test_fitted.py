"""Method `fitted`: what stays as it is, what is merged, and what becomes of its mass."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from methods.some_cells import KV_HEADS, LAYERS, PLACES, ROPE, SCALE, WIDTH, some_cells
from torch import Tensor

from kvkeep.cache import Cells
from kvkeep.compression.methods import Candidates, Statistics
from kvkeep.compression.methods.fitted import MASS, Fitted

HEADS = (LAYERS, KV_HEADS)


def saying(words: list[int], values: Tensor, places: list[int] | None = None) -> Candidates:
    """Cells of which each says a word, the same wherever it stands; words are at right angles.

    values: `[n, head_dim]`, the same in every layer and KV head. places: positions.
    """
    positions = torch.tensor(places or [3 * i + 2 for i in range(len(words))])
    keys = (4 * torch.eye(WIDTH)[words]).expand(*HEADS, -1, -1)
    cells = Cells(
        ROPE.shifted(keys, positions),
        values.expand(*HEADS, -1, -1).clone(),
        positions,
        torch.arange(len(words)),
    )
    return Candidates(cells, ROPE, SCALE)


def some_values(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))


def masses(cells: Cells) -> Tensor:
    assert cells.bias is not None
    return (cells.bias / MASS).exp()


@settings(max_examples=40)
@given(st.integers(1, 40), st.booleans(), st.booleans(), st.data())
def test_keys_that_stay_are_the_same_to_the_bit(
    total: int, compressed: bool, statistics: bool, data: st.DataObject
) -> None:
    candidates = some_cells(total, compressed=compressed, statistics=statistics)
    count = data.draw(st.integers(1, total))
    cells = Fitted(similar=0.3).compress(candidates, count).cells
    for place in PLACES:
        positions = candidates.positions[place].tolist()
        which = [positions.index(p) for p in cells.positions[place].tolist()]
        assert which == sorted(set(which))
        assert torch.equal(cells.keys[place], candidates.cells.keys[place][which])


def test_the_same_word_elsewhere_is_the_same_word() -> None:
    values = some_values(2)
    found = Fitted().compress(saying([5, 5], values, [10, 3000]), 1)
    assert found.merged == 1
    torch.testing.assert_close(masses(found.cells), torch.full((*HEADS, 1), 2.0))
    for place in PLACES:
        torch.testing.assert_close(found.cells.values[place][0], values.mean(0))


def test_what_is_like_nothing_that_stays_is_forgotten() -> None:
    candidates = saying([1, 2, 3, 4], some_values(4))
    found = Fitted().compress(candidates, 2)
    assert found.merged == 0
    assert torch.equal(found.cells.bias, torch.zeros(*HEADS, 2))
    for place in PLACES:
        for position, value in zip(
            found.cells.positions[place].tolist(), found.cells.values[place], strict=True
        ):
            index = candidates.cells.positions.tolist().index(position)
            torch.testing.assert_close(value, candidates.cells.values[place][index])


@settings(max_examples=60)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=40), st.data())
def test_mass_and_values_of_a_word_live_on_where_it_is_kept(
    words: list[int], data: st.DataObject
) -> None:
    values = some_values(len(words))
    candidates = saying(words, values)
    found = Fitted().compress(candidates, data.draw(st.integers(1, len(words))))
    places, merged = candidates.cells.positions.tolist(), []
    for place in PLACES:
        which = [places.index(p) for p in found.cells.positions[place].tolist()]
        mass, sums = masses(found.cells)[place], found.cells.values[place]
        kept = {words[index] for index in which}
        for word in kept:
            of_word = [i for i, index in enumerate(which) if words[index] == word]
            said = [i for i, other in enumerate(words) if other == word]
            assert float(mass[of_word].sum()) == pytest.approx(len(said), rel=1e-4)
            total = (mass[of_word].unsqueeze(-1) * sums[of_word]).sum(0)
            torch.testing.assert_close(total, values[said].sum(0), rtol=1e-4, atol=1e-4)
        merged.append(sum(word in kept for word in words) - len(which))
    assert found.merged == pytest.approx(sum(merged) / len(merged))


def test_compressed_twice_is_compressed_once() -> None:
    values = some_values(8)
    candidates = saying([3] * 8, values)
    first = Fitted().compress(candidates, 3).cells
    torch.testing.assert_close(masses(first).sum(-1), torch.full(HEADS, 8.0))
    second = Fitted().compress(replace(candidates, cells=first), 1).cells
    torch.testing.assert_close(second.bias, torch.full((*HEADS, 1), MASS * math.log(8)))
    for place in PLACES:
        torch.testing.assert_close(second.values[place][0], values.mean(0))


@pytest.mark.parametrize("compressed", [False, True], ids=["as-fed", "compressed"])
def test_as_many_as_there_are_stay_what_they_are(compressed: bool) -> None:
    candidates = some_cells(17, compressed=compressed)
    found = Fitted(similar=-2.0).compress(candidates, 17)
    assert found.merged == 0
    assert torch.equal(found.cells.keys, candidates.cells.keys)
    torch.testing.assert_close(found.cells.values, candidates.cells.values)
    torch.testing.assert_close(found.cells.bias, candidates.bias)
    assert torch.equal(found.cells.positions, candidates.positions)


def test_a_key_that_stands_out_is_kept() -> None:
    words = [7] * 30
    words[11] = 2
    candidates = saying(words, some_values(30))
    cells = Fitted().compress(candidates, 3).cells
    outstanding = int(candidates.cells.positions[11])
    for place in PLACES:
        assert outstanding in cells.positions[place].tolist()


def seen_by(moment: Tensor, tolerance: float = 0.9) -> Statistics:
    return Statistics(
        torch.zeros(*HEADS, WIDTH),
        moment.expand(*HEADS, -1, -1).clone(),
        torch.full(HEADS, tolerance),
    )


def test_with_statistics_what_no_query_tells_apart_is_merged() -> None:
    said = saying([1, 2], some_values(2))
    keys = torch.eye(WIDTH)[[1, 1]] + 3 * torch.eye(WIDTH)[[6, 7]]  # alike but for 6 and 7
    cells = replace_keys(
        said.cells, ROPE.shifted(keys.expand(*HEADS, -1, -1), said.cells.positions)
    )
    blind = torch.eye(WIDTH)
    blind[6, 6] = blind[7, 7] = 0
    for moment, merged in ((torch.eye(WIDTH), 0), (blind, 1)):
        candidates = replace(said, cells=cells, statistics=seen_by(moment))
        assert Fitted().compress(candidates, 1).merged == merged


def replace_keys(cells: Cells, keys: Tensor) -> Cells:
    return Cells(keys, cells.values, cells.positions, cells.serials, cells.bias)


def test_with_statistics_each_kv_head_merges_what_it_tolerates() -> None:
    statistics = seen_by(torch.eye(WIDTH))
    statistics.tolerance[0, 1] = statistics.tolerance[1, 0] = 1.0
    candidates = replace(saying([4] * 6, some_values(6)), statistics=statistics)
    mass = masses(Fitted().compress(candidates, 2).cells).sum(-1)
    torch.testing.assert_close(mass, torch.tensor([[6.0, 2.0], [2.0, 6.0]]))

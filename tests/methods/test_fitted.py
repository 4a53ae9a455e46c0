"""Method `fitted`: which cells are kept exactly, which are merged, and where their mass goes."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from methods.candidates import (
    FREQUENCIES,
    HEAD_INDICES,
    KV_HEADS,
    LAYERS,
    ROPE,
    SCALE,
    WIDTH,
    random_candidates,
)
from torch import Tensor

from kvkeep.cache import Cells, Rope
from kvkeep.compression.methods.base import Candidates
from kvkeep.compression.methods.fitted import MASS_EXPONENT, Fitted
from kvkeep.compression.methods.statistics import Statistics
from tests.examples import examples

HEADS = (LAYERS, KV_HEADS)


def cells_with_words(
    words: list[int], values: Tensor, positions_given: list[int] | None = None
) -> Candidates:
    """Return cells whose unrotated keys are one-hot vectors of `words`.

    Equal words have equal keys at any position, and different words have orthogonal ones.
    values: `[n, head_dim]`, the same in every layer and KV head.
    """
    positions = torch.tensor(positions_given or [3 * i + 2 for i in range(len(words))])
    keys = (4 * torch.eye(WIDTH)[words]).expand(*HEADS, -1, -1)
    cells = Cells(
        ROPE.shift(keys, positions),
        values.expand(*HEADS, -1, -1).clone(),
        positions,
        torch.arange(len(words)),
    )
    return Candidates(cells, ROPE, SCALE)


def random_values(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))


def masses(cells: Cells) -> Tensor:
    assert cells.bias is not None
    return (cells.bias / MASS_EXPONENT).exp()


@settings(max_examples=examples(40))
@given(st.integers(1, 40), st.booleans(), st.booleans(), st.data())
def test_kept_keys_are_bit_exact(
    total: int, compressed: bool, statistics: bool, data: st.DataObject
) -> None:
    candidates = random_candidates(total, compressed=compressed, statistics=statistics)
    count = data.draw(st.integers(1, total))
    cells = Fitted(min_cosine=0.3).compress(candidates, count).cells
    for head_index in HEAD_INDICES:
        positions = candidates.positions[head_index].tolist()
        indices = [positions.index(p) for p in cells.positions[head_index].tolist()]
        assert indices == sorted(set(indices))
        assert torch.equal(cells.keys[head_index], candidates.cells.keys[head_index][indices])


def test_equal_keys_at_different_positions_are_merged() -> None:
    values = random_values(2)
    result = Fitted().compress(cells_with_words([5, 5], values, [10, 3000]), 1)
    assert result.merged == 1
    torch.testing.assert_close(masses(result.cells), torch.full((*HEADS, 1), 2.0))
    for head_index in HEAD_INDICES:
        torch.testing.assert_close(result.cells.values[head_index][0], values.mean(0))


def test_cells_unlike_all_kept_ones_are_evicted() -> None:
    candidates = cells_with_words([1, 2, 3, 4], random_values(4))
    result = Fitted().compress(candidates, 2)
    assert result.merged == 0
    assert torch.equal(result.cells.bias, torch.zeros(*HEADS, 2))
    for head_index in HEAD_INDICES:
        for position, value in zip(
            result.cells.positions[head_index].tolist(),
            result.cells.values[head_index],
            strict=True,
        ):
            index = candidates.cells.positions.tolist().index(position)
            torch.testing.assert_close(value, candidates.cells.values[head_index][index])


@settings(max_examples=examples(60))
@given(st.lists(st.integers(0, 5), min_size=1, max_size=40), st.data())
def test_kept_cells_take_over_the_mass_and_values_of_equal_ones(
    words: list[int], data: st.DataObject
) -> None:
    values = random_values(len(words))
    candidates = cells_with_words(words, values)
    result = Fitted().compress(candidates, data.draw(st.integers(1, len(words))))
    positions, merged = candidates.cells.positions.tolist(), []
    for head_index in HEAD_INDICES:
        indices = [positions.index(p) for p in result.cells.positions[head_index].tolist()]
        mass, sums = masses(result.cells)[head_index], result.cells.values[head_index]
        kept_words = {words[index] for index in indices}
        for word in kept_words:
            of_word = [i for i, index in enumerate(indices) if words[index] == word]
            occurrences = [i for i, other in enumerate(words) if other == word]
            assert float(mass[of_word].sum()) == pytest.approx(len(occurrences), rel=1e-4)
            total = (mass[of_word].unsqueeze(-1) * sums[of_word]).sum(0)
            torch.testing.assert_close(total, values[occurrences].sum(0), rtol=1e-4, atol=1e-4)
        merged.append(sum(word in kept_words for word in words) - len(indices))
    assert result.merged == pytest.approx(sum(merged) / len(merged))


def test_compressing_twice_equals_compressing_once() -> None:
    values = random_values(8)
    candidates = cells_with_words([3] * 8, values)
    first = Fitted().compress(candidates, 3).cells
    torch.testing.assert_close(masses(first).sum(-1), torch.full(HEADS, 8.0))
    second = Fitted().compress(replace(candidates, cells=first), 1).cells
    torch.testing.assert_close(second.bias, torch.full((*HEADS, 1), MASS_EXPONENT * math.log(8)))
    for head_index in HEAD_INDICES:
        torch.testing.assert_close(second.values[head_index][0], values.mean(0))


@pytest.mark.parametrize("compressed", [False, True], ids=["as-fed", "compressed"])
def test_compressing_to_the_same_count_changes_nothing(compressed: bool) -> None:
    candidates = random_candidates(17, compressed=compressed)
    result = Fitted(min_cosine=-2.0).compress(candidates, 17)
    assert result.merged == 0
    assert torch.equal(result.cells.keys, candidates.cells.keys)
    torch.testing.assert_close(result.cells.values, candidates.cells.values)
    torch.testing.assert_close(result.cells.bias, candidates.bias)
    assert torch.equal(result.cells.positions, candidates.positions)


def test_an_outlier_key_is_kept() -> None:
    words = [7] * 30
    words[11] = 2
    candidates = cells_with_words(words, random_values(30))
    cells = Fitted().compress(candidates, 3).cells
    outlier_position = int(candidates.cells.positions[11])
    for head_index in HEAD_INDICES:
        assert outlier_position in cells.positions[head_index].tolist()


def statistics_with_moment(moment: Tensor, min_cosine: float = 0.9) -> Statistics:
    return Statistics(
        torch.zeros(*HEADS, WIDTH),
        moment.expand(*HEADS, -1, -1).clone(),
        torch.full(HEADS, min_cosine),
    )


def test_keys_that_no_query_distinguishes_are_merged() -> None:
    candidates_with_words = cells_with_words([1, 2], random_values(2))
    # The two keys are equal except in dimensions 6 and 7.
    keys = torch.eye(WIDTH)[[1, 1]] + 3 * torch.eye(WIDTH)[[6, 7]]
    cells = replace_keys(
        candidates_with_words.cells,
        ROPE.shift(keys.expand(*HEADS, -1, -1), candidates_with_words.cells.positions),
    )
    blind = torch.eye(WIDTH)
    blind[6, 6] = blind[7, 7] = 0
    for moment, merged in ((torch.eye(WIDTH), 0), (blind, 1)):
        candidates = replace(
            candidates_with_words, cells=cells, statistics=statistics_with_moment(moment)
        )
        assert Fitted().compress(candidates, 1).merged == merged


def replace_keys(cells: Cells, keys: Tensor) -> Cells:
    return Cells(keys, cells.values, cells.positions, cells.serials, cells.bias)


def test_each_kv_head_merges_by_its_own_threshold() -> None:
    statistics = statistics_with_moment(torch.eye(WIDTH))
    statistics.min_cosine[0, 1] = statistics.min_cosine[1, 0] = 1.0
    candidates = replace(cells_with_words([4] * 6, random_values(6)), statistics=statistics)
    mass = masses(Fitted().compress(candidates, 2).cells).sum(-1)
    torch.testing.assert_close(mass, torch.tensor([[6.0, 2.0], [2.0, 6.0]]))


@pytest.mark.parametrize("unrotated", [(), (3, 6, 7)])
def test_layers_are_compressed_as_each_would_be_alone(unrotated: tuple[int, ...]) -> None:
    """More layers than are compressed at a time, some of them without RoPE."""
    random, layers, count = torch.Generator().manual_seed(0), 8, 30
    keys, values = torch.randn(2, layers, KV_HEADS, count, WIDTH, generator=random)
    positions = torch.arange(count)
    rope = Rope(FREQUENCIES, torch.device("cpu"), unrotated)
    cells = Cells(keys, values, positions, positions)
    together = Fitted(min_cosine=0.3).compress(Candidates(cells, rope, SCALE), 10).cells
    for layer in range(layers):
        part = slice(layer, layer + 1)
        alone = Candidates(
            Cells(keys[part], values[part], positions, positions),
            Rope(FREQUENCIES, torch.device("cpu"), [0] if layer in unrotated else []),
            SCALE,
        )
        expected = Fitted(min_cosine=0.3).compress(alone, 10).cells
        assert torch.equal(together.keys[part], expected.keys)
        assert torch.equal(together.positions[part], expected.positions)

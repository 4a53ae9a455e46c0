"""Methods that merge runs of neighbouring cells, against the same written as loops."""

import pytest
import torch
from methods.candidates import (
    HEAD_INDICES,
    KV_HEADS,
    WIDTH,
    bias_of,
    position,
    random_candidates,
    rotated,
)

from kvkeep.compression.methods import make_method
from kvkeep.compression.methods.base import Candidates


def runs_of_neighbours(total: int, count: int) -> list[list[int]]:
    """Split cells into `count` runs of neighbours of nearly equal length."""
    neighbours: list[list[int]] = [[] for _ in range(count)]
    for cell in range(total):
        neighbours[cell * count // total].append(cell)
    assert max(map(len, neighbours)) - min(map(len, neighbours)) <= 1
    return neighbours


def weights(name: str, run: list[int], head: int) -> list[float]:
    if name == "pick_heads":
        return [float(index_in_run == head % len(run)) for index_in_run in range(len(run))]
    return [1 / len(run) if name == "average" else 1.0] * len(run)


@pytest.mark.parametrize("compressed", [False, True], ids=["as-fed", "compressed"])
@pytest.mark.parametrize("name", ["average", "sum", "pick_heads"])
@pytest.mark.parametrize(("total", "count"), [(24, 12), (25, 9), (7, 1), (10, 10)])
def test_a_run_becomes_one_cell_at_its_last_position(
    name: str, total: int, count: int, compressed: bool
) -> None:
    candidates = random_candidates(total, compressed=compressed)
    result = make_method(name).compress(candidates, count)
    assert result.merged == total - count
    for layer, head in HEAD_INDICES:
        for index, run in enumerate(runs_of_neighbours(total, count)):
            run_weights = weights(name, run, head)
            target_position = position(candidates, layer, head, run[-1])
            assert int(result.cells.positions[layer, head, index]) == target_position
            key, value = weighted_sum(candidates, layer, head, run, run_weights, target_position)
            torch.testing.assert_close(result.cells.keys[layer, head, index], key)
            torch.testing.assert_close(result.cells.values[layer, head, index], value)
            biases = torch.tensor([bias_of(candidates, layer, head, cell) for cell in run])
            mass = (biases.exp() * torch.tensor(run_weights)).sum() / sum(run_weights)
            assert result.cells.bias is not None
            torch.testing.assert_close(result.cells.bias[layer, head, index], mass.log())


def weighted_sum(
    candidates: Candidates,
    layer: int,
    head: int,
    run: list[int],
    run_weights: list[float],
    target_position: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weighted sums of keys, rotated to the target position, and of values."""
    key, value = (torch.zeros(WIDTH, dtype=torch.float64) for _ in range(2))
    for weight, cell in zip(run_weights, run, strict=True):
        offset = target_position - position(candidates, layer, head, cell)
        key += weight * rotated(candidates.cells.keys[layer, head, cell], offset)
        value += weight * candidates.cells.values[layer, head, cell].double()
    return key.float(), value.float()


@pytest.mark.parametrize("name", ["average", "sum", "pick_heads"])
def test_compressing_to_the_same_count_changes_nothing(name: str) -> None:
    candidates = random_candidates(11)
    cells = make_method(name).compress(candidates, 11).cells
    torch.testing.assert_close(cells.keys, candidates.cells.keys)
    assert torch.equal(cells.values, candidates.cells.values)
    assert cells.bias is not None
    assert not cells.bias.any()


def test_pick_heads_takes_cell_h_modulo_run_length_in_kv_head_h() -> None:
    candidates = random_candidates(12)
    cells = make_method("pick_heads").compress(candidates, 6).cells
    for head in range(KV_HEADS):
        assert torch.equal(cells.values[:, head], candidates.cells.values[:, head, head::2])

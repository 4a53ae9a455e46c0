"""Merging by place, against the same written as loops."""

import pytest
import torch
from methods.some_cells import KV_HEADS, PLACES, WIDTH, position, some_cells, turned

from kvkeep.compression.methods import Candidates, make_method


def runs(total: int, count: int) -> list[list[int]]:
    """Neighbours that become one: as equal as can be, in their order."""
    found: list[list[int]] = [[] for _ in range(count)]
    for cell in range(total):
        found[cell * count // total].append(cell)
    assert max(map(len, found)) - min(map(len, found)) <= 1
    return found


def weights(name: str, run: list[int], head: int) -> list[float]:
    if name == "pick_heads":
        return [float(place == head % len(run)) for place in range(len(run))]
    return [1 / len(run) if name == "average" else 1.0] * len(run)


@pytest.mark.parametrize("compressed", [False, True], ids=["as-fed", "compressed"])
@pytest.mark.parametrize("name", ["average", "sum", "pick_heads"])
@pytest.mark.parametrize(("total", "count"), [(24, 12), (25, 9), (7, 1), (10, 10)])
def test_a_run_becomes_one_cell_at_its_last_position(
    name: str, total: int, count: int, compressed: bool
) -> None:
    candidates = some_cells(total, compressed=compressed)
    found = make_method(name).compress(candidates, count)
    assert found.merged == total - count
    for layer, head in PLACES:
        for index, run in enumerate(runs(total, count)):
            share = weights(name, run, head)
            where = position(candidates, layer, head, run[-1])
            assert int(found.cells.positions[layer, head, index]) == where
            key, value = summed(candidates, layer, head, run, share, where)
            torch.testing.assert_close(found.cells.keys[layer, head, index], key)
            torch.testing.assert_close(found.cells.values[layer, head, index], value)


def summed(
    candidates: Candidates, layer: int, head: int, run: list[int], share: list[float], where: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys are rotated to one position first."""
    key, value = (torch.zeros(WIDTH, dtype=torch.float64) for _ in range(2))
    for part, cell in zip(share, run, strict=True):
        by = where - position(candidates, layer, head, cell)
        key += part * turned(candidates.cells.keys[layer, head, cell], by)
        value += part * candidates.cells.values[layer, head, cell].double()
    return key.float(), value.float()


@pytest.mark.parametrize("name", ["average", "sum", "pick_heads"])
def test_as_many_as_there_are_stay_what_they_are(name: str) -> None:
    candidates = some_cells(11)
    cells = make_method(name).compress(candidates, 11).cells
    torch.testing.assert_close(cells.keys, candidates.cells.keys)
    assert torch.equal(cells.values, candidates.cells.values)


def test_pick_heads_takes_whole_cells_the_next_one_in_the_next_kv_head() -> None:
    candidates = some_cells(12)
    cells = make_method("pick_heads").compress(candidates, 6).cells
    for head in range(KV_HEADS):
        assert torch.equal(cells.values[:, head], candidates.cells.values[:, head, head::2])

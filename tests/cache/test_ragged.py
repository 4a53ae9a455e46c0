"""Ragged cells, compared with plain lists of cells for each layer and KV head."""

import math
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from methods.candidates import (
    FREQUENCIES,
    HEAD_INDICES,
    HEADS,
    KV_HEADS,
    LAYERS,
    SCALE,
    WIDTH,
    rotated,
)
from torch import Tensor

from kvkeep.cache import NO_TOKEN, Cells, Layout, PositionMap, RaggedCells, Rope, Segment
from kvkeep.cache.attention import MASK_BIAS
from kvkeep.cache.quantised import SCALE_DTYPE, QuantisedTensor, dequantise, quantise, scale_count
from tests.examples import examples

ROPE = Rope(FREQUENCIES, torch.device("cpu"))
LAYOUT = Layout(LAYERS, KV_HEADS, WIDTH, torch.float32, torch.device("cpu"))
COUNTS = st.lists(st.integers(0, 9), min_size=len(HEAD_INDICES), max_size=len(HEAD_INDICES))
FIRST_ALL, ONE, NONE_OF_A_LAYER = [9, 0, 0, 0], [0, 0, 1, 0], [0, 0, 5, 3]
SOME = [[3, 0, 4, 2], [1, 1, 1, 1], FIRST_ALL, ONE, NONE_OF_A_LAYER]


@dataclass
class Listed:
    """One cell of one head. key, value: `[head_dim]`."""

    key: Tensor
    value: Tensor
    position: int
    bias: float


Lists = dict[tuple[int, int], list[Listed]]


def random_lists(counts: list[int], seed: int = 0) -> Lists:
    random = torch.Generator().manual_seed(seed)
    found: Lists = {}
    for place, count in zip(HEAD_INDICES, counts, strict=True):
        keys, values = (torch.randn(count, WIDTH, generator=random) for _ in range(2))
        positions = torch.randint(1, 5, (count,), generator=random).cumsum(0).tolist()
        biases = torch.randn(count, generator=random).tolist()
        found[place] = [Listed(*each) for each in zip(keys, values, positions, biases, strict=True)]
    return found


def one_head(cells: list[Listed]) -> Cells:
    """`[1, 1, n, ...]`."""
    vectors = [torch.stack([getattr(c, name) for c in cells]) if cells else torch.empty(0, WIDTH)
               for name in ("key", "value")]  # fmt: skip
    return Cells(
        vectors[0][None, None],
        vectors[1][None, None],
        torch.tensor([c.position for c in cells], dtype=torch.int64)[None, None],
        torch.full((len(cells),), NO_TOKEN),
        torch.tensor([c.bias for c in cells], dtype=torch.float32)[None, None],
    )


def ragged(found: Lists) -> RaggedCells:
    return RaggedCells.from_heads([one_head(found[place]) for place in HEAD_INDICES], LAYERS)


def require_equal(cells: RaggedCells, found: Lists) -> None:
    """Require that ragged cells are the listed ones, to the bit, in a row and head by head."""
    assert cells.counts.tolist() == [
        [len(found[layer, head]) for head in range(KV_HEADS)] for layer in range(LAYERS)
    ]
    total = sum(map(len, found.values()))
    assert cells.total == total
    assert len(cells) == math.ceil(total / len(HEAD_INDICES))
    assert cells.serials.tolist() == [NO_TOKEN] * len(cells)
    assert cells.max_count == max(map(len, found.values()))
    seen = {(layer, head): own for layer, head, own in cells.heads()}
    assert list(seen) == HEAD_INDICES
    for place in HEAD_INDICES:
        expected, own = one_head(found[place]), seen[place]
        assert len(own) == len(found[place])
        assert own.bias is not None
        assert torch.equal(own.keys, expected.keys)
        assert torch.equal(own.values, expected.values)
        assert torch.equal(own.positions, expected.positions)
        assert torch.equal(own.bias, expected.bias)


def even(count: int, seed: int = 0) -> tuple[Cells, Lists]:
    """Compressed cells of equal counts, and the lists of them."""
    found = random_lists([count] * len(HEAD_INDICES), seed)
    heads = [one_head(found[place]) for place in HEAD_INDICES]

    def shaped(x: list[Tensor]) -> Tensor:
        return torch.cat(x).view(LAYERS, KV_HEADS, *x[0].shape[2:])

    cells = Cells(
        shaped([h.keys for h in heads]),
        shaped([h.values for h in heads]),
        shaped([h.positions for h in heads]),
        heads[0].serials,
        shaped([h.bias for h in heads if h.bias is not None]),
    )
    return cells, found


@given(COUNTS, st.integers(0, 99))
def test_heads_are_stored_in_a_row(counts: list[int], seed: int) -> None:
    found = random_lists(counts, seed)
    require_equal(ragged(found), found)


@given(st.integers(0, 9))
def test_cells_of_equal_counts_become_ragged_ones(count: int) -> None:
    cells, found = even(count)
    require_equal(RaggedCells.from_cells(cells), found)
    assert (
        RaggedCells.from_cells(RaggedCells.from_cells(cells)).counts.tolist()
        == [[count] * KV_HEADS] * LAYERS
    )


@given(COUNTS, st.data())
def test_selected_cells_stay_in_their_head_and_order(
    counts: list[int], data: st.DataObject
) -> None:
    found = random_lists(counts)
    mask = data.draw(st.lists(st.booleans(), min_size=sum(counts), max_size=sum(counts)))
    left = iter(mask)
    expected = {place: [c for c in found[place] if next(left)] for place in HEAD_INDICES}
    cells = ragged(found)
    require_equal(RaggedCells.select_from(cells, torch.tensor(mask, dtype=torch.bool)), expected)
    require_equal(cells, found)  # the source is unchanged


@given(st.lists(COUNTS, min_size=1, max_size=4), st.integers(0, 4))
def test_cells_are_concatenated_head_by_head(parts: list[list[int]], count: int) -> None:
    found = [random_lists(counts, seed) for seed, counts in enumerate(parts)]
    plain, plain_lists = even(count, 77)
    expected = {place: [c for part in found for c in part[place]] for place in HEAD_INDICES}
    require_equal(RaggedCells.concatenate([ragged(part) for part in found]), expected)
    after = {place: expected[place] + plain_lists[place] for place in HEAD_INDICES}
    joined = Cells.concatenate([*map(ragged, found), plain])  # of both kinds
    assert isinstance(joined, RaggedCells)
    require_equal(joined, after)
    before = {place: plain_lists[place] + expected[place] for place in HEAD_INDICES}
    joined = Cells.concatenate([plain, *map(ragged, found)])
    assert isinstance(joined, RaggedCells)
    require_equal(joined, before)


@given(COUNTS, st.integers(-50, 50))
def test_shifted_cells_are_rotated_in_every_head(counts: list[int], by: int) -> None:
    found = random_lists(counts)
    moved = ragged(found).shift(ROPE, torch.tensor([by]))
    assert isinstance(moved, RaggedCells)
    for layer, head, own in moved.heads():
        for index, cell in enumerate(found[layer, head]):
            assert int(own.positions[0, 0, index]) == cell.position + by
            expected = rotated(cell.key, by)
            assert (own.keys[0, 0, index].double() - expected).abs().max() <= 1e-5
            assert torch.equal(own.values[0, 0, index], cell.value)


def test_each_cell_can_be_shifted_by_its_own_number() -> None:
    found = random_lists([3, 0, 4, 2])
    by = torch.arange(9) - 3
    moved, numbers = ragged(found).shift(ROPE, by), iter(by.tolist())
    assert isinstance(moved, RaggedCells)
    for layer, head, own in moved.heads():
        for index, cell in enumerate(found[layer, head]):
            expected = rotated(cell.key, next(numbers))
            assert (own.keys[0, 0, index].double() - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("counts", SOME)
@pytest.mark.parametrize("bits", [(8, 8), (8, 4), (4, 4), (16, 4)])
def test_quantising_equals_quantising_each_head_alone(
    bits: tuple[int, int], counts: list[int]
) -> None:
    found, layout = random_lists(counts), replace(LAYOUT, key_bits=bits[0], value_bits=bits[1])
    quantised = ragged(found).to_layout(layout)
    for layer, head, own in quantised.heads():
        alone = one_head(found[layer, head])
        for stored, plain, each in (
            (own.stored_keys, alone.keys, bits[0]),
            (own.stored_values, alone.values, bits[1]),
        ):
            if isinstance(stored, QuantisedTensor):
                expected = quantise(plain, each)
                assert stored.bits == each
                assert torch.equal(stored.data, expected.data)
                assert torch.equal(stored.scale, expected.scale)
            else:
                assert torch.equal(stored, plain)
    assert quantised.to_layout(layout) is quantised
    assert quantised.counts.tolist() == ragged(found).counts.tolist()
    plain = quantised.dequantise(torch.float32)
    again = quantised.to_layout(LAYOUT)
    assert isinstance(plain, RaggedCells)
    assert torch.equal(again.keys, plain.keys)
    assert torch.equal(plain.keys, dequantise(quantised.stored_keys, torch.float32))


@pytest.mark.parametrize("bits", [8, 4])
def test_quantised_cells_are_selected_and_concatenated_as_plain_ones(bits: int) -> None:
    found, layout = random_lists([3, 0, 4, 2]), replace(LAYOUT, key_bits=bits, value_bits=bits)
    mask = torch.tensor([True, False, True, True, True, False, False, True, True])
    cells = ragged(found).to_layout(layout)
    for one, other in (
        (
            RaggedCells.select_from(cells, mask),
            RaggedCells.select_from(ragged(found), mask).to_layout(layout),
        ),
        (
            RaggedCells.concatenate([cells, cells]),
            RaggedCells.concatenate([ragged(found)] * 2).to_layout(layout),
        ),
    ):
        assert isinstance(one, RaggedCells)
        assert one.counts.tolist() == other.counts.tolist()
        for tensor, expected_tensor in zip(one.tensors(), other.tensors(), strict=True):
            assert torch.equal(tensor, expected_tensor)


@pytest.mark.parametrize("counts", SOME)
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_nbytes_counts_the_cells_that_exist(bits: int, counts: list[int]) -> None:
    layout = replace(LAYOUT, key_bits=bits, value_bits=bits)
    vector = WIDTH * 4
    if bits < 16:
        vector = WIDTH * bits // 8 + scale_count(WIDTH, bits) * SCALE_DTYPE.itemsize
    each = 2 * vector + 8 + 4  # a key, a value, a position, a bias
    own = 8 * len(HEAD_INDICES)  # the counts of the heads
    assert ragged(random_lists(counts)).to_layout(layout).nbytes == sum(counts) * each + own


def reference_attention(q: Tensor, cells: list[Listed]) -> tuple[Tensor, float]:
    """A query's attention output, `[head_dim]`, and the log of its sum of exponentials."""
    logits = torch.tensor([float(q @ c.key) * SCALE + c.bias for c in cells])
    weights = logits.softmax(0)
    out = sum((w * c.value for w, c in zip(weights, cells, strict=True)), torch.zeros(WIDTH))
    return out, float(logits.logsumexp(0))


@settings(max_examples=examples(40))
@given(COUNTS, st.integers(1, 3), st.sampled_from([16, 8]))
def test_attention_equals_a_softmax_over_each_heads_cells(
    counts: list[int], n: int, bits: int
) -> None:
    layout = replace(LAYOUT, key_bits=bits, value_bits=bits)
    cells = ragged(random_lists(counts)).to_layout(layout)
    plain = cells.dequantise(torch.float32)
    assert isinstance(plain, RaggedCells)
    groups = HEADS // KV_HEADS
    q = torch.randn(n, HEADS, WIDTH, generator=torch.Generator().manual_seed(n))
    for layer in range(LAYERS):
        part = cells.attend(layer, q, SCALE)
        for head in range(HEADS):
            kv_head, g = head // groups, head % groups
            own = plain.head(layer, kv_head)
            assert own.bias is not None
            listed = [
                Listed(*each, 0, float(bias))
                for *each, bias in zip(own.keys[0, 0], own.values[0, 0], own.bias[0, 0],
                                       strict=True)
            ]  # fmt: skip
            for index in range(n):
                at = (g, kv_head, index) if n > 1 else (0, kv_head, g)
                if not listed:
                    assert float(part.log_sum[at]) <= MASK_BIAS
                    assert not part.out[at].any()
                    continue
                out, log_sum = reference_attention(q[index, head], listed)
                assert (part.out[at] - out).abs().max() <= 1e-4
                assert abs(float(part.log_sum[at]) - log_sum) <= 1e-4


def test_a_segment_of_ragged_cells_is_read_and_moved_whole() -> None:
    found = random_lists([3, 0, 4, 2])
    segment = Segment.from_cells(LAYOUT, ragged(found), PositionMap(-2), is_anchor=False)
    assert (segment.length, segment.capacity, segment.limit) == (3, 3, 3)
    assert segment.compressed
    assert segment.frozen
    assert not segment.reopen(100)
    read = segment.read(0, 3)
    assert isinstance(read, RaggedCells)
    require_equal(read, found)
    positions = [c.position for place in HEAD_INDICES for c in found[place]]
    assert segment.positions().tolist() == positions
    before = segment.block.slots
    segment.compact()
    assert segment.block.slots is not before
    assert isinstance(segment.block.slots, RaggedCells)
    require_equal(segment.block.slots, found)

"""Cells in 8 and 4 bits: how much is lost, what they take, and that nothing else changes."""

from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvkeep.cache import BITS, AttentionConfig, Bits, Cells, KVCache, Layout, Rope, Segment, Window
from kvkeep.cache.attention import HIDDEN, attend_cells
from kvkeep.cache.group_step import GroupStep
from kvkeep.cache.quantised import Quantised, copy_stored, dequantise, hadamard, quantise

CPU = torch.device("cpu")
PLAIN = Layout(layers=2, kv_heads=2, head_dim=16, dtype=torch.float32, device=CPU)
ROPE = Rope(tuple(10.0**-i for i in range(8)), CPU)
HEADS = 6
QUANTISED = sorted(BITS)


def layout(bits: str) -> Layout:
    return Bits(kv=bits).layouts(PLAIN)[0]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def some_cells(count: int, seed: int = 0, kind: Layout = PLAIN) -> Cells:
    shape = (kind.layers, kind.kv_heads, count, kind.head_dim)
    where = torch.arange(count)
    return Cells(random(*shape, seed=seed), random(*shape, seed=seed + 1), where, where)


def feed(cache: KVCache, count: int, seed: int = 0) -> Tensor:
    """`[layers, count, heads * head_dim]`: what the new tokens found in each layer."""
    found = []
    with cache.step(count) as step:
        for layer in range(PLAIN.layers):
            q, k, v = (random(count, n, 16, seed=seed + layer * 9 + n) for n in (HEADS, 2, 2))
            found.append(step.attend(layer, q, k, v))
    return torch.stack(found)


def new_cache(bits: str, window: int | None = None) -> KVCache:
    cache = KVCache(layout(bits), AttentionConfig(HEADS, ROPE, 0.3))
    cache.window = Window(window)
    cache.segments.append(Segment(cache.layout, window or 100))
    return cache


def restored_twin(cache: KVCache) -> KVCache:
    """The same cache with plain cells, as the quantised ones say that they are."""
    twin = KVCache(PLAIN, AttentionConfig(HEADS, ROPE, cache.scale))
    twin.window, twin.time, twin.serial = cache.window, cache.time, cache.serial
    for segment in cache.segments:
        plain = Segment(PLAIN, segment.limit)
        plain.__dict__.update(segment.__dict__ | {"layout": PLAIN, "block": plain.block})
        plain.block.slots = segment.block.slots.dequantised(torch.float32)
        twin.segments.append(plain)
    return twin


# The numbers


@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128])
def test_mixing_keeps_products_and_undoes_itself(head_dim: int) -> None:
    x, y = random(5, head_dim), random(5, head_dim, seed=1)
    torch.testing.assert_close(hadamard(hadamard(x)), x)
    torch.testing.assert_close(hadamard(x) @ hadamard(y).T, x @ y.T, rtol=1e-4, atol=1e-4)


@settings(max_examples=100)
@given(
    st.sampled_from([8, 4]),
    st.sampled_from([16, 64, 80, 96]),
    st.integers(0, 10**6),
    st.floats(-30, 30),
    st.booleans(),
)
def test_no_mixed_number_is_off_by_more_than_half_its_scale(
    bits: int, head_dim: int, seed: int, exponent: float, outlier: bool
) -> None:
    x = random(3, head_dim, seed=seed) * 10**exponent
    if outlier:
        x[0, seed % head_dim] *= 1000
    x[2] = 0
    found = quantise(x, bits)
    scale, least = found.scale.float(), torch.zeros(())
    if bits == 4:
        scale, least = scale.chunk(2, -1)
    runs = (*scale.shape, -1)
    off = (found.dequantise_transformed(torch.float32) - hadamard(x)).view(runs).abs()
    rounded = least.abs() / 256  # by bfloat16
    assert (off <= (0.505 * scale + rounded).unsqueeze(-1) * 1.05).all()
    assert torch.equal(dequantise(found, torch.float32)[2], torch.zeros(head_dim))


@pytest.mark.parametrize(("bits", "most"), [(8, 0.009), (4, 0.085)])
def test_of_normal_numbers_little_is_lost_whatever_stands_out(bits: int, most: float) -> None:
    x = random(1000, 64)
    x[:, 5] *= 30  # as in the keys of real models
    lost = dequantise(quantise(x, bits), torch.float32) - x
    assert float(lost.norm() / x.norm()) < most


@pytest.mark.parametrize(("bits", "size"), [("8", 132), ("8/4", 106), ("4", 80)])
def test_cells_take_what_the_layout_says(bits: str, size: int) -> None:
    plain = replace(PLAIN, head_dim=64, dtype=torch.bfloat16)
    kind = Bits(kv=bits).layouts(plain)[0]
    assert kind.cell_bytes == 2 * 2 * size
    assert Cells.zeros(kind, 10).nbytes == 10 * kind.cell_bytes
    assert plain.cell_bytes == 2 * 2 * 256


# Storage


@pytest.mark.parametrize("bits", QUANTISED)
def test_cells_are_copied_byte_by_byte_between_those_kept_alike(bits: str) -> None:
    first = some_cells(9).in_layout(layout(bits))
    second = Cells.zeros(layout(bits), 20)
    second.write(slice(4, 13), first)
    joined = Cells.concatenate([first, second.part(slice(4, 13))])
    for part in (second.part(slice(4, 13)), joined.part(slice(0, 9)), joined.part(slice(9, 18))):
        for one, other in (
            (part.stored_keys, first.stored_keys),
            (part.stored_values, first.stored_values),
        ):
            assert isinstance(one, Quantised)
            assert isinstance(other, Quantised)
            assert torch.equal(one.data, other.data)
            assert torch.equal(one.scale, other.scale)
    assert first.in_layout(layout(bits)) is first


@pytest.mark.parametrize("source", [None, "8", "4"])
@pytest.mark.parametrize("target", [None, "8", "4"])
def test_cells_go_from_any_kind_to_any_other(source: str | None, target: str | None) -> None:
    kinds = [PLAIN if each is None else layout(each) for each in (source, target)]
    cells = some_cells(9)
    found = cells.in_layout(kinds[0]).in_layout(kinds[1]).dequantised(torch.float32)
    most = 0.15 if "4" in (source, target) else 0.02
    for before, after in ((cells.keys, found.keys), (cells.values, found.values)):
        assert float((before - after).norm() / before.norm()) <= most


@pytest.mark.parametrize("bits", QUANTISED)
def test_keys_are_moved_and_values_stay(bits: str) -> None:
    cells = some_cells(9).in_layout(layout(bits))
    by = torch.arange(9) * 3
    found = cells.shifted(ROPE, by)
    exact = ROPE.shifted(cells.dequantised(torch.float32).keys, by)
    assert found.stored_values is cells.stored_values
    assert torch.equal(found.positions, cells.positions + by)
    off = found.dequantised(torch.float32).keys - exact
    assert float(off.norm() / exact.norm()) < (0.1 if bits == "4" else 0.01)


def test_quantised_cells_are_not_taken_for_plain_ones() -> None:
    cells = some_cells(3).in_layout(layout("8/4"))
    with pytest.raises(AssertionError, match="dequantised first"):
        _ = cells.keys


# Attention


@pytest.mark.parametrize("bits", QUANTISED)
@pytest.mark.parametrize("n", [1, 7])
def test_a_query_sees_what_restored_cells_would_show(bits: str, n: int) -> None:
    cells = some_cells(40).in_layout(layout(bits))
    plain = cells.dequantised(torch.float32)
    bias = torch.where(random(n, 40) > 0, 0.0, HIDDEN)
    for cell_bias in (None, random(2, 40, seed=5)):
        for layer in range(2):
            how = {"scale": 0.3, "bias": bias, "causal": False, "cell_bias": cell_bias}
            q = random(n, HEADS, 16, seed=7)
            found = attend_cells(q, cells.stored_keys[layer], cells.stored_values[layer], **how)
            exact = attend_cells(q, plain.keys[layer], plain.values[layer], **how)
            torch.testing.assert_close(found.out, exact.out, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(found.log_sum, exact.log_sum, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bits", QUANTISED)
@pytest.mark.parametrize("window", [None, 12])
@pytest.mark.parametrize("already", [7, 30])
def test_a_chunk_sees_stored_cells_as_they_are_kept_and_its_own_exactly(
    bits: str, window: int | None, already: int
) -> None:
    cache = new_cache(bits, window)
    feed(cache, already)
    twin = restored_twin(cache)
    torch.testing.assert_close(
        feed(cache, 5, seed=50), feed(twin, 5, seed=50), rtol=1e-4, atol=1e-4
    )
    assert twin.cells == cache.cells
    for mine, theirs in zip(cache.segments, twin.segments, strict=True):
        kept = theirs.read(0, theirs.length).in_layout(cache.layout).dequantised(torch.float32)
        found = mine.read(0, mine.length).dequantised(torch.float32)
        new = slice(mine.length - 5, None)
        assert torch.equal(found.keys[:, :, new], kept.keys[:, :, new])
        assert torch.equal(found.values[:, :, new], kept.values[:, :, new])


@pytest.mark.parametrize("bits", QUANTISED)
@pytest.mark.parametrize("window", [None, 12])
def test_a_token_sees_all_cells_as_they_are_kept_and_its_own_too(
    bits: str, window: int | None
) -> None:
    cache = new_cache(bits, window)
    feed(cache, 20)
    found = feed(cache, 1, seed=50)
    twin = restored_twin(cache)  # its newest cell is there already, as it was quantised
    for layer in range(2):
        segment = twin.segments[0]
        cells = segment.block.slots.part(slice(0, segment.length))
        q = ROPE.shifted(
            random(1, HEADS, 16, seed=50 + 9 * layer + HEADS)[None], torch.tensor([20])
        )
        keys, values = cells.keys[layer], cells.values[layer]
        exact = attend_cells(
            q[0].view(1, HEADS, 16), keys, values, scale=0.3, bias=None, causal=False
        )
        torch.testing.assert_close(found[layer], exact.out.view(1, -1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bits", QUANTISED)
def test_several_caches_together_find_what_each_finds_alone(bits: str) -> None:
    parent = new_cache(bits)
    feed(parent, 12)

    def forks() -> list[KVCache]:
        made = [parent.fork() for _ in range(3)]
        for index, fork in enumerate(made):
            fork.segments.append(Segment(fork.layout, 100))
            feed(fork, index + 1, seed=index)
        return made

    alone = torch.stack([feed(fork, 1, seed=60 + i)[:, 0] for i, fork in enumerate(forks())])
    together = forks()
    steps = [fork.step(1) for fork in together]
    group = GroupStep([step.__enter__() for step in steps], HEADS)  # type: ignore[misc]
    for layer in range(2):
        q, k, v = (
            torch.cat([random(1, n, 16, seed=60 + i + layer * 9 + n) for i in range(3)])
            for n in (HEADS, 2, 2)
        )
        found = group.attend(layer, q, k, v)
        torch.testing.assert_close(found, alone[:, layer], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bits", QUANTISED)
@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("layers", [PLAIN.layers, PLAIN.layers + 1])  # all, or more than there are
def test_a_step_that_is_put_back_leaves_every_byte_as_it_was(
    bits: str, count: int, layers: int
) -> None:
    cache = new_cache(bits, window=12)
    feed(cache, 30)
    before = cache.segments[0].read(0, 12)
    q, k, v = (random(count, n, 16, seed=n) for n in (HEADS, 2, 2))
    successor = cache.successor()
    with suppress(IndexError), successor.step(count) as step:
        for layer in range(layers):
            step.attend(layer, q, k, v)
    successor.rollback()
    after = cache.segments[0].read(0, 12)
    plain = torch.zeros(2, 2, 12, 16)
    for one, other in (
        (before.stored_keys, after.stored_keys),
        (before.stored_values, after.stored_values),
    ):
        copy_stored(plain, one)
        assert torch.equal(plain, dequantise(other, torch.float32))

"""Cells in 8 and 4 bits: their error, their size, and that nothing else changes."""

from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvkeep.cache import BITS, AttentionConfig, Bits, Cells, KVCache, Layout, Rope, Segment, Window
from kvkeep.cache.attention import MASK_BIAS, attend_cells
from kvkeep.cache.group_step import GroupStep
from kvkeep.cache.quantised import QuantisedTensor, copy_stored, dequantise, hadamard, quantise
from tests.examples import examples

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
    """Feed tokens; return each layer's output, `[layers, count, heads * head_dim]`."""
    outs = []
    with cache.step(count) as step:
        for layer in range(PLAIN.layers):
            q, k, v = (random(count, n, 16, seed=seed + layer * 9 + n) for n in (HEADS, 2, 2))
            outs.append(step.attend(layer, q, k, v))
    return torch.stack(outs)


def new_cache(bits: str, window: int | None = None) -> KVCache:
    cache = KVCache(layout(bits), AttentionConfig(HEADS, ROPE, 0.3))
    cache.window = Window(window)
    cache.segments.append(Segment(cache.layout, window or 100))
    return cache


def dequantised_copy(cache: KVCache) -> KVCache:
    """Return the same cache with its cells dequantised."""
    plain_cache = KVCache(PLAIN, AttentionConfig(HEADS, ROPE, cache.scale))
    plain_cache.window, plain_cache.time, plain_cache.serial = (
        cache.window,
        cache.time,
        cache.serial,
    )
    for segment in cache.segments:
        plain = Segment(PLAIN, segment.limit)
        plain.__dict__.update(segment.__dict__ | {"layout": PLAIN, "block": plain.block})
        plain.block.slots = segment.block.slots.dequantise(torch.float32)
        plain_cache.segments.append(plain)
    return plain_cache


# Quantisation


@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128])
def test_the_hadamard_transform_keeps_products_and_is_its_own_inverse(head_dim: int) -> None:
    x, y = random(5, head_dim), random(5, head_dim, seed=1)
    torch.testing.assert_close(hadamard(hadamard(x)), x)
    torch.testing.assert_close(hadamard(x) @ hadamard(y).T, x @ y.T, rtol=1e-4, atol=1e-4)


@settings(max_examples=examples(100))
@given(
    st.sampled_from([8, 4]),
    st.sampled_from([16, 64, 80, 96]),
    st.integers(0, 10**6),
    st.floats(-30, 30),
    st.booleans(),
)
def test_quantisation_error_is_at_most_half_a_scale(
    bits: int, head_dim: int, seed: int, exponent: float, outlier: bool
) -> None:
    x = random(3, head_dim, seed=seed) * 10**exponent
    if outlier:
        x[0, seed % head_dim] *= 1000
    x[2] = 0
    quantised = quantise(x, bits)
    scale, least = quantised.scale.float(), torch.zeros(())
    if bits == 4:
        scale, least = scale.chunk(2, -1)
    runs = (*scale.shape, -1)
    off = (quantised.dequantise_transformed(torch.float32) - hadamard(x)).view(runs).abs()
    rounded = least.abs() / 256  # by bfloat16
    assert (off <= (0.505 * scale + rounded).unsqueeze(-1) * 1.05).all()
    assert torch.equal(dequantise(quantised, torch.float32)[2], torch.zeros(head_dim))


@pytest.mark.parametrize(("bits", "most"), [(8, 0.009), (4, 0.085)])
def test_an_outlier_channel_does_not_increase_the_error(bits: int, most: float) -> None:
    x = random(1000, 64)
    x[:, 5] *= 30  # as in the keys of real models
    lost = dequantise(quantise(x, bits), torch.float32) - x
    assert float(lost.norm() / x.norm()) < most


@pytest.mark.parametrize(("bits", "size"), [("8", 132), ("8/4", 106), ("4", 80)])
def test_cells_take_the_bytes_of_their_layout(bits: str, size: int) -> None:
    plain = replace(PLAIN, head_dim=64, dtype=torch.bfloat16)
    kind = Bits(kv=bits).layouts(plain)[0]
    assert kind.cell_bytes == 2 * 2 * size
    assert Cells.zeros(kind, 10).nbytes == 10 * kind.cell_bytes
    assert plain.cell_bytes == 2 * 2 * 256


# Storage


@pytest.mark.parametrize("bits", QUANTISED)
def test_cells_of_one_layout_are_copied_bit_for_bit(bits: str) -> None:
    first = some_cells(9).to_layout(layout(bits))
    second = Cells.zeros(layout(bits), 20)
    second.write(slice(4, 13), first)
    joined = Cells.concatenate([first, second.part(slice(4, 13))])
    for part in (second.part(slice(4, 13)), joined.part(slice(0, 9)), joined.part(slice(9, 18))):
        for one, other in (
            (part.stored_keys, first.stored_keys),
            (part.stored_values, first.stored_values),
        ):
            assert isinstance(one, QuantisedTensor)
            assert isinstance(other, QuantisedTensor)
            assert torch.equal(one.data, other.data)
            assert torch.equal(one.scale, other.scale)
    assert first.to_layout(layout(bits)) is first


@pytest.mark.parametrize("source", [None, "8", "4"])
@pytest.mark.parametrize("target", [None, "8", "4"])
def test_cells_convert_between_any_two_layouts(source: str | None, target: str | None) -> None:
    kinds = [PLAIN if each is None else layout(each) for each in (source, target)]
    cells = some_cells(9)
    converted = cells.to_layout(kinds[0]).to_layout(kinds[1]).dequantise(torch.float32)
    most = 0.15 if "4" in (source, target) else 0.02
    for before, after in ((cells.keys, converted.keys), (cells.values, converted.values)):
        assert float((before - after).norm() / before.norm()) <= most


@pytest.mark.parametrize("bits", QUANTISED)
def test_shifting_rotates_keys_and_keeps_values(bits: str) -> None:
    cells = some_cells(9).to_layout(layout(bits))
    by = torch.arange(9) * 3
    shifted = cells.shift(ROPE, by)
    exact = ROPE.shift(cells.dequantise(torch.float32).keys, by)
    assert shifted.stored_values is cells.stored_values
    assert torch.equal(shifted.positions, cells.positions + by)
    off = shifted.dequantise(torch.float32).keys - exact
    assert float(off.norm() / exact.norm()) < (0.1 if bits == "4" else 0.01)


def test_quantised_cells_have_no_plain_keys() -> None:
    cells = some_cells(3).to_layout(layout("8/4"))
    with pytest.raises(AssertionError, match="dequantised first"):
        _ = cells.keys


# Attention


@pytest.mark.parametrize("bits", QUANTISED)
@pytest.mark.parametrize("n", [1, 7])
def test_attention_equals_that_over_dequantised_cells(bits: str, n: int) -> None:
    cells = some_cells(40).to_layout(layout(bits))
    plain = cells.dequantise(torch.float32)
    bias = torch.where(random(n, 40) > 0, 0.0, MASK_BIAS)
    for cell_bias in (None, random(2, 40, seed=5)):
        for layer in range(2):
            options = {"scale": 0.3, "bias": bias, "causal": False, "cell_bias": cell_bias}
            q = random(n, HEADS, 16, seed=7)
            actual = attend_cells(
                q, cells.stored_keys[layer], cells.stored_values[layer], **options
            )
            exact = attend_cells(q, plain.keys[layer], plain.values[layer], **options)
            torch.testing.assert_close(actual.out, exact.out, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(actual.log_sum, exact.log_sum, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bits", QUANTISED)
@pytest.mark.parametrize("window", [None, 12])
@pytest.mark.parametrize("already", [7, 30])
def test_a_chunk_sees_stored_cells_quantised_and_its_own_exactly(
    bits: str, window: int | None, already: int
) -> None:
    cache = new_cache(bits, window)
    feed(cache, already)
    plain_cache = dequantised_copy(cache)
    torch.testing.assert_close(
        feed(cache, 5, seed=50), feed(plain_cache, 5, seed=50), rtol=1e-4, atol=1e-4
    )
    assert plain_cache.cells == cache.cells
    for segment, plain_segment in zip(cache.segments, plain_cache.segments, strict=True):
        expected = (
            plain_segment.read(0, plain_segment.length)
            .to_layout(cache.layout)
            .dequantise(torch.float32)
        )
        actual = segment.read(0, segment.length).dequantise(torch.float32)
        new = slice(segment.length - 5, None)
        assert torch.equal(actual.keys[:, :, new], expected.keys[:, :, new])
        assert torch.equal(actual.values[:, :, new], expected.values[:, :, new])


@pytest.mark.parametrize("bits", QUANTISED)
@pytest.mark.parametrize("window", [None, 12])
def test_a_decoded_token_sees_all_cells_quantised(bits: str, window: int | None) -> None:
    cache = new_cache(bits, window)
    feed(cache, 20)
    actual = feed(cache, 1, seed=50)
    plain_cache = dequantised_copy(cache)  # it has the newest cell already, as it was quantised
    for layer in range(2):
        segment = plain_cache.segments[0]
        cells = segment.block.slots.part(slice(0, segment.length))
        q = ROPE.shift(random(1, HEADS, 16, seed=50 + 9 * layer + HEADS)[None], torch.tensor([20]))
        keys, values = cells.keys[layer], cells.values[layer]
        exact = attend_cells(
            q[0].view(1, HEADS, 16), keys, values, scale=0.3, bias=None, causal=False
        )
        torch.testing.assert_close(actual[layer], exact.out.view(1, -1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bits", QUANTISED)
def test_a_group_step_equals_single_steps(bits: str) -> None:
    parent = new_cache(bits)
    feed(parent, 12)

    def forks() -> list[KVCache]:
        caches = [parent.fork() for _ in range(3)]
        for index, fork in enumerate(caches):
            fork.segments.append(Segment(fork.layout, 100))
            feed(fork, index + 1, seed=index)
        return caches

    alone = torch.stack([feed(fork, 1, seed=60 + i)[:, 0] for i, fork in enumerate(forks())])
    together = forks()
    steps = [fork.step(1) for fork in together]
    step_of_all = GroupStep([step.__enter__() for step in steps])  # type: ignore[misc]
    attention = step_of_all.layer_attention
    for layer in range(2):
        q, k, v = (
            torch.cat([random(1, n, 16, seed=60 + i + layer * 9 + n) for i in range(3)])
            for n in (HEADS, 2, 2)
        )
        actual = attention.attend(layer, q, k, v)
        torch.testing.assert_close(actual, alone[:, layer], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bits", QUANTISED)
@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("layers", [PLAIN.layers, PLAIN.layers + 1])  # all, or more than there are
def test_a_rolled_back_step_leaves_every_byte_as_it_was(bits: str, count: int, layers: int) -> None:
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

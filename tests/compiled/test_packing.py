"""Packed matrices say what they were made of."""

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, dequantize, quantize
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.models.packing import BLOCK, GROUP, from_gguf, packable, packed, packed_shapes, quantise

BITS = st.sampled_from((4, 8))


@given(BITS, st.integers(1, 40), st.integers(1, 4), st.integers(0, 9))
def test_what_is_packed_comes_back(bits, rows, groups, seed):  # type: ignore[no-untyped-def]
    weights = torch.randn(rows, groups * GROUP, generator=torch.Generator().manual_seed(seed))
    matrix = quantise(weights, bits)
    there = packed(matrix)
    assert (there.rows, there.columns) == (rows, groups * GROUP)
    shapes = (tuple(there.data.shape), tuple(there.scales.shape))
    assert shapes == packed_shapes(bits, rows, groups * GROUP)
    back = there.unpacked()
    assert torch.equal(back.q, matrix.q)
    assert torch.equal(back.scales, matrix.scales)
    assert (back.minima is None) == (bits == 8)
    if matrix.minima is not None and back.minima is not None:
        assert torch.equal(back.minima, matrix.minima)


@given(BITS, st.integers(0, 9))
def test_no_weight_moves_by_more_than_half_a_step(bits, seed):  # type: ignore[no-untyped-def]
    weights = torch.randn(BLOCK, 8 * GROUP, generator=torch.Generator().manual_seed(seed))
    matrix = quantise(weights, bits)
    steps = matrix.scales.float().repeat_interleave(GROUP, 1)
    # A scale or minimum in float16 is itself off by up to 2 ** -11 of it.
    slack = 2**-11 * (16 if bits == 4 else 128) * steps + 2**-11 * weights.abs().max()
    assert ((matrix.values() - weights).abs() <= steps / 2 + slack).all()


@pytest.mark.parametrize("bits", [4, 8])
def test_a_constant_group_is_exact(bits):  # type: ignore[no-untyped-def]
    weights = torch.zeros(3, 2 * GROUP)
    weights[1] = 0.5
    assert torch.allclose(quantise(weights, bits).values(), weights, atol=1e-3)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_gguf_blocks_are_taken_over_without_loss(kind: str) -> None:
    weights = np.random.default_rng(0).standard_normal((48, 96)).astype(np.float32)
    blocks = quantize(weights, GGMLQuantizationType[kind])
    wanted = dequantize(blocks, GGMLQuantizationType[kind])
    matrix = from_gguf(kind, torch.from_numpy(blocks))
    assert matrix is not None
    values = matrix.values()
    # The same product and sum; gguf's may round them in another order.
    assert torch.allclose(values, torch.from_numpy(wanted), rtol=1e-6, atol=1e-6)
    assert torch.equal(packed(matrix).unpacked().values(), values)


def test_other_gguf_kinds_are_not_packed() -> None:
    assert from_gguf("Q6_K", torch.zeros(1, 210, dtype=torch.uint8)) is None


def test_rows_of_whole_groups_can_be_packed() -> None:
    assert packable(1, 32)
    assert not packable(16, 48)

"""Attention over one run of cells: the CPU's flash kernel, and matrix products elsewhere."""

import pytest
import torch
from torch import Tensor

from kvkeep.cache.attention import (
    MASK_BIAS,
    PartialAttention,
    attend_by_flash,
    attend_cells,
    attend_densely,
    combine,
)

KV_HEADS, GROUPS, HEAD_DIM, SCALE = 2, 3, 16, 0.25
KERNELS = {"flash": attend_by_flash, "dense": attend_densely}


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def operands(n: int, cells: int, sharpness: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Operands in a kernel's shapes: queries by group, keys and values that all groups share."""
    q = random(GROUPS, KV_HEADS, n, HEAD_DIM, seed=1) * sharpness
    keys = random(1, KV_HEADS, cells, HEAD_DIM, seed=2) * sharpness
    return q, keys, random(1, KV_HEADS, cells, HEAD_DIM, seed=3)


def reference_attention(
    q: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, causal: bool
) -> PartialAttention:
    """Attention in float64, query by query."""
    q, keys, values = (x.double() for x in (q, keys, values))
    outs, sums = torch.empty(q.shape, dtype=torch.float64), torch.empty(q.shape[:-1]).double()
    for group in range(q.shape[0]):
        for head in range(q.shape[1]):
            for row in range(q.shape[2]):
                scores = SCALE * (keys[0, head] @ q[group, head, row])
                if bias is not None:
                    scores = scores + bias.expand(*q.shape[:3], len(scores))[group, head, row]
                scores = scores[: row + 1] if causal else scores
                seen = values[0, head, : len(scores)]
                outs[group, head, row] = scores.softmax(0) @ seen
                sums[group, head, row] = scores.logsumexp(0)
    return PartialAttention(outs, sums)


def some_hidden(n: int, cells: int) -> Tensor:
    """A bias with which each query sees the first cell and about half of the others."""
    bias = torch.where(random(n, cells, seed=4) > 0, 0.0, MASK_BIAS)
    bias[:, 0] = 0.0
    return bias


def cell_bias_of(n: int, cells: int) -> Tensor:
    return random(1, KV_HEADS, 1, cells, seed=5).expand(1, KV_HEADS, n, cells)


BIASES = {
    "none": lambda n, cells: None,
    "hiding": some_hidden,
    "of cells": cell_bias_of,
    "both": lambda n, cells: some_hidden(n, cells) + cell_bias_of(n, cells),
}


@pytest.mark.parametrize("attend", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize("bias", BIASES.values(), ids=BIASES)
@pytest.mark.parametrize("n", [1, 7])
def test_both_kernels_equal_float64(attend, bias, n: int) -> None:  # type: ignore[no-untyped-def]
    q, keys, values = operands(n, 40)
    bias_tensor = bias(n, 40)
    actual = attend(q, keys, values, scale=SCALE, bias=bias_tensor, causal=False)
    expected = reference_attention(q, keys, values, bias_tensor, causal=False)
    torch.testing.assert_close(actual.out.double(), expected.out, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(actual.log_sum.double(), expected.log_sum, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("attend", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize("n", [2, 40])
def test_both_kernels_are_causal(attend, n: int) -> None:  # type: ignore[no-untyped-def]
    q, keys, values = operands(n, n)
    actual = attend(q, keys, values, scale=SCALE, bias=None, causal=True)
    expected = reference_attention(q, keys, values, None, causal=True)
    torch.testing.assert_close(actual.out.double(), expected.out, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(actual.log_sum.double(), expected.log_sum, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("attend", KERNELS.values(), ids=KERNELS)
def test_a_query_that_sees_no_cell_gets_a_part_of_zero_weight(attend) -> None:  # type: ignore[no-untyped-def]
    q, keys, values = operands(3, 9)
    bias = torch.zeros(3, 9)
    bias[1] = MASK_BIAS
    actual = attend(q, keys, values, scale=SCALE, bias=bias, causal=False)
    assert actual.out.isfinite().all()
    other = PartialAttention(torch.ones_like(actual.out), torch.full_like(actual.log_sum, -50.0))
    assert torch.equal(combine([other, actual]).out[:, :, 1], other.out[:, :, 1])


@pytest.mark.parametrize("attend", KERNELS.values(), ids=KERNELS)
def test_large_products_are_not_rounded_to_bfloat16(attend) -> None:  # type: ignore[no-untyped-def]
    """Parts are weighted by their log-sums: an error of 0.1 would change a weight by 10%."""
    halves = [x.bfloat16() for x in operands(5, 40, sharpness=6.0)]
    actual = attend(*halves, scale=SCALE, bias=None, causal=False)
    expected = reference_attention(*halves, None, causal=False)
    assert expected.log_sum.max() > 60
    assert (actual.log_sum.double() - expected.log_sum).abs().max() <= 1e-3
    assert (actual.out.double() - expected.out).norm() <= 0.01 * expected.out.norm()


@pytest.mark.parametrize("n", [1, 7])
@pytest.mark.parametrize("hide", [False, True])
@pytest.mark.parametrize("with_cell_bias", [False, True])
def test_heads_of_one_kv_head_share_its_keys(n: int, hide: bool, with_cell_bias: bool) -> None:
    """Queries in a model's layout equal each head alone with its own copy of the keys."""
    q = random(n, KV_HEADS * GROUPS, HEAD_DIM, seed=6)
    keys, values = (random(KV_HEADS, 30, HEAD_DIM, seed=seed) for seed in (7, 8))
    bias = some_hidden(n, 30) if hide else None
    cell_bias = random(KV_HEADS, 30, seed=9) if with_cell_bias else None
    actual = attend_cells(
        q, keys, values, scale=SCALE, bias=bias, causal=False, cell_bias=cell_bias
    )
    rows = actual.out if n == 1 else actual.out.permute(2, 1, 0, 3)
    outs = rows.reshape(n, KV_HEADS * GROUPS, HEAD_DIM)
    for head in range(KV_HEADS * GROUPS):
        shared = head // GROUPS
        scores = SCALE * q[:, head] @ keys[shared].T
        scores = scores + (0.0 if bias is None else bias)
        scores = scores + (0.0 if cell_bias is None else cell_bias[shared])
        expected = scores.softmax(-1) @ values[shared]
        torch.testing.assert_close(outs[:, head], expected, rtol=1e-4, atol=1e-5)

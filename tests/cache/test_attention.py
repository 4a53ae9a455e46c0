"""Attention over one run of cells: the CPU's kernel, and plain products for other devices."""

import pytest
import torch
from torch import Tensor

from kvkeep.cache.attention import (
    HIDDEN,
    Part,
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
    """As a kernel takes them: queries of groups, keys and values that all groups share."""
    q = random(GROUPS, KV_HEADS, n, HEAD_DIM, seed=1) * sharpness
    keys = random(1, KV_HEADS, cells, HEAD_DIM, seed=2) * sharpness
    return q, keys, random(1, KV_HEADS, cells, HEAD_DIM, seed=3)


def exactly(q: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, causal: bool) -> Part:
    """In float64, query by query."""
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
    return Part(outs, sums)


def some_hidden(n: int, cells: int) -> Tensor:
    """Each query sees the first cell, and about half of the others."""
    bias = torch.where(random(n, cells, seed=4) > 0, 0.0, HIDDEN)
    bias[:, 0] = 0.0
    return bias


def of_cells(n: int, cells: int) -> Tensor:
    return random(1, KV_HEADS, 1, cells, seed=5).expand(1, KV_HEADS, n, cells)


BIASES = {
    "none": lambda n, cells: None,
    "hiding": some_hidden,
    "of cells": of_cells,
    "both": lambda n, cells: some_hidden(n, cells) + of_cells(n, cells),
}


@pytest.mark.parametrize("attend", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize("bias", BIASES.values(), ids=BIASES)
@pytest.mark.parametrize("n", [1, 7])
def test_both_find_what_float64_finds(attend, bias, n: int) -> None:  # type: ignore[no-untyped-def]
    q, keys, values = operands(n, 40)
    added = bias(n, 40)
    found = attend(q, keys, values, scale=SCALE, bias=added, causal=False)
    wanted = exactly(q, keys, values, added, causal=False)
    torch.testing.assert_close(found.out.double(), wanted.out, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.log_sum.double(), wanted.log_sum, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("attend", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize("n", [2, 40])
def test_both_hide_what_comes_later(attend, n: int) -> None:  # type: ignore[no-untyped-def]
    q, keys, values = operands(n, n)
    found = attend(q, keys, values, scale=SCALE, bias=None, causal=True)
    wanted = exactly(q, keys, values, None, causal=True)
    torch.testing.assert_close(found.out.double(), wanted.out, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.log_sum.double(), wanted.log_sum, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("attend", KERNELS.values(), ids=KERNELS)
def test_a_query_that_sees_nothing_has_a_part_of_no_weight(attend) -> None:  # type: ignore[no-untyped-def]
    q, keys, values = operands(3, 9)
    bias = torch.zeros(3, 9)
    bias[1] = HIDDEN
    found = attend(q, keys, values, scale=SCALE, bias=bias, causal=False)
    assert found.out.isfinite().all()
    other = Part(torch.ones_like(found.out), torch.full_like(found.log_sum, -50.0))
    assert torch.equal(combine([other, found]).out[:, :, 1], other.out[:, :, 1])


@pytest.mark.parametrize("attend", KERNELS.values(), ids=KERNELS)
def test_large_products_are_not_rounded_to_bfloat16(attend) -> None:  # type: ignore[no-untyped-def]
    """Parts are weighed against each other by their sums: a tenth would be 10% of the weight."""
    halves = [x.bfloat16() for x in operands(5, 40, sharpness=6.0)]
    found = attend(*halves, scale=SCALE, bias=None, causal=False)
    wanted = exactly(*halves, None, causal=False)
    assert wanted.log_sum.max() > 60
    assert (found.log_sum.double() - wanted.log_sum).abs().max() <= 1e-3
    assert (found.out.double() - wanted.out).norm() <= 0.01 * wanted.out.norm()


@pytest.mark.parametrize("n", [1, 7])
@pytest.mark.parametrize("hides", [False, True])
@pytest.mark.parametrize("of_their_own", [False, True])
def test_heads_that_share_keys_lie_together(n: int, hides: bool, of_their_own: bool) -> None:
    """Queries as a model gives them, against each head by itself with its own copy of the keys."""
    q = random(n, KV_HEADS * GROUPS, HEAD_DIM, seed=6)
    keys, values = (random(KV_HEADS, 30, HEAD_DIM, seed=seed) for seed in (7, 8))
    bias = some_hidden(n, 30) if hides else None
    cell_bias = random(KV_HEADS, 30, seed=9) if of_their_own else None
    found = attend_cells(q, keys, values, scale=SCALE, bias=bias, causal=False, cell_bias=cell_bias)
    rows = found.out if n == 1 else found.out.permute(2, 1, 0, 3)
    outs = rows.reshape(n, KV_HEADS * GROUPS, HEAD_DIM)
    for head in range(KV_HEADS * GROUPS):
        shared = head // GROUPS
        scores = SCALE * q[:, head] @ keys[shared].T
        scores = scores + (0.0 if bias is None else bias)
        scores = scores + (0.0 if cell_bias is None else cell_bias[shared])
        wanted = scores.softmax(-1) @ values[shared]
        torch.testing.assert_close(outs[:, head], wanted, rtol=1e-4, atol=1e-5)

"""Attention by the GPU's fused kernels equals attention in float64."""

import pytest
import torch

from kvkeep.cache.attention import MASK_BIAS, attend_cells


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("kind", ["none", "causal", "hiding", "hidden whole", "cells"])
@pytest.mark.parametrize("n", [1, 2, 7, 300])
def test_fused_kernels_equal_float64(
    n: int, kind: str, head_dim: int, device: torch.device
) -> None:
    if kind == "causal" and n == 1:
        pytest.skip("a single query is never causal")
    random = torch.Generator().manual_seed(n)
    cells = n if kind == "causal" else 517
    q = torch.randn(n, 6, head_dim, generator=random).bfloat16() * 2
    stored = torch.randn(2, 2, cells + 5, head_dim, generator=random).bfloat16()
    keys, values = stored[0][:, 5:], stored[1][:, 5:]
    bias = cell_bias = None
    if kind.startswith("hid"):
        bias = torch.where(torch.rand(n, cells, generator=random) < 0.5, 0.0, MASK_BIAS)
        bias[:, 0] = 0.0
        if kind == "hidden whole" and n > 1:
            bias[1] = MASK_BIAS
    if kind == "cells":
        cell_bias = torch.randn(2, cells, generator=random)
    found = attend_cells(
        q.to(device),
        keys.to(device),
        values.to(device),
        scale=0.1,
        bias=None if bias is None else bias.to(device),
        causal=kind == "causal",
        cell_bias=None if cell_bias is None else cell_bias.to(device),
    )
    groups = q.double().view(n, 2, 3, head_dim).permute(2, 1, 0, 3)
    scores = groups @ keys.double().transpose(-1, -2) * 0.1
    if kind == "causal":
        scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), MASK_BIAS)
    scores = scores + (0 if bias is None else bias)
    scores = scores + (0 if cell_bias is None else cell_bias[:, None])
    out, log_sum = found.out.cpu().double(), found.log_sum.cpu().double()
    expected_out, expected_sum = scores.softmax(-1) @ values.double(), scores.logsumexp(-1)
    if n == 1:  # the heads of one KV head are rows
        expected_out, expected_sum = expected_out.permute(2, 1, 0, 3), expected_sum.permute(2, 1, 0)
    seen = expected_sum > -1e20
    assert out.isfinite().all()
    assert (log_sum[~seen] < -1e20).all()
    assert (log_sum - expected_sum)[seen].abs().max() <= 2e-3
    assert (out - expected_out)[seen].norm() <= 0.01 * expected_out[seen].norm()

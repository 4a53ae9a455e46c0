"""Attention of a prompt's rows against plain products, and alone against beside other rows.

Every combination that the kernels have: head widths, heads that share a KV head, biases of queries
and of cells, ragged cells, soft caps, sinks. test_sizes.py has windows and quantised cells.
"""

import ctypes
import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from kvkeep.cache.attention import MASK_BIAS
from kvkeep.compiled import structures as c
from kvkeep.compiled.binding import HEAD_DIMS, kernel_library, raise_for_status
from kvkeep.compiled.chunk import packed_bytes
from kvkeep.compiled.operands import stored_cells

pytestmark = pytest.mark.skipif(kernel_library() is None, reason="no compiled kernels here")

CELLS = 300  # five blocks, the last of which is not full
HEADS = [(1, 1), (3, 1), (4, 2), (16, 1)]


@dataclass
class Prompt:
    """Queries `[n, heads, d]` over stored cells.

    keys, values: `[kv_heads, cells, d]`, of which each head sees the first `counts`. bias: `[n,
    cells]`. cell_bias: `[kv_heads, cells]`. sinks: `[heads]`.
    """

    q: Tensor
    keys: Tensor
    values: Tensor
    bias: Tensor
    cell_bias: Tensor | None = None
    counts: Tensor | None = None
    sinks: Tensor | None = None
    softcap: float = 0.0
    causal: bool = False


def prompt(n: int, heads: int, kv_heads: int, head_dim: int, seed: int = 0) -> Prompt:
    """Return queries each of which sees some 70 cells, further on for later tokens."""
    random = torch.Generator().manual_seed(seed + head_dim)
    q = torch.randn(n, heads, head_dim, generator=random).bfloat16()
    keys, values = torch.randn(2, kv_heads, CELLS, head_dim, generator=random).bfloat16()
    bias = torch.rand(n, CELLS, generator=random)
    first = torch.arange(n)[:, None] * 5
    cell = torch.arange(CELLS)
    bias[(cell < first) | (cell >= first + 70)] = MASK_BIAS
    return Prompt(q, keys, values, bias)


def compact(x: Tensor, counts: Tensor) -> Tensor:
    """Return the first cells of each head, one head after the other, as ragged cells lie."""
    return torch.cat([row[:count] for row, count in zip(x, counts.tolist(), strict=True)])


def attend(given: Prompt, threads: int = 1) -> tuple[Tensor, Tensor]:
    """Attend by the kernels: the output `[n, heads * d]`, and the log sums `[heads, n]`."""
    kernels, (n, heads, head_dim) = kernel_library(), given.q.shape
    assert kernels is not None
    kv_heads, cells = given.keys.shape[:2]
    half = torch.ones(1, n, head_dim // 2)
    angles = torch.cat((half, 0 * half), -1)  # no rotation
    keys, values, cell_bias, offsets = given.keys, given.values, given.cell_bias, None
    described = [stored_cells(x, (kv_heads, cells, head_dim), 0) for x in (keys, values)]
    if given.counts is not None:
        zero = torch.zeros(given.counts.shape[0], CELLS)
        bias = zero if cell_bias is None else cell_bias
        keys, values, cell_bias = (compact(x, given.counts) for x in (keys, values, bias))
        offsets = torch.cat((torch.zeros(1, dtype=torch.int64), given.counts.cumsum(0)))
        cells = int(given.counts.max())
        described = [stored_cells(x, (len(x), head_dim), 0, 0) for x in (keys, values)]
    hidden = None if given.causal else given.bias[:, :cells].contiguous()
    view = c.CChunkView(
        *described,
        cells,
        0,
        int(given.causal),
        cells,
        None if hidden is None else hidden.data_ptr(),
        None if cell_bias is None else cell_bias.data_ptr(),
        0 if offsets is not None or cell_bias is None else cell_bias.stride(0),
        None if offsets is None else offsets.data_ptr(),
    )
    packed = torch.empty(packed_bytes([view], kv_heads, head_dim), dtype=torch.uint8)
    out = torch.full((n, heads * head_dim), math.nan, dtype=torch.bfloat16)
    log_sums = torch.full((heads, n), math.nan)
    chunk = c.CChunk(
        tokens=n,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rotations=1,
        view_count=1,
        threads=threads,
        softmax_scale=head_dim**-0.5,
        softcap=given.softcap,
        sinks=None if given.sinks is None else given.sinks.data_ptr(),
        q=given.q.data_ptr(),
        angles=ctypes.cast(angles.data_ptr(), ctypes.POINTER(ctypes.c_float)),
        views=(c.CChunkView * 1)(view),
        packed=packed.data_ptr(),
        out=out.data_ptr(),
        log_sums=log_sums.data_ptr(),
    )
    raise_for_status(kernels.kvkeep_attend_chunk(chunk))
    return out, log_sums


def attend_plainly(given: Prompt) -> tuple[Tensor, Tensor]:
    """Do the same naively in float64."""
    n, heads, head_dim = given.q.shape
    kv_heads, cells = given.keys.shape[:2]
    groups = heads // kv_heads
    keys, values = (x.double().repeat_interleave(groups, 0) for x in (given.keys, given.values))
    scores = torch.einsum("nhd,hcd->hnc", given.q.double(), keys) / math.sqrt(head_dim)
    if given.softcap:
        scores = given.softcap * (scores / given.softcap).tanh()
    if given.causal:
        scores = scores.masked_fill(torch.ones(n, cells).triu(1).bool(), -math.inf)
    else:
        scores = scores + given.bias.double()
    if given.cell_bias is not None:
        scores = scores + given.cell_bias.double().repeat_interleave(groups, 0)[:, None]
    if given.counts is not None:
        missing = torch.arange(cells) >= given.counts.repeat_interleave(groups)[:, None]
        scores = scores.masked_fill(missing[:, None], -math.inf)
    if given.sinks is not None:
        sink = given.sinks.double()[:, None, None].expand(-1, n, -1)
        scores, values = torch.cat((scores, sink), -1), torch.cat((values, 0 * values[:, :1]), 1)
    out = torch.einsum("hnc,hcd->nhd", scores.softmax(-1), values)
    return out.flatten(1), scores.logsumexp(-1)


def require_near(given: Prompt) -> None:
    (out, log_sums), (expected, expected_sums) = attend(given), attend_plainly(given)
    assert (out.double() - expected).abs().max() < 0.025
    assert (log_sums.double() - expected_sums).abs().max() < 0.005


@pytest.mark.parametrize("n", [1, 17, 46])
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_results_are_near_those_of_plain_products(
    head_dim: int, heads: int, kv_heads: int, n: int
) -> None:
    require_near(prompt(n, heads, kv_heads, head_dim))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_biases_of_cells_caps_and_sinks_are_applied(head_dim: int) -> None:
    given = prompt(46, 6, 2, head_dim)
    random = torch.Generator().manual_seed(1)
    given = replace(given, q=8 * given.q, cell_bias=torch.rand(2, CELLS, generator=random))
    assert given.cell_bias is not None
    given.cell_bias[:, 64:128] = MASK_BIAS
    require_near(given)
    require_near(replace(given, softcap=5.0))
    require_near(replace(given, sinks=torch.randn(6, generator=random), softcap=50.0))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_heads_of_different_counts_end_where_their_cells_end(head_dim: int) -> None:
    given = prompt(20, 6, 3, head_dim)
    given = replace(given, bias=torch.zeros(20, CELLS), counts=torch.tensor([CELLS, 1, 130]))
    require_near(given)


@pytest.mark.parametrize("n", [1, 16, 17, 64, 65, 130])
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_later_tokens_are_not_seen(heads: int, kv_heads: int, n: int) -> None:
    given = prompt(n, heads, kv_heads, 64)
    keys, values = (x[:, :n].contiguous() for x in (given.keys, given.values))
    require_near(replace(given, keys=keys, values=values, causal=True))


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_a_row_has_the_same_bits_alone_and_beside_others(
    head_dim: int, heads: int, kv_heads: int
) -> None:
    given = prompt(46, heads, kv_heads, head_dim)
    out, log_sums = attend(given)
    for rows in (slice(0, 1), slice(7, 8), slice(45, 46), slice(3, 20), slice(11, 46)):
        some, some_sums = attend(replace(given, q=given.q[rows], bias=given.bias[rows]))
        assert torch.equal(some, out[rows])
        assert torch.equal(some_sums, log_sums[:, rows])

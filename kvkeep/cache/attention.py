"""Attention over one run of cells, and the exact combination of several such parts.

A softmax over cells of several segments is computed segment by segment. Each part gives its output
and the log of its softmax denominator, by which the parts are combined (the split-softmax identity
of Milakov and Gimelshein, arXiv:1805.02867, which flash attention uses between its blocks).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kvkeep.cache.quantised import KVTensor, QuantisedTensor, hadamard
from kvkeep.cache.rope import Rope

# Added to a logit to hide a cell. It is finite, so that a query that sees no cell of a segment gets
# a result of weight zero instead of NaN.
MASK_BIAS = -1e30


class PartialAttention(NamedTuple):
    """The attention of queries over some of the cells, to be combined with that over others.

    out: `[..., n, head_dim]`, the softmax-weighted values.
    log_sum: `[..., n]` float32, the natural log of the sum of exponentials.
    """

    out: Tensor
    log_sum: Tensor


@dataclass(frozen=True)
class AttentionConfig:
    """The attention settings that all layers of a cache share.

    heads: number of query heads.
    scale: factor on the products of queries and keys.
    softcap: c in c * tanh(x / c), where x is the scaled product (Gemma 2, arXiv:2408.00118); 0 for
        none.
    sinks: `[layers, heads]` float32, a learned logit of each head that takes a share of the softmax
        and contributes no value (gpt-oss, arXiv:2508.10925); None for none.
    """

    heads: int
    rope: Rope
    scale: float
    softcap: float = 0.0
    sinks: Tensor | None = None

    def with_sinks(self, layer: int, part: PartialAttention, n: int) -> PartialAttention:
        """Add a layer's sinks to the attention of n queries over all cells.

        part: as `attend_cells` returns it for n queries.
        """
        if self.sinks is None:
            return part
        kv_heads = part.log_sum.shape[1]
        sinks = self.sinks[layer].view(kv_heads, -1)  # [kv_heads, groups]
        sinks = sinks[None] if n == 1 else sinks.T.unsqueeze(-1)  # with the dimensions of log_sum
        share = torch.sigmoid(part.log_sum - sinks).unsqueeze(-1)
        return PartialAttention(part.out * share, torch.logaddexp(part.log_sum, sinks))


def attend_cells(
    q: Tensor,
    keys: KVTensor,
    values: KVTensor,
    *,
    scale: float,
    bias: Tensor | None,
    causal: bool,
    cell_bias: Tensor | None = None,
    softcap: float = 0.0,
) -> PartialAttention:
    """Attend with n queries to one run of cells.

    Args:
        q: `[n, heads, head_dim]`, rotated; the heads of one KV head are adjacent.
        keys, values: `[kv_heads, cells, head_dim]`, any strides with a dense last dimension.
            Quantised ones stay in the Hadamard-transformed space: the queries are transformed like
            the keys, and the output is transformed back.
        scale, softcap: as in `AttentionConfig`.
        bias: `[n, cells]` float32, added to the scaled products; `MASK_BIAS` hides a cell. A
            single query may have a bias for each of its heads, `[groups, cells]`.
        causal: query i sees cells 0..i only (n == cells; not together with a bias).
        cell_bias: `[kv_heads, cells]` float32, each cell's own bias, added likewise.

    Returns:
        out `[groups, kv_heads, n, head_dim]`, log_sum `[groups, kv_heads, n]`, where groups is the
        number of query heads per KV head. For a single query the shape is
        `[1, kv_heads, groups, ...]`: the heads that share a KV head are rows of one product, so
        each key is read once.
    """
    is_transformed = isinstance(values, QuantisedTensor)
    dtype, (n, heads, head_dim) = q.dtype, q.shape
    if isinstance(keys, QuantisedTensor):
        q, keys = hadamard(q).to(dtype), keys.dequantise_transformed(dtype)
    if isinstance(values, QuantisedTensor):
        values = values.dequantise_transformed(dtype)
    kv_heads = keys.shape[0]
    groups = heads // kv_heads
    q = q.view(n, kv_heads, groups, head_dim)
    keys, values = keys.unsqueeze(0), values.unsqueeze(0)
    if cell_bias is not None:
        bias = cell_bias.unsqueeze(1) if bias is None else cell_bias.unsqueeze(1) + bias
        bias = bias.expand(-1, n if n > 1 else bias.shape[1], -1).unsqueeze(0)
    if n > 1:
        q = q.permute(2, 1, 0, 3)
    if q.device.type == "cpu" and not softcap:
        out, log_sum = attend_by_flash(q, keys, values, scale=scale, bias=bias, causal=causal)
    elif _suits_cuda_kernels(q) and not softcap and cell_bias is None:
        out, log_sum = attend_on_cuda(q, keys, values, scale=scale, bias=bias, causal=causal)
    else:
        out, log_sum = attend_densely(
            q, keys, values, scale=scale, bias=bias, causal=causal, softcap=softcap
        )
    return PartialAttention(hadamard(out) if is_transformed else out, log_sum)


def range_bias(
    ranks: Tensor, visible_ranks: Sequence[tuple[int, int]], device: torch.device
) -> Tensor:
    """Return the bias `[n, cells]` float32 that hides cells whose rank a query does not see.

    ranks: `[cells]` int64, each cell's index in order of age, 0 for the oldest. visible_ranks: for
    each query, the range (first, end) of ranks that it sees, as in a sliding window.
    """
    bounds = torch.tensor(visible_ranks, dtype=torch.int64, device="cpu")
    is_hidden = (ranks < bounds[:, :1]) | (ranks >= bounds[:, 1:])
    bias = torch.zeros(is_hidden.shape, dtype=torch.float32, device="cpu")
    return bias.masked_fill_(is_hidden, MASK_BIAS).to(device)


def attend_by_flash(
    q: Tensor, keys: Tensor, values: Tensor, *, scale: float, bias: Tensor | None, causal: bool
) -> PartialAttention:
    """Attend by one call of PyTorch's flash kernel for CPUs.

    q: `[groups, kv_heads, n, head_dim]`. keys, values: `[1, kv_heads, cells, head_dim]`. bias:
    broadcasts to `[groups, kv_heads, n, cells]`, with four dimensions or with the last two.
    """
    keys, values = (x.expand(q.shape[0], -1, -1, -1) for x in (keys, values))
    out, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, keys, values, is_causal=causal, attn_mask=bias, scale=scale
    )
    return PartialAttention(out, log_sum)


def _suits_cuda_kernels(q: Tensor) -> bool:
    return (
        q.device.type == "cuda" and q.dtype is torch.bfloat16 and q.shape[-1] in (64, 96, 128, 256)
    )


def attend_on_cuda(
    q: Tensor, keys: Tensor, values: Tensor, *, scale: float, bias: Tensor | None, causal: bool
) -> PartialAttention:
    """Attend by one of PyTorch's fused kernels for CUDA, in bfloat16; as `attend_by_flash`.

    bias: 0 or `MASK_BIAS`, since it is rounded to bfloat16.
    """
    keys, values = (x.expand(q.shape[0], -1, -1, -1) for x in (keys, values))
    if bias is None:
        out, log_sum, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            q, keys, values, 0.0, causal, False, scale=scale
        )
        return PartialAttention(out, log_sum)
    # The kernel reads rows of the bias in whole groups of 8 numbers.
    cells = bias.shape[-1]
    shape = (*bias.shape[:-1], -(-cells // 8) * 8)
    padded = torch.zeros(shape, dtype=q.dtype, device=q.device)
    padded[..., :cells] = bias
    expanded = padded[..., :cells].expand(*q.shape[:3], cells)
    out, log_sum, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        q, keys, values, expanded, True, 0.0, False, scale=scale
    )
    return PartialAttention(out, log_sum[..., : q.shape[2]])


def attend_densely(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scale: float,
    bias: Tensor | None,
    causal: bool,
    softcap: float = 0.0,
) -> PartialAttention:
    """Attend by matrix products, for softcaps and for what no fused kernel of the device takes.

    Shapes as in `attend_by_flash`. Products of queries and keys are float32, as in a flash kernel:
    in bfloat16 a large product would be off by a tenth or more.
    """
    scores = torch.matmul(q.float(), keys.float().transpose(-1, -2)) * scale
    scores = softcapped(scores, softcap)
    if causal:
        is_hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(is_hidden, MASK_BIAS)
    if bias is not None:
        scores = scores + bias
    log_sum = scores.logsumexp(-1)
    weights = (scores - log_sum.unsqueeze(-1)).exp()
    return PartialAttention(torch.matmul(weights.to(values.dtype), values), log_sum)


def softcapped(products: Tensor, softcap: float) -> Tensor:
    """Return the logits of scaled products: `softcap * tanh(x / softcap)`; x for a softcap of 0."""
    return softcap * torch.tanh(products / softcap) if softcap else products


def combine(parts: list[PartialAttention]) -> PartialAttention:
    """Combine parts into the attention over all of their cells, accumulated in float32."""
    total = parts[0]
    for part in parts[1:]:  # share: the part's share of the softmax denominator
        share = torch.sigmoid(part.log_sum - total.log_sum).unsqueeze(-1)
        out = torch.lerp(total.out.float(), part.out.float(), share)
        total = PartialAttention(out, torch.logaddexp(total.log_sum, part.log_sum))
    return total


def merge_heads(out: Tensor, n: int) -> Tensor:
    """Return a part's `out` as `[n, heads * head_dim]`, heads in their order."""
    return (out if n == 1 else out.permute(2, 1, 0, 3)).reshape(n, -1)

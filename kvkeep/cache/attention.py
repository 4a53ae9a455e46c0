"""Attention over one run of cells, and the exact sum of several such parts.

A softmax over cells that lie in several segments is computed segment by segment: each part gives
its output and the log of its softmax denominator, and parts are combined by these (the
split-softmax identity of Milakov and Gimelshein, arXiv:1805.02867, that flash attention uses
between its blocks).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from kvkeep.cache.quantised import KVTensor, Quantised, hadamard

# Hides a cell. Finite, so that a query that sees nothing of a segment gets a part of weight zero
# instead of NaN.
HIDDEN = -1e30


class Part(NamedTuple):
    """What queries found in some of the cells.

    out: `[..., n, head_dim]`, the softmax-weighted values.
    log_sum: `[..., n]` float32, the natural log of the sum of exponentials.
    """

    out: Tensor
    log_sum: Tensor


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
) -> Part:
    """Queries over one run of cells.

    Args:
        q: `[n, heads, head_dim]`, rotated; heads of one KV head lie together.
        keys, values: `[kv_heads, cells, head_dim]`, any strides with a dense last dimension.
            Quantised ones are not transformed back: the queries are transformed as the keys are,
            and what they find of the values is transformed back.
        scale: factor on the dot products.
        bias: `[n, cells]` float32, added to the scaled products; `HIDDEN` hides a cell.
        causal: query i sees cells 0..i only (n == cells; not together with a bias).
        cell_bias: `[kv_heads, cells]` float32, of the cells themselves; added likewise.
        softcap: c in c * tanh(x / c), of the scaled products; 0 for none.

    Returns:
        out `[groups, kv_heads, n, head_dim]`, log_sum `[groups, kv_heads, n]`. One query alone
        comes back as `[1, kv_heads, groups, ...]`: the heads that share a KV head are then the
        rows of one block, so that each key is read once.
    """
    transformed = isinstance(values, Quantised)
    dtype, (n, heads, head_dim) = q.dtype, q.shape
    if isinstance(keys, Quantised):
        q, keys = hadamard(q).to(dtype), keys.dequantise_transformed(dtype)
    if isinstance(values, Quantised):
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
    else:
        out, log_sum = attend_densely(
            q, keys, values, scale=scale, bias=bias, causal=causal, softcap=softcap
        )
    return Part(hadamard(out) if transformed else out, log_sum)


def hiding(hidden: Tensor) -> Tensor:
    """The bias that hides cells: `HIDDEN` where `hidden` is true, else 0; float32."""
    bias = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
    return bias.masked_fill_(hidden, HIDDEN)


def attend_by_flash(
    q: Tensor, keys: Tensor, values: Tensor, *, scale: float, bias: Tensor | None, causal: bool
) -> Part:
    """One call of PyTorch's flash kernel for CPUs.

    q: `[groups, kv_heads, n, head_dim]`; keys, values: `[1, kv_heads, cells, head_dim]`. bias: what
    broadcasts to `[groups, kv_heads, n, cells]`, of four dimensions or of the last two.
    """
    keys, values = (x.expand(q.shape[0], -1, -1, -1) for x in (keys, values))
    out, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, keys, values, is_causal=causal, attn_mask=bias, scale=scale
    )
    return Part(out, log_sum)


def attend_densely(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scale: float,
    bias: Tensor | None,
    causal: bool,
    softcap: float = 0.0,
) -> Part:
    """The same by plain products, for devices whose flash kernel takes no bias, and for softcaps.

    Products of queries and keys are float32, as in a flash kernel: rounded to bfloat16 a large one
    would be off by a tenth and more, and so would its part's weight among the others.
    """
    scores = torch.matmul(q.float(), keys.float().transpose(-1, -2)) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, HIDDEN)
    if bias is not None:
        scores = scores + bias
    log_sum = scores.logsumexp(-1)
    weights = (scores - log_sum.unsqueeze(-1)).exp()
    return Part(torch.matmul(weights.to(values.dtype), values), log_sum)


def combine(parts: list[Part]) -> Part:
    """The attention over all cells of all parts; the sum is carried in float32."""
    total = parts[0]
    for part in parts[1:]:
        share = torch.sigmoid(part.log_sum - total.log_sum).unsqueeze(-1)
        total = Part(
            torch.lerp(total.out.float(), part.out.float(), share),
            torch.logaddexp(total.log_sum, part.log_sum),
        )
    return total


def rows(out: Tensor, n: int) -> Tensor:
    """A part's `out` as `[n, heads * head_dim]`, heads in their order."""
    return (out if n == 1 else out.permute(2, 1, 0, 3)).reshape(n, -1)

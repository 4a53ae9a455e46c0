"""Attention of queries to cells, and the change of its output when cells are compressed."""

import torch
from torch import Tensor

from kvkeep.cache import Cells, Queries
from kvkeep.compression.methods.base import Candidates


def logits(candidates: Candidates, cells: Cells, queries: Queries) -> Tensor:
    """Return `[layers, kv_heads, groups, queries, n]` float32, bias included.

    A query does not see cells at positions later than its time.
    """
    kv_heads, rope = cells.keys.shape[1], candidates.rope
    rotation = rope.at(queries.times)
    rotated = rope.rotate_layers(queries.values.float().unsqueeze(-2), rotation).squeeze(-2)
    rows = by_kv_head(rotated, kv_heads)
    products = (rows @ cells.keys.float().transpose(-1, -2)) * candidates.scale
    scores = products.view(*products.shape[:2], -1, len(queries), len(cells))
    if cells.bias is not None:
        scores += cells.bias[:, :, None, None]
    if int(queries.times[0]) < int(cells.positions.max()):
        positions = cells.positions.expand(*scores.shape[:2], -1)[:, :, None, None]
        later = positions > queries.times[:, None]
        scores.masked_fill_(later.to(scores.device), -torch.inf)
    return scores


def by_kv_head(queries: Tensor, kv_heads: int) -> Tensor:
    """Map `[layers, heads, m, head_dim]` to `[layers, kv_heads, groups * m, head_dim]` float32."""
    layers, _, _, head_dim = queries.shape
    return queries.float().reshape(layers, kv_heads, -1, head_dim)


def attention(candidates: Candidates, queries: Queries) -> Tensor:
    """Return the attention weights of queries, `[layers, kv_heads, queries, n]`.

    They are averaged over the query heads of a KV head.
    """
    return logits(candidates, candidates.cells, queries).softmax(-1).nan_to_num_().mean(2)


def output_error(candidates: Candidates, fewer: Cells, queries: Queries) -> Tensor:
    """Return the relative error of attention output over fewer cells, `[layers, kv_heads]`.

    The squared difference of the outputs over the squared output of all cells. Both are computed
    next to another copy of all cells, as a chunk is part of a longer context, so that a change of
    the softmax mass counts as well.
    """

    def sums(cells: Cells, largest: Tensor) -> Tensor:
        """The sums of weighted values, and of weights in the last column."""
        weights = (logits(candidates, cells, queries) - largest).exp()
        values = cells.values.float().unsqueeze(2)
        return torch.cat((weights @ values, weights.sum(-1, keepdim=True)), -1)

    largest = logits(candidates, candidates.cells, queries).amax(-1, keepdim=True)
    whole = sums(candidates.cells, largest)
    whole_output = whole[..., :-1] / whole[..., -1:]
    part = sums(fewer, largest)
    output = (part[..., :-1] + whole[..., :-1]) / (part[..., -1:] + whole[..., -1:])
    error = (output - whole_output).square().sum((2, 3, 4))
    return error / whole_output.square().sum((2, 3, 4))

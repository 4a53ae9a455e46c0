"""What queries get from cells: by which one set of cells is compared with another."""

import torch
from torch import Tensor

from kvkeep.cache import Cells, Queries
from kvkeep.compression.methods.base import Candidates


def logits(candidates: Candidates, cells: Cells, queries: Queries) -> Tensor:
    """`[layers, kv_heads, groups, queries, n]`, bias included; float32.

    A query sees no cell of a later position than its time.
    """
    kv_heads = cells.keys.shape[1]
    rotation = candidates.rope.at(queries.times)
    rotated = candidates.rope.rotate_layers(queries.values.float().unsqueeze(-2), rotation).squeeze(
        -2
    )
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
    """`[layers, heads, m, head_dim]` to `[layers, kv_heads, groups * m, head_dim]`; float32."""
    layers, _, _, width = queries.shape
    return queries.float().reshape(layers, kv_heads, -1, width)


def attention(candidates: Candidates, queries: Queries) -> Tensor:
    """`[layers, kv_heads, queries, n]`: the shares that queries give to the candidates.

    Of the heads that share a KV head, the mean.
    """
    return logits(candidates, candidates.cells, queries).softmax(-1).nan_to_num_().mean(2)


def output_error(candidates: Candidates, fewer: Cells, queries: Queries) -> Tensor:
    """`[layers, kv_heads]`: what queries get from fewer cells against what they got from all.

    The squared difference of the sums of values, each weighted by its exponential (so that mass
    counts too), over the squared sums.
    """

    def found(cells: Cells, most: Tensor) -> Tensor:
        weights = (logits(candidates, cells, queries) - most).exp()
        values = cells.values.float().unsqueeze(2)
        return torch.cat((weights @ values, weights.sum(-1, keepdim=True)), -1)

    most = logits(candidates, candidates.cells, queries).amax(-1, keepdim=True)
    whole = found(candidates.cells, most)
    whole_out = whole[..., :-1] / whole[..., -1:]
    part = found(fewer, most)
    # Beside cells of a mass like theirs, as a chunk is in a longer context.
    part_out = (part[..., :-1] + whole[..., :-1]) / (part[..., -1:] + whole[..., -1:])
    difference = (part_out - whole_out).square().sum((2, 3, 4))
    return difference / whole_out.square().sum((2, 3, 4))

"""Residual cells: a tenth of each KV head's compressed cells, which stand for the evicted ones.

An evicted cell gets little attention, but all of them together get much. A residual cell has the
mean key and value of a cluster of them, and the log of their number as a bias on its logit. Where
queries are known, these are fitted to what the queries got from the evicted cells.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvkeep.cache import AttentionConfig, Cells, RaggedCells
from kvkeep.compression.methods.attention import group_by_kv_head
from kvkeep.compression.methods.base import Candidates
from kvkeep.compression.methods.clusters import MIN_SHARE, Clusters

SHARE = 0.1  # of the compressed cells of a KV head
RIDGE = 1e-2  # penalty of a fitted value's distance from the mean, relative to the mean square


@dataclass(frozen=True)
class FitContext:
    """Attention settings and other cells that residual cells are fitted by.

    unchanged: the cells that stay as they are, with the same queries as they are seen from there.
    """

    attention: AttentionConfig
    unchanged: Sequence[Candidates] = ()


def residual_count(count: int) -> int:
    """Return how many of `count` compressed cells of a KV head are residual."""
    return max(1, round(count * SHARE)) if count > 1 else 0


def residual_cells(
    runs: Sequence[Candidates],
    masks: Sequence[Tensor],
    counts: Sequence[int],
    context: FitContext | None = None,
) -> list[RaggedCells]:
    """Return the residual cells of each run, at most `counts[i]` in each layer and KV head.

    masks: bool, the cells of each run that stay; `[layers, kv_heads, n]`, or `[total]` if ragged.
    context: what they are fitted by; the runs then have queries. None for means of clusters.
    """
    layers, kv_heads = runs[0].layers_and_heads
    unchanged = () if context is None else context.unchanged
    cells = [run.cells.to_compressed_format() for run in (*runs, *unchanged)]
    all_masks = [*masks, *(None for _ in unchanged)]
    heads_by_run: list[list[Cells]] = [[] for _ in runs]
    for layer in range(layers):
        key_scales = _key_scales(runs[0], layer)
        queries = [
            None if context is None else _rotated_queries(run, layer, context.attention.scale)
            for run in (*runs, *unchanged)
        ]
        for head in range(kv_heads):
            parts = [
                _HeadPart.of(part_cells, mask, None if q is None else q[head], layer, head)
                for part_cells, mask, q in zip(cells, all_masks, queries, strict=True)
            ]
            clusters = [
                Clusters.of(part.evicted, count, key_scales[head])
                for part, count in zip(parts, counts, strict=False)
            ]
            if context is None:
                dtype = cells[0].keys.dtype
                results = [each.mean_cells(each.masses, dtype) for each in clusters]
            else:
                sinks = context.attention.sinks
                head_sinks = None if sinks is None else sinks[layer].view(kv_heads, -1)[head]
                results = _fit(parts, clusters, context.attention.softcap, head_sinks)
            for run_heads, head_cells in zip(heads_by_run, results, strict=True):
                run_heads.append(head_cells)
    return [_marked(RaggedCells.from_heads(heads, layers)) for heads in heads_by_run]


def _marked(cells: RaggedCells) -> RaggedCells:
    return replace(cells, residual=torch.ones(cells.total, dtype=torch.bool, device="cpu"))


def _rotated_queries(run: Candidates, layer: int, scale: float) -> Tensor:
    """Return a layer's scaled queries as a run sees them, `[kv_heads, groups * m, head_dim]`."""
    queries = run.queries
    assert queries is not None, "no queries to fit to"
    vectors = queries.vectors[layer].float().unsqueeze(-2)
    rotated = run.rope.rotate_layer(layer, vectors, run.rope.rotation_at(queries.times))
    return group_by_kv_head(rotated.squeeze(-2)[None] * scale, run.layers_and_heads[1])[0]


def _key_scales(run: Candidates, layer: int) -> Tensor:
    """Return how much each element of a key counts in distances, `[kv_heads, head_dim]`.

    That is the root of the mean square of the queries' element, and 1 if no queries are
    known. Both elements of a pair that RoPE rotates have the same, so that it holds
    at all positions.
    """
    kv_heads, width = run.layers_and_heads[1], run.cells.keys.shape[-1]
    if run.queries is not None:
        vectors = group_by_kv_head(run.queries.vectors[layer : layer + 1], kv_heads)
        squares = vectors[0].square().mean(1)
    else:
        return torch.ones(kv_heads, width, dtype=torch.float32, device=run.cells.keys.device)
    half = width // 2
    pairs = (squares[..., :half] + squares[..., half:]) / 2
    scales: Tensor = torch.cat((pairs, pairs), -1).sqrt().to(run.cells.keys.device)
    return scales


@dataclass(frozen=True)
class _HeadPart:
    """One run's cells in one KV head, `[1, 1, n, ...]`, and the queries that attend to them.

    evicted, stays: copied. queries: `[rows, head_dim]` float32, rotated and scaled; None if they
    are not known.
    """

    evicted: Cells
    stays: Cells
    queries: Tensor | None

    @classmethod
    def of(
        cls, cells: Cells, mask: Tensor | None, queries: Tensor | None, layer: int, head: int
    ) -> "_HeadPart":
        """Select a head of a run. mask: the cells that stay; None for all."""
        if isinstance(cells, RaggedCells):
            head_cells, row_slice = cells.head(layer, head), cells.head_slice(layer, head)
            stays = None if mask is None else mask[row_slice]
        else:
            head_cells = _head_of(cells, layer, head)
            stays = None if mask is None else mask[layer, head]
        if stays is None:
            return cls(head_cells.part(slice(0, 0)), head_cells, queries)
        return cls(_select(head_cells, ~stays), _select(head_cells, stays), queries)

    def logits(self, keys: Tensor, bias: Tensor, softcap: float) -> Tensor:
        """Return the logits of keys `[n, head_dim]` with biases `[n]`: `[rows, n]` float32."""
        assert self.queries is not None
        if not softcap:
            return torch.addmm(bias, self.queries, keys.float().T)
        return softcap * torch.tanh(self.queries @ keys.float().T / softcap) + bias


def _head_of(cells: Cells, layer: int, head: int) -> Cells:
    index = slice(layer, layer + 1), slice(head, head + 1)
    assert cells.bias is not None
    keys, values = cells.keys[index], cells.values[index]
    return Cells(keys, values, cells.positions[index], cells.serials, cells.bias[index])


def _select(cells: Cells, mask: Tensor) -> Cells:
    """Copy some of the cells `[1, 1, n, ...]`. mask: `[n]` bool."""
    assert cells.bias is not None
    indices = mask.nonzero()[:, 0]
    keys, values, bias = (
        x.index_select(2, indices) for x in (cells.keys, cells.values, cells.bias)
    )
    positions = cells.positions.index_select(2, indices.cpu())
    return Cells(keys, values, positions, cells.serials[: len(indices)], bias)


def _fit(
    parts: Sequence[_HeadPart],
    clusters: Sequence[Clusters],
    softcap: float,
    sinks: Tensor | None,
) -> list[Cells]:
    """Return the cells of each part's clusters, fitted to what the queries got from evicted cells.

    parts: all cells that the queries attend to; first those with clusters. sinks: `[groups]`.

    With p a query's attention weights over all cells, E the evicted ones and w the weights that it
    would give to the residual cells: means are weighted by each cell's mean p; the bias of all is
    chosen so that the sum of w over queries is that of p over E; and the values v are those that
    bring (sum of p v over cells that stay + sum of w v) / (1 - p(E) + sum of w) closest to the
    output over all cells.
    """
    groups = [cells for part in parts for cells in (part.evicted, part.stays)]
    weights, log_sums = _attention_weights(parts, softcap, sinks)
    outputs = [
        group_weights @ cells.values[0, 0].float()
        for group_weights, cells in zip(weights, groups, strict=True)
    ]
    kept_output, evicted_output = sum(outputs[1::2]), sum(outputs[::2])
    evicted_share = torch.stack([each.sum(-1, keepdim=True) for each in weights[::2]]).sum(0)
    means, residual_weights = [], []
    for part, cluster, group_weights in zip(parts, clusters, weights[::2], strict=False):
        shares = group_weights.mean(0) if cluster.count else cluster.masses
        cells = cluster.mean_cells(shares, part.evicted.keys.dtype)
        assert cells.bias is not None
        means.append(cells)
        logits = part.logits(cells.keys[0, 0], cells.bias[0, 0], softcap)
        residual_weights.append((logits - log_sums).exp())
    all_weights = torch.cat(residual_weights, -1)
    correction = evicted_share.sum().clamp(min=MIN_SHARE) / all_weights.sum().clamp(min=MIN_SHARE)
    all_weights = all_weights * correction
    share = 1 - evicted_share + all_weights.sum(-1, keepdim=True)
    target = kept_output + evicted_output - kept_output / share
    values = _ridge(all_weights / share, target, torch.cat([each.values[0, 0] for each in means]))
    part_values = torch.split(values, [len(each) for each in means])
    return [
        _replace_values(cells, values_of_part, correction.log())
        for cells, values_of_part in zip(means, part_values, strict=True)
    ]


def _replace_values(cells: Cells, values: Tensor, bias: Tensor) -> Cells:
    """Return cells with other values `[n, head_dim]`, and something added to their biases."""
    assert cells.bias is not None
    stored = values.to(cells.values.dtype)[None, None]
    return replace(cells, stored_values=stored, bias=cells.bias + bias)


def _attention_weights(
    parts: Sequence[_HeadPart], softcap: float, sinks: Tensor | None
) -> tuple[Sequence[Tensor], Tensor]:
    """Return attention weights, `[rows, n]` of each part's evicted cells and of those that stay.

    Also the log-sums, `[rows, 1]`.
    """
    logits, counts = [], []
    for part in parts:
        groups = (part.evicted, part.stays)
        keys = torch.cat([cells.keys[0, 0] for cells in groups])
        bias = torch.cat([cells.bias[0, 0] for cells in groups if cells.bias is not None])
        logits.append(part.logits(keys, bias, softcap))
        counts += [len(cells) for cells in groups]
    all_logits = logits[0] if len(logits) == 1 else torch.cat(logits, -1)
    if sinks is not None:
        column = sinks.repeat_interleave(len(all_logits) // len(sinks)).unsqueeze(-1)
        all_logits, counts = torch.cat((all_logits, column.float()), -1), [*counts, 1]
    largest = all_logits.amax(-1, keepdim=True)
    weights = all_logits.softmax(-1)
    log_sums = largest - weights.amax(-1, keepdim=True).log()
    return torch.split(weights, counts, -1)[: 2 * len(parts)], log_sums


def _ridge(weights: Tensor, target: Tensor, means: Tensor) -> Tensor:
    """Return values v for which `weights @ v` is near the target, and v near the means; float64."""
    means = means.double()
    if not len(means):
        return means
    difference = target - weights @ means.float()
    matrix = (weights.T @ weights).double()
    matrix.diagonal().add_(RIDGE * matrix.diagonal().mean().clamp(min=MIN_SHARE))
    solved: Tensor = torch.linalg.solve(matrix, (weights.T @ difference).double())
    return means + solved

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
from kvkeep.compression.methods.clusters import MIN_SHARE, Clusters, HeadCells, MeanCells

SHARE = 0.1  # of the compressed cells of a KV head
MAX_WEIGHTS = 2**20  # attention weights computed at a time, so that they stay in the CPU caches
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
    unchanged = () if context is None else context.unchanged
    sources = [
        _RunSource.of(run, mask, context)
        for run, mask in zip((*runs, *unchanged), (*masks, *(None for _ in unchanged)), strict=True)
    ]
    (layers, kv_heads), dtype = runs[0].layers_and_heads, runs[0].cells.keys.dtype
    key_scales = _key_scales(runs[0])
    sinks = None
    if context is not None and context.attention.sinks is not None:
        sinks = context.attention.sinks.view(layers * kv_heads, -1)
    step = max(1, MAX_WEIGHTS // max(1, sum(source.weights_per_head for source in sources)))
    heads_by_run: list[list[MeanCells]] = [[] for _ in runs]
    for start in range(0, layers * kv_heads, step):
        heads = slice(start, start + step)
        parts = [source.part(heads) for source in sources]
        clusters = [
            Clusters.of(part.cells, count, key_scales[heads])
            for part, count in zip(parts, counts, strict=False)
        ]
        if context is None:
            results = [each.mean_cells(each.cells.bias.exp(), dtype) for each in clusters]
        else:
            head_sinks = None if sinks is None else sinks[heads]
            results = _fit(parts, clusters, dtype, context.attention.softcap, head_sinks)
        for run_heads, run_results in zip(heads_by_run, results, strict=True):
            run_heads.append(run_results)
    return [
        _marked(RaggedCells.select_from(*MeanCells.join(run_heads, layers)))
        for run_heads in heads_by_run
    ]


def _marked(cells: RaggedCells) -> RaggedCells:
    return replace(cells, residual=torch.ones(cells.total, dtype=torch.bool, device="cpu"))


def _key_scales(run: Candidates) -> Tensor:
    """Return how much each element of a key counts in distances, `[heads, head_dim]`.

    That is the root of the mean square of the queries' element, and 1 if no queries are
    known. Both elements of a pair that RoPE rotates have the same, so that it holds
    at all positions.
    """
    (layers, kv_heads), width = run.layers_and_heads, run.cells.keys.shape[-1]
    if run.queries is None:
        shape = layers * kv_heads, width
        return torch.ones(shape, dtype=torch.float32, device=run.cells.keys.device)
    squares = group_by_kv_head(run.queries.vectors, kv_heads).flatten(0, 1).square().mean(1)
    half = width // 2
    pairs = (squares[..., :half] + squares[..., half:]) / 2
    scales: Tensor = torch.cat((pairs, pairs), -1).sqrt().to(run.cells.keys.device)
    return scales


@dataclass(frozen=True)
class _HeadsPart:
    """One run's cells in some KV heads, and the queries that attend to them.

    queries: `[heads, rows, head_dim]` float32, rotated and scaled; None if they are not known.
    """

    cells: HeadCells
    queries: Tensor | None

    def logits(self, keys: Tensor, bias: Tensor, softcap: float) -> Tensor:
        """Return the logits of keys with biases, `[heads, rows, n]` float32."""
        assert self.queries is not None
        bias = bias.unsqueeze(1)
        if not softcap:
            return torch.baddbmm(bias, self.queries, keys.float().mT)
        return softcap * torch.tanh(self.queries @ keys.float().mT / softcap) + bias


@dataclass(frozen=True)
class _RunSource:
    """One run's cells in all layers, and the queries that attend to them.

    cells: compressed. mask: the cells that stay; None for all. queries: as of `_HeadsPart`, of all
    KV heads, those of layer 0 first.
    """

    cells: Cells
    mask: Tensor | None
    queries: Tensor | None

    @classmethod
    def of(cls, run: Candidates, mask: Tensor | None, context: FitContext | None) -> "_RunSource":
        cells = run.cells.to_compressed_format()
        if context is None:
            return cls(cells, mask, None)
        assert run.queries is not None, "no queries to fit to"
        vectors = run.queries.vectors.float().unsqueeze(-2)
        rotation = run.rope.rotation_at(run.queries.times)
        rotated = run.rope.rotate_layers(vectors, rotation).squeeze(-2)
        grouped = group_by_kv_head(rotated * context.attention.scale, run.layers_and_heads[1])
        return cls(cells, mask, grouped.flatten(0, 1))

    @property
    def weights_per_head(self) -> int:
        """How many attention weights one KV head has."""
        cells = self.cells
        count = cells.max_count if isinstance(cells, RaggedCells) else len(cells)
        return count if self.queries is None else count * self.queries.shape[1]

    def part(self, heads: slice) -> _HeadsPart:
        """Return the cells and queries of some KV heads."""
        if isinstance(self.cells, RaggedCells):
            cells = _padded_heads(self.cells, self.mask, heads)
        else:
            cells = _dense_heads(self.cells, self.mask, heads)
        return _HeadsPart(cells, None if self.queries is None else self.queries[heads])


def _dense_heads(cells: Cells, mask: Tensor | None, heads: slice) -> HeadCells:
    assert cells.bias is not None
    keys, values, positions, bias = (
        x.flatten(0, 1)[heads] for x in (cells.keys, cells.values, cells.positions, cells.bias)
    )
    evicted = torch.zeros_like(bias, dtype=torch.bool)
    if mask is not None:
        evicted = ~mask.flatten(0, 1)[heads]
    return HeadCells(keys.float(), values.float(), positions, bias, evicted)


def _padded_heads(cells: RaggedCells, mask: Tensor | None, heads: slice) -> HeadCells:
    """Return the cells of some heads, each head with as many as the largest."""
    assert cells.bias is not None
    counts, starts = cells.counts.flatten()[heads], cells.offsets[:-1][heads]
    columns = torch.arange(int(counts.max()), dtype=torch.int64, device="cpu")
    exists = columns < counts.unsqueeze(1)
    rows = torch.where(exists, starts.unsqueeze(1) + columns, 0)
    device = cells.keys.device
    device_rows, device_exists = rows.to(device), exists.to(device)
    keys, values = (x[device_rows].float() for x in (cells.keys, cells.values))
    bias = cells.bias[device_rows].masked_fill(~device_exists, -torch.inf)
    evicted = torch.zeros_like(device_exists)
    if mask is not None:
        evicted = device_exists & ~mask.to(device)[device_rows]
    return HeadCells(keys, values, cells.positions[rows], bias, evicted)


def _fit(
    parts: Sequence[_HeadsPart],
    clusters: Sequence[Clusters],
    dtype: torch.dtype,
    softcap: float,
    sinks: Tensor | None,
) -> list[MeanCells]:
    """Return the cells of each part's clusters, fitted to what the queries got from evicted cells.

    parts: all cells that the queries attend to; first those with clusters. sinks: `[heads,
    groups]`.

    With p a query's attention weights over all cells, E the evicted ones and w the weights that it
    would give to the residual cells: means are weighted by each cell's mean p; the bias of all is
    chosen so that the sum of w over queries is that of p over E; and the values v are those that
    bring (sum of p v over cells that stay + sum of w v) / (1 - p(E) + sum of w) closest to the
    output over all cells.
    """
    weights, log_sums = _attention_weights(parts, softcap, sinks)
    evicting = parts[: len(clusters)]
    evicted_weights = [
        part_weights * part.cells.evicted.unsqueeze(1)
        for part, part_weights in zip(evicting, weights, strict=False)
    ]
    output = _output(parts, weights)
    kept_output = output - _output(evicting, evicted_weights)
    evicted_share = torch.stack([each.sum(-1, keepdim=True) for each in evicted_weights]).sum(0)
    means, residual_weights = [], []
    for part, cluster, part_weights in zip(evicting, clusters, evicted_weights, strict=True):
        cells = cluster.mean_cells(part_weights.mean(1), dtype)
        means.append(cells)
        logits = part.logits(cells.keys, cells.bias, softcap)
        residual_weights.append((logits - log_sums).exp())
    all_weights = torch.cat(residual_weights, -1)
    totals = (
        x.sum((1, 2), keepdim=True).clamp(min=MIN_SHARE) for x in (evicted_share, all_weights)
    )
    evicted_total, residual_total = totals
    correction = evicted_total / residual_total
    all_weights = all_weights * correction
    share = 1 - evicted_share + all_weights.sum(-1, keepdim=True)
    mean_values = torch.cat([cells.values for cells in means], 1)
    all_values = _ridge(all_weights / share, output - kept_output / share, mean_values)
    all_values_by_part = torch.split(all_values, [cells.keys.shape[1] for cells in means], 1)
    shift = correction.log().squeeze(-1)
    return [
        replace(cells, values=values, bias=cells.bias + shift)
        for cells, values in zip(means, all_values_by_part, strict=True)
    ]


def _output(parts: Sequence[_HeadsPart], weights: Sequence[Tensor]) -> Tensor:
    """Return the sum of weighted values, `[heads, rows, head_dim]`."""
    pairs = zip(parts, weights, strict=True)
    return torch.stack([part_weights @ part.cells.values for part, part_weights in pairs]).sum(0)


def _attention_weights(
    parts: Sequence[_HeadsPart], softcap: float, sinks: Tensor | None
) -> tuple[Sequence[Tensor], Tensor]:
    """Return attention weights, `[heads, rows, n]` of each part's cells.

    Also the log-sums, `[heads, rows, 1]`.
    """
    logits = [part.logits(part.cells.keys, part.cells.bias, softcap) for part in parts]
    counts = [part_logits.shape[-1] for part_logits in logits]
    if sinks is not None:
        heads, rows, _ = logits[0].shape
        column = sinks.float().repeat_interleave(rows // sinks.shape[1], 1)
        logits.append(column.view(heads, rows, 1))
    all_logits = logits[0] if len(logits) == 1 else torch.cat(logits, -1)
    largest = all_logits.amax(-1, keepdim=True)
    weights = all_logits.softmax(-1)
    log_sums = largest - weights.amax(-1, keepdim=True).log()
    return torch.split(weights[..., : sum(counts)], counts, -1), log_sums


def _ridge(weights: Tensor, target: Tensor, means: Tensor) -> Tensor:
    """Return values v for which `weights @ v` is near the target, and v near the means; float32.

    weights: `[heads, rows, count]`. target: `[heads, rows, head_dim]`. A cluster without
    cells has weights of 0.
    """
    if not means.shape[1]:
        return means
    difference = target - weights @ means
    matrices, right_sides = (weights.mT @ weights).double(), (weights.mT @ difference).double()
    diagonals = matrices.diagonal(dim1=-2, dim2=-1)
    num_used = (diagonals > 0).sum(-1).clamp(min=1)
    diagonals += RIDGE * (diagonals.sum(-1) / num_used).clamp(min=MIN_SHARE).unsqueeze(-1)
    # One matrix at a time: torch solves several with more threads than it is allowed.
    solved = [
        torch.linalg.solve(matrix, right_side)
        for matrix, right_side in zip(matrices, right_sides, strict=True)
    ]
    return means + torch.stack(solved).float()

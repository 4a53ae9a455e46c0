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
from kvkeep.cache.rope import Rotation
from kvkeep.compression.methods.attention import group_by_kv_head
from kvkeep.compression.methods.base import Candidates
from kvkeep.compression.methods.clusters import MIN_SHARE, Clusters, LayerCells, MeanCells

SHARE = 0.1  # of the compressed cells of a KV head
MAX_WEIGHTS = 2**22  # attention weights computed at a time
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
    dtype = runs[0].cells.keys.dtype
    layers, kv_heads = runs[0].layers_and_heads
    num_weights = sum(source.weights_per_head for source in sources)
    step = max(1, MAX_WEIGHTS // max(1, num_weights))
    layers_by_run: list[list[MeanCells]] = [[] for _ in runs]
    for layer in range(layers):
        key_scales = _key_scales(runs[0], layer)
        results = []
        for heads in (slice(start, start + step) for start in range(0, kv_heads, step)):
            parts = [source.layer(layer, heads) for source in sources]
            clusters = [
                Clusters.of(part.cells, count, key_scales[heads])
                for part, count in zip(parts, counts, strict=False)
            ]
            if context is None:
                results.append([each.mean_cells(each.cells.bias.exp(), dtype) for each in clusters])
                continue
            sinks = context.attention.sinks
            head_sinks = None if sinks is None else sinks[layer].view(kv_heads, -1)[heads]
            results.append(_fit(parts, clusters, dtype, context.attention.softcap, head_sinks))
        for run_layers, run_results in zip(layers_by_run, zip(*results, strict=True), strict=True):
            run_layers.append(MeanCells.concatenate(run_results))
    return [_marked(RaggedCells.select_from(*MeanCells.stack(each))) for each in layers_by_run]


def _marked(cells: RaggedCells) -> RaggedCells:
    return replace(cells, residual=torch.ones(cells.total, dtype=torch.bool, device="cpu"))


def _key_scales(run: Candidates, layer: int) -> Tensor:
    """Return how much each element of a key counts in distances, `[kv_heads, head_dim]`.

    That is the root of the mean square of the queries' element, and 1 if no queries are
    known. Both elements of a pair that RoPE rotates have the same, so that it holds
    at all positions.
    """
    kv_heads, width = run.layers_and_heads[1], run.cells.keys.shape[-1]
    if run.queries is None:
        return torch.ones(kv_heads, width, dtype=torch.float32, device=run.cells.keys.device)
    vectors = group_by_kv_head(run.queries.vectors[layer : layer + 1], kv_heads)
    squares = vectors[0].square().mean(1)
    half = width // 2
    pairs = (squares[..., :half] + squares[..., half:]) / 2
    scales: Tensor = torch.cat((pairs, pairs), -1).sqrt().to(run.cells.keys.device)
    return scales


@dataclass(frozen=True)
class _LayerPart:
    """One run's cells in some KV heads of a layer, and the queries that attend to them.

    queries: `[kv_heads, rows, head_dim]` float32, rotated and scaled; None if they are not known.
    """

    cells: LayerCells
    queries: Tensor | None

    def logits(self, keys: Tensor, bias: Tensor, softcap: float) -> Tensor:
        """Return the logits of keys with biases, `[kv_heads, rows, n]` float32."""
        assert self.queries is not None
        bias = bias.unsqueeze(1)
        if not softcap:
            return torch.baddbmm(bias, self.queries, keys.float().mT)
        return softcap * torch.tanh(self.queries @ keys.float().mT / softcap) + bias


@dataclass(frozen=True)
class _RunSource:
    """One run's cells in all layers, and the queries that attend to them.

    cells: compressed. mask: the cells that stay; None for all.
    """

    run: Candidates
    cells: Cells
    mask: Tensor | None
    rotation: Rotation | None
    scale: float

    @classmethod
    def of(cls, run: Candidates, mask: Tensor | None, context: FitContext | None) -> "_RunSource":
        cells = run.cells.to_compressed_format()
        if context is None:
            return cls(run, cells, mask, None, 0.0)
        assert run.queries is not None, "no queries to fit to"
        rotation = run.rope.rotation_at(run.queries.times)
        return cls(run, cells, mask, rotation, context.attention.scale)

    @property
    def weights_per_head(self) -> int:
        """How many attention weights one KV head has."""
        queries, cells = self.run.queries, self.cells
        if queries is None:
            return len(cells)
        count = cells.max_count if isinstance(cells, RaggedCells) else len(cells)
        groups = queries.vectors.shape[1] // self.run.layers_and_heads[1]
        return count * groups * len(queries)

    def layer(self, layer: int, heads: slice) -> _LayerPart:
        cells = (
            _padded_layer(self.cells, self.mask, layer, heads)
            if isinstance(self.cells, RaggedCells)
            else _dense_layer(self.cells, self.mask, layer, heads)
        )
        return _LayerPart(cells, None if self.rotation is None else self._queries(layer)[heads])

    def _queries(self, layer: int) -> Tensor:
        """Return a layer's scaled queries as the run sees them, `[kv_heads, rows, head_dim]`."""
        queries, rotation = self.run.queries, self.rotation
        assert queries is not None
        assert rotation is not None
        vectors = queries.vectors[layer].float().unsqueeze(-2)
        rotated = self.run.rope.rotate_layer(layer, vectors, rotation).squeeze(-2)
        return group_by_kv_head(rotated[None] * self.scale, self.run.layers_and_heads[1])[0]


def _dense_layer(cells: Cells, mask: Tensor | None, layer: int, heads: slice) -> LayerCells:
    assert cells.bias is not None
    bias = cells.bias[layer, heads]
    evicted = torch.zeros_like(bias, dtype=torch.bool) if mask is None else ~mask[layer, heads]
    keys, values = (x[layer, heads].float() for x in (cells.keys, cells.values))
    return LayerCells(keys, values, cells.positions[layer, heads], bias, evicted)


def _padded_layer(cells: RaggedCells, mask: Tensor | None, layer: int, heads: slice) -> LayerCells:
    """Return the cells of a layer, each head with as many as the largest."""
    assert cells.bias is not None
    counts = cells.counts[layer, heads].unsqueeze(1)
    ends = cells.counts.flatten().cumsum(0).view_as(cells.counts)[layer, heads].unsqueeze(1)
    columns = torch.arange(int(counts.max()), dtype=torch.int64, device="cpu")
    exists = columns < counts
    rows = torch.where(exists, ends - counts + columns, 0)
    device = cells.keys.device
    device_rows, device_exists = rows.to(device), exists.to(device)
    keys, values = (x[device_rows].float() for x in (cells.keys, cells.values))
    bias = cells.bias[device_rows].masked_fill(~device_exists, -torch.inf)
    if mask is None:
        evicted = torch.zeros_like(device_exists)
    else:
        evicted = device_exists & ~mask.to(device)[device_rows]
    return LayerCells(keys, values, cells.positions[rows], bias, evicted)


def _fit(
    parts: Sequence[_LayerPart],
    clusters: Sequence[Clusters],
    dtype: torch.dtype,
    softcap: float,
    sinks: Tensor | None,
) -> list[MeanCells]:
    """Return the cells of each part's clusters, fitted to what the queries got from evicted cells.

    parts: all cells that the queries attend to; first those with clusters. sinks: `[kv_heads,
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


def _output(parts: Sequence[_LayerPart], weights: Sequence[Tensor]) -> Tensor:
    """Return the sum of weighted values, `[kv_heads, rows, head_dim]`."""
    pairs = zip(parts, weights, strict=True)
    return torch.stack([part_weights @ part.cells.values for part, part_weights in pairs]).sum(0)


def _attention_weights(
    parts: Sequence[_LayerPart], softcap: float, sinks: Tensor | None
) -> tuple[Sequence[Tensor], Tensor]:
    """Return attention weights, `[kv_heads, rows, n]` of each part's cells.

    Also the log-sums, `[kv_heads, rows, 1]`.
    """
    logits = [part.logits(part.cells.keys, part.cells.bias, softcap) for part in parts]
    counts = [part_logits.shape[-1] for part_logits in logits]
    if sinks is not None:
        kv_heads, rows, _ = logits[0].shape
        column = sinks.float().repeat_interleave(rows // sinks.shape[1], 1)
        logits.append(column.view(kv_heads, rows, 1))
    all_logits = logits[0] if len(logits) == 1 else torch.cat(logits, -1)
    largest = all_logits.amax(-1, keepdim=True)
    weights = all_logits.softmax(-1)
    log_sums = largest - weights.amax(-1, keepdim=True).log()
    return torch.split(weights[..., : sum(counts)], counts, -1), log_sums


def _ridge(weights: Tensor, target: Tensor, means: Tensor) -> Tensor:
    """Return values v for which `weights @ v` is near the target, and v near the means; float32.

    weights: `[kv_heads, rows, count]`. target: `[kv_heads, rows, head_dim]`. A cluster without
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

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
from kvkeep.compression.methods.clusters import Clusters, HeadCells, MeanCells
from kvkeep.compression.methods.residual_fit import QueriedCells, fitted_cells

SHARE = 0.1  # of the compressed cells of a KV head
MAX_WEIGHTS = 2**21  # attention weights computed at a time, so that they stay in the CPU caches


@dataclass(frozen=True)
class FitContext:
    """Attention settings and other cells that residual cells are fitted by.

    unchanged: the cells that stay as they are, with the same queries as they are seen from there.
    """

    attention: AttentionConfig
    unchanged: Sequence[Candidates] = ()

    def sinks_of(self, heads: slice, num_heads: int) -> Tensor | None:
        """Return the sinks of some of all layers' KV heads, `[heads, groups]`; None without any."""
        sinks = self.attention.sinks
        return None if sinks is None else sinks.view(num_heads, -1)[heads]


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
    all_masks = *masks, *(None for _ in unchanged)
    sources = [
        _RunSource(run.cells.to_compressed_format(), mask)
        for run, mask in zip((*runs, *unchanged), all_masks, strict=True)
    ]
    queries = [] if context is None else _rotated_queries((*runs, *unchanged), context)
    (layers, kv_heads), dtype = runs[0].layers_and_heads, runs[0].cells.keys.dtype
    key_scales = _key_scales(runs[0])
    num_rows = queries[0].shape[1] if queries else 1
    num_weights = num_rows * sum(source.cells_per_head for source in sources)
    step = max(1, MAX_WEIGHTS // max(1, num_weights))
    heads_by_run: list[list[MeanCells]] = [[] for _ in runs]
    for start in range(0, layers * kv_heads, step):
        heads = slice(start, start + step)
        cells = [source.head_cells(heads) for source in sources]
        clusters = [
            Clusters.of(run_cells, count, key_scales[heads])
            for run_cells, count in zip(cells, counts, strict=False)
        ]
        if context is None:
            results = [each.mean_cells(each.cells.bias.exp(), dtype) for each in clusters]
        else:
            parts = [QueriedCells(x, q[heads]) for x, q in zip(cells, queries, strict=True)]
            sinks = context.sinks_of(heads, layers * kv_heads)
            results = fitted_cells(parts, clusters, dtype, context.attention.softcap, sinks)
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


def _rotated_queries(runs: Sequence[Candidates], context: FitContext) -> list[Tensor]:
    """Return each run's queries, rotated and scaled: `[heads, rows, head_dim]` float32.

    Those of layer 0 come first. Runs of one segment share them: they are rotated once.
    """
    rotated_by_time: dict[int, Tensor] = {}
    result = []
    for run in runs:
        assert run.queries is not None, "no queries to fit to"
        first_time = int(run.queries.times[0])
        if first_time not in rotated_by_time:
            vectors = (run.queries.vectors.float() * context.attention.scale).unsqueeze(-2)
            rotated = run.rope.rotate_layers(vectors, run.rope.rotation_at(run.queries.times))
            grouped = group_by_kv_head(rotated.squeeze(-2), run.layers_and_heads[1])
            rotated_by_time[first_time] = grouped.flatten(0, 1)
        result.append(rotated_by_time[first_time])
    return result


@dataclass(frozen=True)
class _RunSource:
    """One run's compressed cells in all layers. mask: the cells that stay; None for all."""

    cells: Cells
    mask: Tensor | None

    @property
    def cells_per_head(self) -> int:
        return self.cells.max_count if isinstance(self.cells, RaggedCells) else len(self.cells)

    def head_cells(self, heads: slice) -> HeadCells:
        """Return the cells of some KV heads."""
        if isinstance(self.cells, RaggedCells):
            return _padded_heads(self.cells, self.mask, heads)
        return _dense_heads(self.cells, self.mask, heads)


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

"""Application of a compression method to runs of cells, chunk by chunk."""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from kvkeep.cache import Cells, RaggedCells
from kvkeep.compression.methods.base import (
    BUDGETS,
    Candidates,
    CellwiseEviction,
    CompressionResult,
    Eviction,
    Method,
)
from kvkeep.compression.methods.residual import FitContext, residual_cells, residual_count
from kvkeep.errors import InvalidArgument

CHUNK_CELLS = 512  # cells that a method compares with each other


@dataclass(frozen=True)
class Compression:
    """The compression of one chunk.

    Attributes:
        cells_before, cells_after: cells per KV head; cells_after may be 0.
        merged: mean number of evicted cells per KV head that were merged into others.
        seconds: wall time.
    """

    cells_before: int
    cells_after: int
    merged: float
    seconds: float


def compress(
    method: Method, candidates: Candidates, count: int
) -> Iterator[tuple[Cells, Compression]]:
    """Reduce cells to `count` (1 to n) per KV head, spread evenly over chunks of 512.

    Yields the cells and the report of each chunk; a chunk whose quota is 0 yields no cells. Ragged
    cells are one chunk.
    """
    total = len(candidates)
    chunk_size = total if isinstance(candidates.cells, RaggedCells) else CHUNK_CELLS
    for start in range(0, total, chunk_size):
        end = min(start + chunk_size, total)
        quota = count * end // total - count * start // total
        start_seconds = time.perf_counter()
        if isinstance(candidates.cells, RaggedCells):
            result = _compress_ragged(method, candidates, candidates.cells, count)
        else:
            result = _compress_chunk(method, candidates.part(slice(start, end)), quota)
        seconds = time.perf_counter() - start_seconds
        yield result.cells, Compression(end - start, len(result.cells), result.merged, seconds)


def compress_across_heads(
    method: Eviction,
    runs: Sequence[Candidates],
    count: int,
    keeps_scores: bool = False,
    context: FitContext | None = None,
) -> Iterator[tuple[RaggedCells, Compression]]:
    """Keep the highest scored cells over all runs, layers and KV heads.

    runs: one per segment. count: mean number of remaining cells per layer and KV head, in all runs,
    residual ones included. keeps_scores: whether the remaining cells have their scores. context:
    what residual cells are fitted by.
    """
    start_seconds = time.perf_counter()
    num_heads, num_cells = math.prod(runs[0].layers_and_heads), sum(map(len, runs))
    num_residual = _num_residual(method, count, num_cells)
    scores = [_score_exact(method, candidates) for candidates in runs]
    masks = top_score_masks(scores, (count - num_residual) * num_heads)
    parts: list[list[RaggedCells]] = []
    for candidates, mask, run_scores in zip(runs, masks, scores, strict=True):
        cells = RaggedCells.select_from(candidates.cells, mask)
        parts.append([replace(cells, scores=run_scores[mask]) if keeps_scores else cells])
    if num_residual:
        quotas = split_quota([len(run) for run in runs], num_residual)
        for run_parts, cells in zip(
            parts, residual_cells(runs, masks, quotas, context), strict=True
        ):
            run_parts.append(_scored_zero(cells) if keeps_scores else cells)
    seconds_per_cell = (time.perf_counter() - start_seconds) / num_cells
    for candidates, run_parts in zip(runs, parts, strict=True):
        joined, cells_before = _join(run_parts), len(candidates)
        yield joined, Compression(cells_before, len(joined), 0.0, seconds_per_cell * cells_before)


def compress_and_join(
    method: Eviction, runs: Sequence[Candidates], count: int
) -> tuple[RaggedCells, Compression]:
    """Keep the highest scored cells as `compress_across_heads` does, and join those of all runs.

    There are no residual cells: clustered again and again, they made an archive worse.
    runs: oldest first; they differ only in their cells.
    """
    start_seconds = time.perf_counter()
    num_heads = math.prod(runs[0].layers_and_heads)
    parts = [_ragged_with_scores(method, run) for run in runs]
    if not isinstance(method, CellwiseEviction):  # its scores compare cells with each other
        joined = Cells.concatenate(parts)
        assert isinstance(joined, RaggedCells)
        parts = [joined]
    scores = [score(method, replace(runs[0], cells=part)) for part in parts]
    cells = RaggedCells.select_and_concatenate(parts, top_score_masks(scores, count * num_heads))
    seconds = time.perf_counter() - start_seconds
    return cells, Compression(sum(map(len, runs)), len(cells), 0.0, seconds)


def split_quota(counts: Sequence[int], quota: int) -> list[int]:
    """Split a quota in proportion to counts, rounded so that the sum is exact.

    A quota of 5 over counts of 3, 3 and 4 gives 1, 2 and 2.
    """
    count_ends = list(accumulate(counts, initial=0))
    quota_ends = [quota * end // max(1, count_ends[-1]) for end in count_ends]
    return [end - start for start, end in pairwise(quota_ends)]


def top_score_masks(scores: Sequence[Tensor], count: int) -> list[Tensor]:
    """Return bool masks of the `count` highest scores over all runs, layers and KV heads.

    scores: one tensor of any shape per run; the masks have the same shapes. If there are fewer than
    `count` scores (the length of ragged cells is rounded up), all are selected, except
    those of -inf.
    """
    flat = torch.cat([run_scores.flatten() for run_scores in scores])
    selected = torch.zeros(flat.shape, dtype=torch.bool, device=flat.device)
    selected[flat.topk(min(count, len(flat)), sorted=False).indices] = True
    selected &= flat > -math.inf
    parts = torch.split(selected, [run_scores.numel() for run_scores in scores])
    return [part.view(run_scores.shape) for part, run_scores in zip(parts, scores, strict=True)]


def check_budget(method: Method, budget: str) -> None:
    """Raise InvalidArgument for a budget that is unknown or not supported by the method."""
    if budget not in BUDGETS:
        raise InvalidArgument(f"budget must be one of {', '.join(BUDGETS)}; found {budget!r}")
    if budget == "heads" and not isinstance(method, Eviction):
        raise InvalidArgument(
            f'method "{method.name}" has no scores to compare heads by: use budget="uniform", or a '
            "method with scores"
        )


def score(method: Eviction, candidates: Candidates) -> Tensor:
    """Return each cell's score: `[layers, kv_heads, n]`, or `[total]` for ragged cells.

    Other methods than a `CellwiseEviction` compare the cells of one head within chunks of 512.
    Ragged cells keep the score that their text had when it was reconstructed.
    """
    cells = candidates.cells
    if isinstance(method, CellwiseEviction):
        return method.score(candidates)
    if method.reconstruction_kind and isinstance(cells, RaggedCells) and cells.scores is not None:
        return cells.scores
    if isinstance(cells, RaggedCells):
        scores = [
            score(method, candidates.head(layer, head, head_cells)).flatten()
            for layer, head, head_cells in cells.heads()
            if len(head_cells)
        ]
        return torch.cat(scores)
    chunks = [slice(first, first + CHUNK_CELLS) for first in range(0, len(candidates), CHUNK_CELLS)]
    return torch.cat([method.score(candidates.part(chunk)) for chunk in chunks], -1)


def _ragged_with_scores(method: Eviction, run: Candidates) -> RaggedCells:
    """Convert a run to ragged cells; they store their scores if these never change."""
    cells = RaggedCells.from_cells(run.cells)
    if cells.scores is None and isinstance(method, CellwiseEviction):
        return replace(cells, scores=method.cell_score(run).flatten())
    return cells


def _num_residual(method: Eviction, count: int, num_cells: int) -> int:
    """Return how many of `count` remaining cells per KV head are residual."""
    return residual_count(count) if method.residual and count < num_cells else 0


def _score_exact(method: Eviction, candidates: Candidates) -> Tensor:
    """Return scores; -inf for residual cells, which become part of new ones."""
    scores, cells = score(method, candidates), candidates.cells
    if not method.residual or not isinstance(cells, RaggedCells) or cells.residual is None:
        return scores
    return scores.masked_fill(cells.residual.to(scores.device), -math.inf)


def _scored_zero(cells: RaggedCells) -> RaggedCells:
    """Return residual cells with scores, which nothing compares."""
    zeros = torch.zeros(cells.total, dtype=torch.float32, device=cells.keys.device)
    return replace(cells, scores=zeros)


def _join(parts: Sequence[RaggedCells]) -> RaggedCells:
    joined = parts[0] if len(parts) == 1 else Cells.concatenate(parts)
    assert isinstance(joined, RaggedCells)
    return joined


def _compress_chunk(method: Method, chunk: Candidates, quota: int) -> CompressionResult:
    if quota:
        return method.compress(chunk, quota)  # which takes a count of 1 or more
    return CompressionResult(chunk.cells.part(slice(0, 0)).to_compressed_format())


def _compress_ragged(
    method: Method, candidates: Candidates, cells: RaggedCells, count: int
) -> CompressionResult:
    """Keep the same share of each head's cells, `count / len(cells)`, rounded so that the sum fits.

    Heads with 5, 3, 0 and 1 cells (a length of 3) keep 1, 1, 0 and 1 for a count of 1: a third of
    the running sums 5, 8, 8 and 9 is 1, 2, 2 and 3.
    """
    compressed_heads, merged, total = [], 0.0, 0
    for layer, head, head_cells in cells.heads():
        previous_total, total = total, total + len(head_cells)
        quota = total * count // len(cells) - previous_total * count // len(cells)
        result = _compress_chunk(method, candidates.head(layer, head, head_cells), quota)
        compressed_heads.append(result.cells)
        merged += result.merged / cells.counts.numel()
    remaining = RaggedCells.from_heads(compressed_heads, cells.counts.shape[0])
    return CompressionResult(remaining, merged)

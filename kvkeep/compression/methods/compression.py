"""Compressing a run of cells, chunk by chunk, and what is told of it."""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvkeep.cache import Cells, Ragged
from kvkeep.compression.methods.base import (
    Candidates,
    Compressed,
    Eviction,
    EvictionByCell,
    Method,
    as_compressed,
)
from kvkeep.compression.methods.budget import best_of_all, check_budget
from kvkeep.errors import InvalidArgument

CHUNK = 512  # cells that are decided on together


@dataclass(frozen=True)
class Compression:
    """One chunk that was compressed, to nothing where so few cells are left that none is its own.

    cells_before, cells_after: of each KV head. merged: how many of those that went live on in
    others, a mean over layers and KV heads. seconds: wall time.
    """

    cells_before: int
    cells_after: int
    merged: float
    seconds: float


def compress(
    method: Method, candidates: Candidates, count: int
) -> Iterator[tuple[Cells, Compression]]:
    """Leaves `count` cells (1 to n), as evenly over the chunks as can be.

    A chunk of which nothing is left gives no cells, and is told of like the others. The work for a
    chunk is the same however many there are. Ragged cells are one chunk.
    """
    total = len(candidates)
    if isinstance(candidates.cells, Ragged):
        begun = time.perf_counter()
        found = _each_head(method, candidates, candidates.cells, count)
        took = time.perf_counter() - begun
        yield found.cells, Compression(total, len(found.cells), found.merged, took)
        return
    for first in range(0, total, CHUNK):
        upto = min(first + CHUNK, total)
        quota = count * upto // total - count * first // total
        begun = time.perf_counter()
        found = _compressed(method, candidates.part(slice(first, upto)), quota)
        took = time.perf_counter() - begun
        yield found.cells, Compression(upto - first, quota, found.merged, took)


def compress_by_heads(
    method: Eviction, runs: Sequence[Candidates], count: int
) -> Iterator[tuple[Ragged, Compression]]:
    """Leaves the cells that are worth most of some runs, whichever layer and KV head they are in.

    count: how many stay for each layer and KV head on average, of all runs together.
    """
    begun = time.perf_counter()
    heads = math.prod(runs[0].layers_and_heads)
    best = best_of_all([score(method, candidates) for candidates in runs], count * heads)
    took = (time.perf_counter() - begun) / sum(map(len, runs))
    for candidates, which in zip(runs, best, strict=True):
        cells, before = Ragged.select_from(candidates.cells, which), len(candidates)
        yield cells, Compression(before, len(cells), 0.0, took * before)


def fewer_together(
    method: Eviction, runs: Sequence[Candidates], count: int
) -> tuple[Ragged, Compression]:
    """As `compress_by_heads`, oldest run first; what is left of all of them becomes one.

    What is known of the runs, but for their cells, is the same.
    """
    begun = time.perf_counter()
    heads = math.prod(runs[0].layers_and_heads)
    parts = [_with_worth(method, run) for run in runs]
    if not isinstance(method, EvictionByCell):  # it compares cells with one another
        joined = Cells.concatenate(parts)
        assert isinstance(joined, Ragged)
        parts = [joined]
    scores = [score(method, replace(runs[0], cells=part)) for part in parts]
    cells = Ragged.select_and_concatenate(parts, best_of_all(scores, count * heads))
    took = time.perf_counter() - begun
    return cells, Compression(sum(map(len, runs)), len(cells), 0.0, took)


def _with_worth(method: Eviction, run: Candidates) -> Ragged:
    """Cells, ragged if they are not, and with what each is worth, where that lasts."""
    cells = Ragged.from_cells(as_compressed(run.cells))
    if cells.scores is None and isinstance(method, EvictionByCell):
        return replace(cells, scores=method.worth(run).flatten())
    return cells


def check_shared(method: Method, budget: str) -> None:
    """Raises InvalidArgument where cells cannot be shared out so."""
    check_budget(budget)
    if budget == "heads" and not isinstance(method, Eviction):
        raise InvalidArgument(
            f'method "{method.name}" has no scores by which heads could compete: take '
            'budget="uniform", or a method that scores'
        )


def score(method: Eviction, candidates: Candidates) -> Tensor:
    """What each cell is worth: `[layers, kv_heads, n]`, of ragged cells `[total]`.

    So far as a method compares cells, it compares those of one layer and KV head, chunk by chunk.
    """
    cells = candidates.cells
    if isinstance(method, EvictionByCell):
        return method.score(candidates)
    if isinstance(cells, Ragged):
        found = [
            score(method, candidates.head(layer, head, own)).flatten()
            for layer, head, own in cells.heads()
            if len(own)
        ]
        return torch.cat(found)
    chunks = [slice(first, first + CHUNK) for first in range(0, len(candidates), CHUNK)]
    return torch.cat([method.score(candidates.part(chunk)) for chunk in chunks], -1)


def _compressed(method: Method, chunk: Candidates, quota: int) -> Compressed:
    if quota:
        return method.compress(chunk, quota)
    return Compressed(as_compressed(chunk.cells.part(slice(0, 0))))


def _each_head(method: Method, candidates: Candidates, cells: Ragged, count: int) -> Compressed:
    """Leaves as large a share of each head's cells as `count` is of their mean, or one cell less.

    All heads together keep no more than `count` each. Of 5, 3, 0 and 1 cells, a length of 3, a
    count of 1 leaves a third: 5, 8, 8 and 9 so far become 1, 2, 2 and 3, that is 1, 1, 0 and 1.
    """
    left, merged, seen = [], 0.0, 0
    for layer, head, own in cells.heads():
        quota = (seen + len(own)) * count // len(cells) - seen * count // len(cells)
        seen += len(own)
        found = _compressed(method, candidates.head(layer, head, own), quota)
        left.append(found.cells)
        merged += found.merged / cells.counts.numel()
    return Compressed(Ragged.from_heads(left, cells.counts.shape[0]), merged)

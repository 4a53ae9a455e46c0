"""Compressing a run of cells, chunk by chunk, and what is told of it."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

from kvkeep.cache import Cells
from kvkeep.methods.base import Candidates, Compressed, Method, as_compressed

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
    chunk is the same however many there are.
    """
    total = len(candidates)
    for first in range(0, total, CHUNK):
        upto = min(first + CHUNK, total)
        quota = count * upto // total - count * first // total
        begun = time.perf_counter()
        found = _compressed(method, candidates.part(slice(first, upto)), quota)
        took = time.perf_counter() - begun
        yield found.cells, Compression(upto - first, quota, found.merged, took)


def _compressed(method: Method, chunk: Candidates, quota: int) -> Compressed:
    if quota:
        return method.compress(chunk, quota)
    return Compressed(as_compressed(chunk.cells.part(slice(0, 0))))

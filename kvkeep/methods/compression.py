"""Compressing a run of cells, chunk by chunk, and what is told of it."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

from kvkeep.cache import Cells
from kvkeep.methods.base import Candidates, Method

CHUNK = 512  # cells that are decided on together


@dataclass(frozen=True)
class Compression:
    """One chunk that was compressed.

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

    The work for a chunk is the same however many there are.
    """
    total = len(candidates)
    for first in range(0, total, CHUNK):
        upto = min(first + CHUNK, total)
        quota = count * upto // total - count * first // total
        if not quota:
            continue
        begun = time.perf_counter()
        found = method.compress(candidates.part(slice(first, upto)), quota)
        took = time.perf_counter() - begun
        yield found.cells, Compression(upto - first, quota, found.merged, took)

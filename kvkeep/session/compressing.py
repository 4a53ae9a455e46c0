"""Compressing what a session holds, once."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvkeep.cache import Queries, Segment, joined
from kvkeep.cache.observer import LIMIT
from kvkeep.errors import InvalidArgument
from kvkeep.methods import Candidates, Compression, Method, Statistics, compress
from kvkeep.session.memory import Memory

SINKS = 4


@dataclass(frozen=True)
class CompressionReport:
    """What compressing a session did.

    cells_before, cells_after: of each KV head. bytes_before, bytes_after: of their storage.
    chunks: what was compressed together, up to 512 cells each.
    """

    method: str
    ratio: float
    cells_before: int
    cells_after: int
    bytes_before: int
    bytes_after: int
    chunks: tuple[Compression, ...]


@torch.inference_mode()
def compress_held(
    memory: Memory,
    method: Method,
    ratio: float,
    recent: int = 64,
    seed: int = 0,
    statistics: Statistics | None = None,
    progress: Callable[[int], None] | None = None,
) -> tuple[Memory, CompressionReport]:
    """The memory with all cells compressed but the first four, the newest `recent`, the pinned.

    The given one stays as it is. Raises InvalidArgument before anything is evaluated.
    """
    _check_asked(memory, ratio, recent)
    cache, before, nbytes = memory.cache, memory.cache.cells, memory.cache.nbytes
    first_recent = before - recent
    runs = cache.runs(
        lambda rank, serial: rank < SINKS or rank >= first_recent or serial in memory.pins
    )
    total = sum(count for _, kept, _, count in runs if not kept)
    left = math.ceil(before / ratio) - (before - total)
    if left < len(runs):
        raise InvalidArgument(
            f"{before} cells cannot become {ratio:g} times fewer with the first {SINKS}, the "
            f"newest {recent} and {len(memory.pins)} pinned ones kept as they are: take a smaller "
            "ratio, or keep fewer"
        )
    queries = _newest_queries(memory) if method.needs_queries(statistics) else None
    segments, chunks, seen = [], [], 0
    for segment, kept, first, count in runs:
        cells = segment.read(first, count)
        if kept:
            segments.append(Segment.of(cache.layout, cells, segment.map, segment.anchor))
            continue
        quota = left * (seen + count) // total - left * seen // total
        seen += count
        near = queries.seen_from(segment.map) if queries else None
        plain = cells.restored(cache.layout.dtype)
        candidates = Candidates(plain, cache.rope, cache.scale, near, statistics, seed)
        for fewer, compression in compress(method, candidates, min(quota, count)):
            if len(fewer):
                segments.append(Segment.of(cache.layout, fewer, segment.map, segment.anchor))
            chunks.append(compression)
            if progress:
                progress(compression.cells_before)
    compressed = memory.successor()
    compressed.cache.segments = joined(segments)
    after = compressed.cache
    return compressed, CompressionReport(
        method.name, ratio, before, after.cells, nbytes, after.nbytes, tuple(chunks)
    )


def _check_asked(memory: Memory, ratio: float, recent: int) -> None:
    if memory.policy.name != "full":
        raise InvalidArgument(
            f'policy "{memory.policy.name}" cannot be compressed at once: policy="archive" '
            'compresses as it goes, policy="full" when it is asked to'
        )
    if not ratio > 1 or recent < 1:
        raise InvalidArgument(
            f"compressing takes a ratio above 1 and 1 or more recent cells; found {ratio} "
            f"and {recent}"
        )


def _newest_queries(memory: Memory) -> Queries | None:
    """Those of the last tokens: they are evaluated once more, beside the session."""
    count = min(LIMIT, memory.rewindable - 1)
    if count < 1:
        raise InvalidArgument("a method that decides by queries needs recent tokens that are held")
    again, beside = memory.tokens[-count:], memory.fork()
    beside.take_back(count)
    beside.cache.observe()
    for _ in beside.evaluate(again, count):
        pass
    assert beside.cache.observer is not None
    return beside.cache.observer.queries()

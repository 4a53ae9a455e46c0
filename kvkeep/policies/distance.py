"""From how far cells are seen, and how they are drawn closer."""

import itertools

import torch
from torch import Tensor

from kvkeep.cache import Block, Cells, KVCache, PositionMap, Segment


def draw_closer(cache: KVCache, near: int, furthest: int) -> None:
    """Halves distances beyond position `near`, until the next token sees nothing from too far.

    Cells of the archive are rotated once more; the others are looked at from elsewhere.
    """
    while _reach(cache) > furthest:
        cache.segments = [run for segment in cache.segments for run in _runs(segment)]
        for segment in cache.segments:
            _halve(cache, segment, near)


def moved(cache: KVCache, cells: Cells, positions: Tensor) -> Cells:
    """Cells at other positions, their keys rotated once more."""
    return cells.shifted(cache.rope, positions - cells.positions)


def _reach(cache: KVCache) -> int:
    """The distance of the next token to the cell that is seen from furthest."""
    return max(
        (segment.map(cache.time) - int(segment.positions().min()) for segment in cache.segments),
        default=0,
    )


def _halve(cache: KVCache, segment: Segment, near: int) -> None:
    """Halves the distance of a segment's cells from a position, as far as they lie before it."""
    if segment.compressed:
        cells = segment.block.slots
        seen = cells.positions - segment.map.offset
        positions = torch.where(seen < near, near - (near - seen + 1) // 2, seen)
        segment.block = Block(moved(cache, cells, positions), origin=segment.block.origin)
        segment.map = PositionMap()
        return
    last = int(segment.positions()[-1]) - segment.map.offset
    if last < near:
        segment.map = segment.map.closer((near - last) // 2)


def _runs(segment: Segment) -> list[Segment]:
    """A segment cut where positions are missing: each run then has a map of its own."""
    if segment.compressed:
        return [segment]
    gaps = torch.nonzero(segment.positions().diff() != 1).flatten() + 1
    bounds = [0, *gaps.tolist(), segment.length]
    if len(bounds) == 2:
        return [segment]
    return [
        Segment.from_cells(
            segment.layout, segment.read(first, end - first), segment.map, segment.anchor
        )
        for first, end in itertools.pairwise(bounds)
    ]

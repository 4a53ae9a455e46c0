"""The cells of an archive, in compressed segments that are anchors, and their distances."""

import itertools
from dataclasses import replace

import torch

from kvkeep.cache import Block, Cells, KVCache, PositionMap, RaggedCells, Segment

SEGMENT_CELLS = 1024  # that one segment of the archive holds


def archived_segments(cache: KVCache) -> list[Segment]:
    return [segment for segment in cache.segments if segment.compressed]


def archived_cells(cache: KVCache, archived: list[Segment]) -> list[Cells]:
    """Return each segment's cells at the positions they are seen at; not to be written to."""
    parts = [(segment, segment.view(0, segment.length)) for segment in archived]
    return [cells_at_seen_positions(cache, [part]) for part in parts]


def cells_at_seen_positions(cache: KVCache, parts: list[tuple[Segment, Cells]]) -> Cells:
    """Return unquantised cells of several segments, moved to the positions they are seen at.

    Edits and evictions change the offset of a segment's map: by that the positions differ from
    those of the keys.
    """
    moved_cells = []
    for segment, cells in parts:
        dequantised, offset = cells.dequantise(cache.layout.dtype), segment.position_map.offset
        if offset:
            shift = torch.tensor([-offset], dtype=torch.int64, device=dequantised.positions.device)
            dequantised = dequantised.shift(cache.rope, shift)
        moved_cells.append(dequantised)
    return moved_cells[0] if len(moved_cells) == 1 else Cells.concatenate(moved_cells)


def append_to_archive(cache: KVCache, archived: list[Segment], cells: Cells, limit: int) -> None:
    """Add compressed cells to the last segment that can take them, or to a new one.

    limit: the archive's maximum size.
    """
    layout, newest = cache.far_layout, archived[-1] if archived else None
    if newest is not None and newest.position_map != PositionMap():
        newest = None  # its cells are not seen at the positions of their keys
    if isinstance(cells, RaggedCells):  # which nothing can be appended to: the segment is replaced
        new_cells: Cells = cells
        if newest is not None and newest.length + len(cells) <= SEGMENT_CELLS:
            archived.pop()
            new_cells = Cells.concatenate([newest.read(0, newest.length), cells.to_layout(layout)])
        archived.append(Segment.from_cells(layout, new_cells, PositionMap(), is_anchor=True))
        return
    if newest is not None and newest.frozen and newest.length + len(cells) <= SEGMENT_CELLS:
        earlier = newest.read(0, newest.length)
        if not isinstance(earlier, RaggedCells):
            archived.pop()  # of a fork, each of which would begin another segment
            cells = Cells.concatenate([earlier, cells.to_layout(layout)])
    if newest is None or newest.frozen or newest.length + len(cells) > newest.limit:
        segment_limit = max(len(cells), min(SEGMENT_CELLS, limit))
        newest = Segment(layout, segment_limit, is_anchor=True, compressed=True)
        archived.append(newest)
    newest.append(cells)


def replace_archive(cache: KVCache, archived: list[Segment]) -> None:
    """Replace the archive's segments by others, before the first segment of the window."""
    others = [segment for segment in cache.segments if not segment.compressed]
    index = next((i for i, segment in enumerate(others) if not segment.is_anchor), len(others))
    cache.segments = [*others[:index], *archived, *others[index:]]


def lower_scores(cells: Cells, by: float) -> Cells:
    """Return cells with lower stored scores; the same cells if they store none."""
    if isinstance(cells, RaggedCells) and cells.scores is not None:
        return replace(cells, scores=cells.scores - by)
    return cells


def halve_distances(cache: KVCache, limit: int, recent: int = 0) -> None:
    """Halve distances of older cells until none is over `limit` for the next token.

    Cells do not come closer than the uncompressed ones after them allow, nor than `recent`
    positions. Where that is over the limit, they stay there. Keys of compressed cells are rotated
    once more; other segments get another position map.
    """
    furthest = _max_distance(cache)
    while furthest > limit:
        previous = furthest
        cache.segments = [run for segment in cache.segments for run in _split_at_gaps(segment)]
        cells_after = 0
        for segment in reversed(cache.segments):
            _halve_distances_to(segment, cache.time - max(recent, cells_after), cache)
            cells_after += 0 if segment.compressed else segment.length
        if (furthest := _max_distance(cache)) == previous:
            return


def _max_distance(cache: KVCache) -> int:
    segments = cache.segments
    distances = (s.position_map(cache.time) - int(s.positions().min()) for s in segments)
    return max(distances, default=0)


def _halve_distances_to(segment: Segment, boundary: int, cache: KVCache) -> None:
    """Halve the distances from position `boundary` to a segment's earlier cells."""
    if segment.compressed:
        cells = segment.block.slots
        seen_at = cells.positions - segment.position_map.offset
        halved = boundary - (boundary - seen_at + 1) // 2
        positions = torch.where(seen_at < boundary, halved, seen_at)
        moved = cells.shift(cache.rope, positions - cells.positions)
        segment.block = Block(moved, place_offset=segment.block.place_offset)
        segment.position_map = PositionMap()
        return
    # An uncompressed segment moves as a whole, by half the distance of its newest cell.
    newest_position = int(segment.positions()[-1]) - segment.position_map.offset
    if newest_position < boundary:
        segment.position_map = segment.position_map.closer_by((boundary - newest_position) // 2)


def _split_at_gaps(segment: Segment) -> list[Segment]:
    """Cut an uncompressed segment where positions are missing: each run needs its own map."""
    if segment.compressed:
        return [segment]
    gaps = torch.nonzero(segment.positions().diff() != 1).flatten() + 1
    bounds = [0, *gaps.tolist(), segment.length]
    if len(bounds) == 2:
        return [segment]
    runs = [segment.read(first, end - first) for first, end in itertools.pairwise(bounds)]
    layout, position_map = segment.layout, segment.position_map
    return [Segment.from_cells(layout, cells, position_map, segment.is_anchor) for cells in runs]

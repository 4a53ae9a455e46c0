"""What is in an archive: compressed cells, in segments that are anchors."""

from kvkeep.cache import Cells, KVCache, PositionMap, Ragged, Segment
from kvkeep.policies.distance import moved

STRETCH = 1024  # cells that one segment of the archive holds


def archived_segments(cache: KVCache) -> list[Segment]:
    return [segment for segment in cache.segments if segment.compressed]


def archived_cells(cache: KVCache, archived: list[Segment]) -> list[Cells]:
    """Not to be written: they may be looked at where they lie."""
    return [as_seen(cache, [(each, each.view(0, each.length))]) for each in archived]


def in_window(cache: KVCache) -> int:
    return sum(segment.length for segment in cache.segments if not segment.anchor)


def oldest(cache: KVCache, count: int) -> list[tuple[Segment, Cells]]:
    """The oldest cells of the window, copied."""
    found = []
    for segment in cache.segments:
        inside = 0 if segment.anchor else min(segment.length, count)
        if inside:
            found.append((segment, segment.read(0, inside)))
            count -= inside
    return found


def as_seen(cache: KVCache, found: list[tuple[Segment, Cells]]) -> Cells:
    """Plain cells of several segments at the positions where they are seen.

    After an edit that is not where they were put.
    """
    dtype = cache.layout.dtype
    parts = [
        moved(cache, cells.dequantised(dtype), cells.positions - offset)
        if (offset := segment.map.offset)
        else cells.dequantised(dtype)
        for segment, cells in found
    ]
    return parts[0] if len(parts) == 1 else Cells.concatenate(parts)


def append(cache: KVCache, archived: list[Segment], cells: Cells, limit: int) -> None:
    """Adds compressed cells to the last segment that takes them, or to one more.

    limit: the most cells of the archive.
    """
    if isinstance(cells, Ragged):
        _append_ragged(cache, archived, cells)
        return
    last = archived[-1] if archived else None
    if last is None or not _takes(last, len(cells)):
        most = max(len(cells), min(STRETCH, limit))
        last = Segment(cache.far_layout, most, anchor=True, compressed=True)
        archived.append(last)
    last.append(cells)


def _append_ragged(cache: KVCache, archived: list[Segment], cells: Ragged) -> None:
    """In the place of the last segment comes one that holds both."""
    layout, last = cache.far_layout, archived[-1] if archived else None
    if last is not None and last.map == PositionMap() and last.length + len(cells) <= STRETCH:
        archived.pop()
        held = last.read(0, last.length)
        both = Cells.concatenate([held, cells.in_layout(layout)])
    else:
        both = cells
    archived.append(Segment.from_cells(layout, both, PositionMap(), anchor=True))


def replace_archive(cache: KVCache, archived: list[Segment]) -> None:
    """Puts the segments in the place of the archive's, before those of the window."""
    others = [segment for segment in cache.segments if not segment.compressed]
    at = next((i for i, segment in enumerate(others) if not segment.anchor), len(others))
    cache.segments = [*others[:at], *archived, *others[at:]]


def _takes(segment: Segment, count: int) -> bool:
    """Whether a segment of the archive has room for more cells, and is seen from where they are."""
    fits = segment.length + count <= segment.limit
    return fits and not segment.frozen and segment.map == PositionMap()

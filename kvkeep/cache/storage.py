"""The memory of a cache's segments: its size, merging small segments, and freeing idle slots."""

import itertools
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress

import torch

from kvkeep.cache.block import Cells, Storage
from kvkeep.cache.segment import Segment

IDLE_DIVISOR = 8  # idle slots may be an eighth of the budget
MAX_SMALL_CELLS = 256  # copying these takes less time than evaluating a token
MAX_BORDERS = 16  # between segments that can be merged: each makes later tokens a little slower


def nbytes(segments: Sequence[Segment]) -> int:
    """Return the bytes of the segments' storage, idle slots included."""
    return sum(storage.nbytes for storage in _users_by_storage(segments))


def merge_segments(
    segments: Sequence[Segment],
    max_cells: int | None = None,
    can_merge: Callable[[Segment, Segment], bool] | None = None,
) -> list[Segment]:
    """Merge neighbours with one position map that agree in `anchor` and `compressed`.

    max_cells: the most cells of a merged segment; None for no limit. can_merge: whether two
    neighbours are merged; None for all such.
    """
    can_merge = can_merge or _can_merge
    runs: list[list[Segment]] = []
    for segment in segments:
        continues_run = runs and can_merge(runs[-1][-1], segment)
        if continues_run and (max_cells is None or _count_cells([*runs[-1], segment]) <= max_cells):
            runs[-1].append(segment)
        elif segment.length:
            runs.append([segment])
    merged = []
    for first, *others in runs:
        if others:
            cells = Cells.concatenate([s.read(0, s.length) for s in (first, *others)])
            first = Segment.from_cells(first.layout, cells, first.position_map, first.is_anchor)
        merged.append(first)
    return merged


def merge_small_segments(segments: Sequence[Segment]) -> list[Segment]:
    """Merge neighbours of together at most `MAX_SMALL_CELLS`, or of any size if too many remain.

    Merging copies cells: this rarely copies many, and small edits do not make ever more segments.
    """
    merged = merge_segments(segments, MAX_SMALL_CELLS)
    return merge_segments(merged) if _count_borders(merged, _can_merge) > MAX_BORDERS else merged


def merge_complete_segments(segments: Sequence[Segment]) -> list[Segment]:
    """Merge uncompressed segments that take no more cells, once they have too many borders.

    A chain of forks leaves such segments: each fork begins one of its own. Small neighbours are
    merged, then the newest ones up to one of at least as many cells as these together. So older
    cells, which the parents share, are copied ever more rarely: n cells, of which few came with
    each fork, have been copied about log n times. At most half of the borders stay.
    """
    if _count_borders(segments, _are_complete) <= MAX_BORDERS:
        return list(segments)
    merged = merge_segments(segments, MAX_SMALL_CELLS, _are_complete)
    first, cell_count = len(merged), 0
    for index in reversed(range(len(merged))):
        has_few_borders = _count_borders(merged[: index + 1], _are_complete) < MAX_BORDERS // 2
        if has_few_borders and merged[index].length >= cell_count > 0:
            break
        first, cell_count = index, cell_count + merged[index].length
    return [*merged[:first], *merge_segments(merged[first:], can_merge=_are_complete)]


def _count_borders(
    segments: Sequence[Segment], can_merge: Callable[[Segment, Segment], bool]
) -> int:
    return sum(can_merge(left, right) for left, right in itertools.pairwise(segments))


def _are_complete(left: Segment, right: Segment) -> bool:
    """Whether two segments can be merged, are not compressed, and take no more cells."""
    are_frozen = left.frozen and right.frozen
    return are_frozen and not left.compressed and _can_merge(left, right)


def _can_merge(left: Segment, right: Segment) -> bool:
    left_kind, right_kind = ((s.is_anchor, s.compressed) for s in (left, right))
    return left_kind == right_kind and left.position_map == right.position_map


def trim(segments: Sequence[Segment], budget: int) -> None:
    """Free slots of dropped cells, by moving the remaining cells to storage of exactly their size.

    Slots become idle when cells are cut out, or evicted from a frozen segment, and when `keep` is
    lowered before all anchors are there. Cells move if more of their storage is idle than in use,
    or if all storage exceeds the budget of cells by an eighth. The copying costs no more than the
    change that made the slots idle. Storage that another session or a snapshot uses stays and does
    not count: moving cells out would not free it. Cells for which no new storage can be allocated
    stay where they are, until the next call.
    """
    growing = {segment for segment in segments if _is_growing(segment, segments[-1])}
    if not any(segment.frozen or _has_idle_slots(segment, growing) for segment in segments):
        return
    storages = {s: users for s, users in _users_by_storage(segments).items() if _can_move(s, users)}
    idle_counts = {s: s.capacity - _count_cells(users) for s, users in storages.items()}
    excess = _count_cells(segments) + sum(idle_counts.values()) - budget - budget // IDLE_DIVISOR
    for storage in sorted(storages, key=lambda storage: -idle_counts[storage]):
        users = storages[storage]
        unfilled = [s.capacity - s.length - s.start for s in users if s in growing]
        dropped_count = idle_counts[storage] - sum(unfilled)
        if idle_counts[storage] and (dropped_count > _count_cells(users) or excess > 0):
            excess -= idle_counts[storage]
            # On a failed allocation torch raises a RuntimeError, and Python a MemoryError.
            with torch.inference_mode(), suppress(MemoryError, RuntimeError):
                for segment in users:
                    segment.compact()


def _is_growing(segment: Segment, last: Segment) -> bool:
    """Whether a segment still takes cells: the last one, an archive's, or one that grows lazily."""
    return not segment.frozen and (segment is last or segment.compressed or segment.grows_lazily)


def _has_idle_slots(segment: Segment, growing: Collection[Segment]) -> bool:
    """Whether a segment has slots that no further cells will take."""
    return segment not in growing and segment.capacity > segment.length


def _can_move(storage: Storage, users: Sequence[Segment]) -> bool:
    """Whether only these segments use the storage, and their cells can move."""
    blocks = {segment.block for segment in users}
    return all(block in blocks for block in storage.blocks) and not any(s.wrapped for s in users)


def _count_cells(segments: Sequence[Segment]) -> int:
    return sum(segment.length for segment in segments)


def _users_by_storage(segments: Sequence[Segment]) -> dict[Storage, list[Segment]]:
    users: dict[Storage, list[Segment]] = {}
    for segment in segments:
        users.setdefault(segment.block.storage, []).append(segment)
    return users

"""The memory that segments take: its size, merging small segments, and freeing idle storage."""

import itertools
from collections.abc import Sequence

import torch

from kvkeep.cache.block import Cells, Storage
from kvkeep.cache.segment import Segment

IDLE_DIVISOR = 8  # an eighth of a budget's cells may be idle
MAX_SMALL_CELLS = 256  # copying these takes less time than evaluating a token
MAX_BORDERS = 16  # between segments that could be merged: each makes later tokens a little slower


def nbytes(segments: Sequence[Segment]) -> int:
    """Return the bytes of the segments' storage, idle slots included."""
    return sum(storage.nbytes for storage in _users_by_storage(segments))


def merge_segments(segments: Sequence[Segment], max_cells: int | None = None) -> list[Segment]:
    """Merge neighbours with one position map that agree in `anchor` and `compressed`.

    max_cells: the most cells of a merged segment; None for no limit.
    """
    runs: list[list[Segment]] = []
    for segment in segments:
        mergeable = runs and _mergeable(runs[-1][-1], segment)
        if mergeable and (max_cells is None or _live_cells(runs[-1]) + segment.length <= max_cells):
            runs[-1].append(segment)
        elif segment.length:
            runs.append([segment])
    merged = []
    for first, *others in runs:
        if others:
            cells = Cells.concatenate([s.read(0, s.length) for s in (first, *others)])
            first = Segment.from_cells(first.layout, cells, first.map, first.anchor)
        merged.append(first)
    return merged


def merge_small_segments(segments: Sequence[Segment]) -> list[Segment]:
    """Merge neighbours of at most `MAX_SMALL_CELLS` in all; or all, if too many would remain.

    Thus cells are rarely copied, and small edits do not make ever more segments.
    """
    merged = merge_segments(segments, MAX_SMALL_CELLS)
    borders = sum(_mergeable(left, right) for left, right in itertools.pairwise(merged))
    return merge_segments(merged) if borders > MAX_BORDERS else merged


def _mergeable(left: Segment, right: Segment) -> bool:
    return (left.map, left.anchor, left.compressed) == (right.map, right.anchor, right.compressed)


def trim(segments: Sequence[Segment], budget: int) -> None:
    """Free slots of dropped cells, by moving the remaining cells to storage of exactly their size.

    Slots become idle when cells are cut out, or evicted from a frozen segment. Cells move if more
    of their storage is idle than in use, or if all storage takes more than a budget of cells and an
    eighth. The copying costs no more than the change that made the slots idle. Storage that another
    session or a snapshot uses stays and does not count: moving cells out would not free it.
    """
    if not any(segment.frozen for segment in segments):
        return
    storages = {s: users for s, users in _users_by_storage(segments).items() if _movable(s, users)}
    idle_slots = {s: s.capacity - _live_cells(users) for s, users in storages.items()}
    excess = _live_cells(segments) + sum(idle_slots.values()) - budget - budget // IDLE_DIVISOR
    for storage in sorted(storages, key=lambda storage: -idle_slots[storage]):
        users = storages[storage]
        dropped_slots = idle_slots[storage] - sum(_unfilled_slots(segment) for segment in users)
        if idle_slots[storage] and (dropped_slots > _live_cells(users) or excess > 0):
            excess -= idle_slots[storage]
            with torch.inference_mode():
                for segment in users:
                    segment.compact()


def _movable(storage: Storage, users: Sequence[Segment]) -> bool:
    """Whether only these segments use the storage, and their cells can move."""
    blocks = [segment.block for segment in users]
    return all(block in blocks for block in storage.blocks) and not any(s.wrapped for s in users)


def _live_cells(segments: Sequence[Segment]) -> int:
    return sum(segment.length for segment in segments)


def _unfilled_slots(segment: Segment) -> int:
    return 0 if segment.frozen else segment.capacity - segment.length - segment.start


def _users_by_storage(segments: Sequence[Segment]) -> dict[Storage, list[Segment]]:
    users: dict[Storage, list[Segment]] = {}
    for segment in segments:
        users.setdefault(segment.block.storage, []).append(segment)
    return users

"""The memory that segments take: its size, merging small segments, and freeing idle storage."""

import itertools
from collections.abc import Sequence

import torch

from kvkeep.cache.block import Cells, Storage
from kvkeep.cache.segment import Segment

SLACK = 8  # one in so many of a budget's cells may be idle
SMALL = 256  # cells; copying so many takes less time than a token does
MAX_BORDERS = 16  # between segments that could be merged: each costs every later token a little


def nbytes(segments: Sequence[Segment]) -> int:
    """Return the bytes of all storage that segments use, idle slots included."""
    return sum(storage.nbytes for storage in _storages(segments))


def merge_segments(segments: Sequence[Segment]) -> list[Segment]:
    """Merge neighbours of one kind and one position map, copying their cells."""
    return _merge(segments, None)


def merge_small_segments(segments: Sequence[Segment]) -> list[Segment]:
    """Merge neighbours that are small together; all of them, if too many would remain.

    So cells are rarely copied, and small edits do not make ever more segments.
    """
    merged = _merge(segments, SMALL)
    borders = sum(_mergeable(left, right) for left, right in itertools.pairwise(merged))
    return merge_segments(merged) if borders > MAX_BORDERS else merged


def _merge(segments: Sequence[Segment], most: int | None) -> list[Segment]:
    runs: list[list[Segment]] = []
    for segment in segments:
        mergeable = runs and _mergeable(runs[-1][-1], segment)
        if mergeable and (most is None or _live(runs[-1]) + segment.length <= most):
            runs[-1].append(segment)
        elif segment.length:
            runs.append([segment])
    return [run[0] if len(run) == 1 else _merge_run(run) for run in runs]


def _merge_run(run: Sequence[Segment]) -> Segment:
    first = run[0]
    cells = Cells.concatenate([segment.read(0, segment.length) for segment in run])
    return Segment.from_cells(first.layout, cells, first.map, first.anchor)


def _mergeable(left: Segment, right: Segment) -> bool:
    return (
        left.map == right.map
        and left.anchor == right.anchor
        and left.compressed == right.compressed
    )


def trim(segments: Sequence[Segment], budget: int) -> None:
    """Free storage that dropped cells have left, by moving the remaining cells.

    A cut leaves cells where they are, so the slots of the removed cells become idle, and so do
    those of cells that a window evicts from a frozen segment. Where more of a storage is idle than
    in use, its cells move to storage of exactly their size. The same happens where all storage
    takes more than a budget of cells and an eighth. The copying costs no more than the change that
    made the slots idle. Storage that another session or a snapshot uses as well stays and does not
    count: moving cells out would not free it.
    """
    if not any(segment.frozen for segment in segments):
        return
    storages = {s: users for s, users in _storages(segments).items() if _movable(s, users)}
    idle = {storage: storage.cells - _live(users) for storage, users in storages.items()}
    excess = _live(segments) + sum(idle.values()) - budget - budget // SLACK
    for storage in sorted(storages, key=lambda storage: -idle[storage]):
        users = storages[storage]
        wasted = idle[storage] - sum(_room(segment) for segment in users)
        if idle[storage] and (wasted > _live(users) or excess > 0):
            excess -= idle[storage]
            with torch.inference_mode():
                for segment in users:
                    segment.compact()


def _movable(storage: Storage, users: Sequence[Segment]) -> bool:
    """Whether only these segments use the storage, and their cells can move."""
    blocks = [segment.block for segment in users]
    return all(block in blocks for block in storage.blocks) and not any(s.wrapped for s in users)


def _live(segments: Sequence[Segment]) -> int:
    return sum(segment.length for segment in segments)


def _room(segment: Segment) -> int:
    """Return the number of slots that a segment will still fill."""
    return 0 if segment.frozen else segment.capacity - segment.length - segment.start


def _storages(segments: Sequence[Segment]) -> dict[Storage, list[Segment]]:
    """Return the segments that use each storage."""
    users: dict[Storage, list[Segment]] = {}
    for segment in segments:
        users.setdefault(segment.block.storage, []).append(segment)
    return users

"""What memory the cells of a cache take, and how it is given back once cells are gone."""

from collections.abc import Sequence

import torch

from kvkeep.cache.block import Storage
from kvkeep.cache.segment import Segment

SLACK = 8  # one in so many of a budget's cells may lie idle


def nbytes(segments: Sequence[Segment]) -> int:
    """Bytes of all storage that segments lie in, what is idle included."""
    return sum(storage.nbytes for storage in _storages(segments))


def trim(segments: Sequence[Segment], budget: int) -> None:
    """Moves cells out of storage that others have left, and so gives it back.

    A cut leaves cells where they are: what was between is idle, and so is what a window forgets of
    a segment that takes no more. Where more of a storage is idle than in use, what is left moves
    and takes no more than it needs; so it does where all storage takes more than a budget of cells
    and an eighth. That costs no more than what made room. Storage at which another session or a
    snapshot looks, too, stays and does not count: it would not be given back.
    """
    if not any(segment.frozen for segment in segments):
        return
    storages = {storage: lie for storage, lie in _storages(segments).items() if _own(storage, lie)}
    idle = {storage: storage.cells - _live(lie) for storage, lie in storages.items()}
    excess = _live(segments) + sum(idle.values()) - budget - budget // SLACK
    for storage in sorted(storages, key=lambda storage: -idle[storage]):
        lie = storages[storage]
        gone = idle[storage] - sum(_room(segment) for segment in lie)
        if idle[storage] and (gone > _live(lie) or excess > 0):
            excess -= idle[storage]
            with torch.inference_mode():
                for segment in lie:
                    segment.move()


def _own(storage: Storage, lie: Sequence[Segment]) -> bool:
    """Whether no one else looks at it, and its cells can move."""
    blocks = [segment.block for segment in lie]
    return all(block in blocks for block in storage.blocks) and not any(s.wrapped for s in lie)


def _live(segments: Sequence[Segment]) -> int:
    return sum(segment.length for segment in segments)


def _room(segment: Segment) -> int:
    """Slots that a segment will fill yet."""
    return 0 if segment.frozen else segment.capacity - segment.length - segment.start


def _storages(segments: Sequence[Segment]) -> dict[Storage, list[Segment]]:
    """The segments that lie in each storage."""
    found: dict[Storage, list[Segment]] = {}
    for segment in segments:
        found.setdefault(segment.block.storage, []).append(segment)
    return found

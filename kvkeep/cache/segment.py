"""A run of cells that share one storage block and one position map."""

import copy
from dataclasses import replace

import torch
from torch import Tensor

from kvkeep.cache.block import Block, Layout
from kvkeep.cache.position_map import PositionMap

GROWTH = 256  # cells added at least when a segment outgrows its storage


class Segment:
    """A run of cells: which slots of a block are live, in which order, and seen from where.

    start, length: the live cells are in slots `start, start + 1, ... (modulo capacity)`, oldest
        first.
    limit: the most cells it may hold; storage grows up to it.
    window: the number of newest cells that a query sees of this segment and the other window
        segments together, its own included. None: an anchor, or a segment that forgets nothing.
    frozen: takes no new cells; others build on it.

    A window segment that reaches its limit is a ring from then on: the newest cell takes the slot
    of the oldest, and order in storage means nothing.
    """

    def __init__(
        self, layout: Layout, position_map: PositionMap, limit: int, window: int | None = None
    ):
        self.layout = layout
        self.map = position_map
        self.limit = limit
        self.window = window
        self.frozen = False
        self.start = 0
        self.length = 0
        self.block = Block.allocate(layout, 0)

    @property
    def capacity(self) -> int:
        return self.block.capacity

    @property
    def full(self) -> bool:
        return self.length == self.limit

    @property
    def first_position(self) -> int:
        """The position of the oldest live cell."""
        return int(self.block.positions[self.start])

    @property
    def last_position(self) -> int:
        """The position of the newest live cell."""
        return int(self.block.positions[(self.start + self.length - 1) % self.capacity])

    def slots(self, first: int, count: int) -> list[slice]:
        """Where the `count` cells from the `first`-oldest on lie (or would): one slice, or two."""
        begin = (self.start + first) % self.capacity if self.capacity else 0
        end = begin + count
        if end <= self.capacity:
            return [slice(begin, end)]
        return [slice(begin, self.capacity), slice(0, end - self.capacity)]

    def read(self, first: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, values and positions of `count` cells from the `first`-oldest on, copied."""
        block, slots = self.block, self.slots(first, count)
        keys, values = (
            torch.cat([x[:, :, s] for s in slots], 2) for x in (block.keys, block.values)
        )
        return keys, values, torch.cat([block.positions[s] for s in slots])

    def reserve(self, count: int) -> None:
        """Makes storage for `count` live cells in all, or for as many as the limit allows.

        The first storage is as asked for; later growth is generous, so that cells which come one
        by one are rarely copied.
        """
        if min(count, self.limit) <= self.capacity:
            return
        growth = max(GROWTH, self.capacity // 8) if self.capacity else 0
        grown = max(count, self.capacity + growth)
        cells = self.read(0, self.length)
        self.block = Block.allocate(self.layout, min(grown, self.limit))
        self.start = 0
        self.write(self.slots(0, self.length), *cells)

    def next_slot(self) -> int:
        """The slot for one more cell, ready to be written: in a full ring that of the oldest."""
        self.reserve(self.length + 1)
        slots = self.slots(self.length, 1)
        self._unshare(slots)
        return int(slots[0].start)

    def occupy(self, slot: int, position: int) -> None:
        """Counts a cell written into `next_slot()` as the newest."""
        self.block.positions[slot] = position
        if self.length == self.capacity:
            self.start = (self.start + 1) % self.capacity
        else:
            self.length += 1

    def append(self, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        """Adds cells as the newest; as many of the oldest go as the limit demands.

        keys, values: `[layers, kv_heads, n, head_dim]`; positions: `[n]`; oldest first.
        """
        count = positions.shape[0]
        self.reserve(self.length + count)
        unseen = max(0, count - self.capacity)
        count -= unseen
        self.drop_oldest(max(0, self.length + count - self.capacity))
        slots = self.slots(self.length, count)
        self._unshare(slots)
        self.write(slots, keys[:, :, unseen:], values[:, :, unseen:], positions[unseen:])
        self.length += count

    def write(self, slots: list[slice], keys: Tensor, values: Tensor, positions: Tensor) -> None:
        done = 0
        for slot in slots:
            upto = done + slot.stop - slot.start
            self.block.keys[:, :, slot] = keys[:, :, done:upto]
            self.block.values[:, :, slot] = values[:, :, done:upto]
            self.block.positions[slot] = positions[done:upto]
            done = upto

    def _unshare(self, slots: list[slice]) -> None:
        """Copies the storage before cells that others see would be overwritten."""
        if any(slot.start < self.block.shared for slot in slots):
            self.block = self.block.copy()

    def drop_oldest(self, count: int) -> None:
        self.length -= count
        self.start = (self.start + count) % self.capacity if self.length else 0

    def drop_newest(self, count: int) -> None:
        self.length -= count
        if not self.length:
            self.start = 0

    def twin(self) -> "Segment":
        """The same cells for another owner. Storage is shared until one side must write to it."""
        twin = copy.copy(self)
        # A run from slot 0 goes on behind its last cell wherever it is; a ring needs all its slots.
        twin.block = self.block.share(self.length if self.start == 0 else self.capacity)
        return twin

    def to(self, device: torch.device) -> "Segment":
        """Itself, with its storage moved to a device."""
        self.block = self.block.to(device)
        self.layout = replace(self.layout, device=device)
        return self

    def branch(self) -> "Segment":
        """A twin for a fork: where the run can still grow, the fork builds on it elsewhere."""
        twin = self.twin()
        twin.frozen = self.frozen or (self.start == 0 and not self.full)
        return twin


def runs(segments: list[Segment], first: int, count: int) -> list[tuple[Segment, int, int]]:
    """Where the `count` cells from the `first`-oldest on lie: (segment, first, count) each."""
    runs = []
    for segment in segments:
        inside = min(segment.length - first, count)
        if inside > 0:
            runs.append((segment, first, inside))
            count -= inside
        first = max(0, first - segment.length)
    return runs

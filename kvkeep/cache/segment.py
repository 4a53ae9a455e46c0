"""A run of cells that share one storage block and one position map."""

import copy
from dataclasses import replace

import torch
from torch import Tensor

from kvkeep.cache.block import Block, Cells, Layout
from kvkeep.cache.position_map import PositionMap

GROWTH = 256  # cells added at least when a segment outgrows its storage


class Segment:
    """A run of cells: which slots of a block are live, in which order, and seen from where.

    start, length: the live cells are in slots `start, start + 1, ... (modulo capacity)`, oldest
        first.
    limit: the most cells it may hold; storage grows up to it.
    anchor: its cells stay. Those of other segments go, oldest first, when the window is full.
    frozen: takes no new cells; others build on it.
    crowded: other segments of its window hold cells yet, so that storage is only made as it fills.
    lent: its newest cells that are still counted in the window, too: they leave it in the step
        that is about to run.

    A segment of the window that reaches its limit is a ring from then on: the newest cell takes
    the slot of the oldest, and order in storage means nothing.
    """

    def __init__(
        self,
        layout: Layout,
        limit: int,
        position_map: PositionMap = PositionMap(),  # noqa: B008 (frozen)
        anchor: bool = False,
        compressed: bool = False,
    ):
        self.layout = layout
        self.limit = limit
        self.map = position_map
        self.anchor = anchor
        self.frozen = False
        self.crowded = False
        self.lent = 0
        self.start = 0
        self.length = 0
        self.block = Block(Cells.empty(layout, 0, compressed))

    @classmethod
    def of(cls, layout: Layout, cells: Cells, position_map: PositionMap, anchor: bool) -> "Segment":
        """A frozen segment of exactly these cells, not copied where the layout keeps them so."""
        segment = cls(layout, len(cells), position_map, anchor)
        block = Block(cells.kept_as(layout))
        segment.block, segment.length, segment.frozen = block, len(cells), True
        return segment

    @property
    def capacity(self) -> int:
        return self.block.capacity

    @property
    def compressed(self) -> bool:
        """Whether its cells are; see `Cells`."""
        return self.block.slots.compressed

    @property
    def full(self) -> bool:
        return self.length == self.limit

    def slots(self, first: int, count: int) -> list[slice]:
        """Where the `count` cells from the `first`-oldest on lie (or would): one slice, or two."""
        begin = (self.start + first) % self.capacity if self.capacity else 0
        end = begin + count
        if end <= self.capacity:
            return [slice(begin, end)]
        return [slice(begin, self.capacity), slice(0, end - self.capacity)]

    def read(self, first: int, count: int) -> Cells:
        """The `count` cells from the `first`-oldest on, copied."""
        return Cells.joined([self.block.slots.part(s) for s in self.slots(first, count)])

    def serials(self) -> list[int]:
        """Which tokens the live cells are of, oldest first."""
        parts = [self.block.slots.serials[s] for s in self.slots(0, self.length)]
        return [serial for part in parts for serial in part.tolist()]

    def positions(self) -> Tensor:
        """Where the live cells are, oldest first: `[n]`; of compressed ones for each KV head."""
        positions = self.block.slots.positions
        return torch.cat([positions[..., slot] for slot in self.slots(0, self.length)], -1)

    def reserve(self, count: int) -> None:
        """Makes storage for `count` live cells in all, or for as many as the limit allows.

        The first storage is as asked for; later growth is generous, so that cells which come one
        by one are rarely copied.
        """
        # Only what can grow no more wraps around: where each cell lies, and so the last bit of a
        # sum, then never depends on how much storage there happened to be.
        wraps = self.start + count > self.capacity
        if min(count, self.limit) <= self.capacity and not (wraps and self.capacity < self.limit):
            return
        growth = max(GROWTH, self.capacity // 8) if self.capacity else 0
        growth = self.slack if self.crowded else growth
        grown = max(count, self.capacity + growth)
        cells = self.read(0, self.length)
        self.block = Block(Cells.empty(self.layout, min(grown, self.limit), self.compressed))
        self.start = 0
        self.block.slots.write(slice(0, self.length), cells)

    def next_slot(self) -> int:
        """The slot for one more cell, ready to be written: in a full ring that of the oldest."""
        self.reserve(self.length + 1)
        slots = self.slots(self.length, 1)
        self._unshare(slots)
        return int(slots[0].start)

    def occupy(self, slot: int, position: int, serial: int) -> None:
        """Counts a cell written into `next_slot()` as the newest."""
        self.block.slots.positions[slot] = position
        self.block.slots.serials[slot] = serial
        self.length += 1

    def append(self, cells: Cells) -> None:
        """Adds cells as the newest; the limit must leave room for them."""
        self.reserve(self.length + len(cells))
        slots, done = self.slots(self.length, len(cells)), 0
        self._unshare(slots)
        for slot in slots:
            upto = done + slot.stop - slot.start
            self.block.slots.write(slot, cells.part(slice(done, upto)))
            done = upto
        self.length += len(cells)

    def _unshare(self, slots: list[slice]) -> None:
        """Copies the storage before cells that others see would be overwritten."""
        if any(slot.start < self.block.shared for slot in slots):
            self.block = self.block.copy()

    @property
    def slack(self) -> int:
        """Cells of storage that may lie idle in each segment of an edited window."""
        return self.limit // 16

    def drop_oldest(self, count: int) -> None:
        self.length -= count
        self.start = (self.start + count) % self.capacity
        idle = self.capacity - self.length
        if self.frozen and not self.block.shared and idle > self.slack:
            self.block, self.start = Block(self.read(0, self.length)), 0

    def drop_newest(self, count: int) -> None:
        self.length -= count

    def thaw(self, limit: int) -> bool:
        """Whether it can take new cells, up to a limit; made so, if no one else builds on it."""
        if self.compressed:
            return False
        if self.frozen and not self.block.shared and self.map == PositionMap():
            self.frozen = False
        if not self.frozen:
            self.limit = limit
        return not self.frozen

    def twin(self) -> "Segment":
        """The same cells for another owner. Storage is shared until one side must write to it."""
        twin = copy.copy(self)
        # A run from slot 0 goes on behind its last cell wherever it is; a ring needs all its slots.
        twin.block = self.block.share(self.length if self.start == 0 else self.capacity)
        return twin

    def branch(self) -> "Segment":
        """A twin for a fork: where the run can still grow, the fork builds on it elsewhere."""
        twin = self.twin()
        twin.frozen = self.frozen or (self.start == 0 and not self.full)
        return twin

    def to(self, device: torch.device) -> "Segment":
        """Itself, with its storage moved to a device."""
        self.block = Block(self.block.slots.to(device), self.block.shared)
        self.layout = replace(self.layout, device=device)
        return self

"""A run of cells that share one storage block and one position map."""

from dataclasses import replace

import torch
from torch import Tensor

from kvkeep.cache.block import Block, Cells, ProtectedCells, UndoLog
from kvkeep.cache.layout import Layout
from kvkeep.cache.ragged import RaggedCells
from kvkeep.cache.rope import PositionMap
from kvkeep.cache.shallow_copy import shallow_copy

MIN_GROWTH = 256  # cells added at least when a segment outgrows its storage
_FULL = "more cells than the limit of their segment"


class Segment:
    """A run of live cells in the slots of a block, and their position map.

    start, length: the live cells are in slots `start, start + 1, ... (modulo capacity)`, oldest
        first.
    limit: the most cells it may hold; storage grows up to it.
    is_anchor: whether its cells stay when the window is full; others are evicted, oldest first.
    frozen: takes no new cells unless `reopen` allows them again.
    sealed: `reopen` refuses, because other segments continue after its cells.
    grows_lazily: storage is allocated only as it fills, because other segments of the window still
        hold cells.
    arriving_count: how many of its newest cells are copies of cells that the next step evicts.
    protected: in a successor, the cells that a rollback must restore.

    Each cell keeps a *place*, its slot plus the block's place_offset: a logical slot. Kernels sum
    over blocks of places. Therefore the last bit of a sum depends only on places, and storage can
    be moved, cut and shared freely.

    Places begin at 0 and stay below the limit: there a segment becomes a ring, in which a new cell
    takes the place of the oldest. With a limit of 6:

        five cells, places 0 1 2 3 4
        two are evicted     2 3 4        (cut to three slots: offset 2)
        four are added      2 3 4 5 0 1  (a ring of six slots: offset 0, start 2)
    """

    def __init__(
        self,
        layout: Layout,
        limit: int,
        position_map: PositionMap = PositionMap(),  # noqa: B008 (frozen)
        is_anchor: bool = False,
        compressed: bool = False,
    ):
        self.layout = layout
        self.limit = limit
        self.position_map = position_map
        self.is_anchor = is_anchor
        self.frozen = False
        self.sealed = False
        self.grows_lazily = False
        self.arriving_count = 0
        self.protected: ProtectedCells | None = None
        self.start = 0
        self.length = 0
        self.block = Block(Cells.zeros(layout, 0, compressed))

    @classmethod
    def from_cells(
        cls, layout: Layout, cells: Cells, position_map: PositionMap, is_anchor: bool
    ) -> "Segment":
        """Return a frozen segment of exactly these cells, copied only if the layout differs."""
        segment = cls(layout, len(cells), position_map, is_anchor)
        block = Block(cells.to_layout(layout))
        segment.block, segment.length, segment.frozen = block, len(cells), True
        return segment

    @property
    def capacity(self) -> int:
        return self.block.capacity

    @property
    def first_place(self) -> int:
        """The place of the oldest cell."""
        return self.block.place_offset + self.start

    @property
    def wrapped(self) -> bool:
        """Whether its cells are in two runs of slots."""
        return self.start + self.length > self.capacity

    @property
    def compressed(self) -> bool:
        """Whether its cells are compressed; see `Cells`."""
        return self.block.slots.compressed

    def slot_ranges(self, first: int, count: int) -> list[slice]:
        """Return the slots of `count` cells, the first one with index `first`: one or two slices.

        Indices from `length` on are of cells yet to be written.
        """
        capacity = self.block.capacity
        begin = (self.start + first) % capacity if capacity else 0
        end = begin + count
        if end <= capacity:
            return [slice(begin, end)]
        return [slice(begin, capacity), slice(0, end - capacity)]

    def read(self, first: int, count: int) -> Cells:
        """Return a copy of `count` cells, the first one with index `first`; 0 is the oldest."""
        return Cells.concatenate([self.block.slots.part(s) for s in self.slot_ranges(first, count)])

    def view(self, first: int, count: int) -> Cells:
        """Return the same as `read`, copied only if needed; the result must not be written to."""
        ranges = self.slot_ranges(first, count)
        return self.block.slots.part(ranges[0]) if len(ranges) == 1 else self.read(first, count)

    def select_live(self, slot_values: Tensor) -> Tensor:
        """Return the values of live cells, `[..., length]` of `[..., slots]`, oldest first.

        Those of ragged cells, `[total]`, are returned as they are.
        """
        if isinstance(self.block.slots, RaggedCells):
            return slot_values
        return torch.cat([slot_values[..., s] for s in self.slot_ranges(0, self.length)], -1)

    def serials(self) -> list[int]:
        """Return the serials of the live cells' tokens, oldest first."""
        serials: list[int] = self.live_serials().tolist()
        return serials

    def live_serials(self) -> Tensor:
        """Return the same as `[n]` int64; without tokens, as of compressed cells, n is 0."""
        return self.select_live(self.block.slots.serials)

    def positions(self) -> Tensor:
        """Return the positions of the live cells, oldest first.

        `[n]`; for compressed cells `[layers, kv_heads, n]`, for ragged ones `[total]`.
        """
        return self.select_live(self.block.slots.positions)

    def reserve(self, count: int) -> None:
        """Allocate storage for `count` live cells in total, or for as many as the limit allows.

        Storage that exists grows by more than is needed, so that appending cell by cell rarely
        copies them.
        """
        first_place = self.first_place
        if first_place + count > self.limit:  # places begin again at 0: it must be a ring
            if not self._is_ring:
                self._relocate(self.limit, first_place % self.limit, place_offset=0)
        elif self.start + count > self.capacity:
            growth = max(MIN_GROWTH, self.capacity // 8) if self.capacity else 0
            growth = self.slack if self.grows_lazily else growth
            new_capacity = max(count, self.capacity - self.start + growth)
            self._relocate(min(new_capacity, self.limit - first_place), 0, place_offset=first_place)

    @property
    def _is_ring(self) -> bool:
        """Whether it has all the storage that the limit allows, so that places are slots."""
        return self.capacity == self.limit and not self.block.place_offset

    def _relocate(self, capacity: int, start: int, place_offset: int) -> None:
        """Copy the live cells to new storage, from slot `start` on. All are copied, or none."""
        cells, moved = self.view(0, self.length), shallow_copy(self)
        slots = Cells.zeros(self.layout, capacity, self.compressed)
        moved.block, moved.start = Block(slots, place_offset=place_offset), start
        moved._write(cells, 0)
        self.block, self.start = moved.block, start

    def next_slot(self) -> int:
        """Return the slot for one more cell, ready to be written.

        In a full ring, that is the slot of the oldest cell.
        """
        self.reserve(self.length + 1)
        ranges = self.slot_ranges(self.length, 1)
        self._prepare_write(ranges)
        return int(ranges[0].start)

    def prepare_slots(self, count: int) -> Cells | None:
        """Make the slots for `count` more cells ready to be written one by one.

        Until these are written, no call of `next_slot` copies any cell. Returns a copy of what the
        slots hold, in their order, if they are those of live cells, as in a full ring; or None.
        """
        self.reserve(self.length + count)
        ranges = self.slot_ranges(self.length, count)
        self._prepare_write(ranges)
        if self.length + count <= self.capacity:
            return None
        return Cells.concatenate([self.block.slots.part(slots) for slots in ranges])

    def occupy(self, slot: int, position: int, serial: int) -> None:
        """Count a cell that was written into `next_slot()` as the newest."""
        assert self.length < self.limit, _FULL
        # This runs for each token, and NumPy takes a fraction of the time that torch does.
        self.block.slots.positions.numpy()[slot] = position
        self.block.slots.serials.numpy()[slot] = serial
        self.length += 1

    def append(self, cells: Cells) -> None:
        """Add cells as the newest; the limit must leave room for them."""
        assert self.length + len(cells) <= self.limit, _FULL
        self.reserve(self.length + len(cells))
        self._prepare_write(self.slot_ranges(self.length, len(cells)))
        self._write(cells, self.length)
        self.length += len(cells)

    def _write(self, cells: Cells, first: int) -> None:
        """Write cells to the slots of the indices from `first` on."""
        begin = 0
        for slots in self.slot_ranges(first, len(cells)):
            end = begin + slots.stop - slots.start
            self.block.slots.write(slots, cells.part(slice(begin, end)))
            begin = end

    def _prepare_write(self, slot_ranges: list[slice]) -> None:
        """Copy shared storage before a write to it, and log protected cells in these slots."""
        if any(slots.start < self.block.shared_slot_count for slots in slot_ranges):
            self.block = self.block.copy()
        elif self.protected is not None and self.protected.block is self.block:
            self.protected.record(slot_ranges)

    @property
    def slack(self) -> int:
        """The most idle slots of a segment that grows lazily: few, for it is one of many."""
        return self.limit // 16

    def drop_oldest(self, count: int) -> None:
        self.length -= count
        self.start += count
        if self._is_ring:
            self.start %= self.capacity

    def drop_newest(self, count: int) -> None:
        self.length -= count

    def reopen(self, limit: int) -> bool:
        """Let the segment take new cells, up to a limit; returns False if it cannot."""
        if self.compressed or self.sealed or self.length > limit:
            return False
        if self.frozen and self.position_map != PositionMap():
            return False
        if limit != self.limit and self.wrapped:
            return False  # a ring of another size has other places
        self.frozen, self.limit = False, limit
        return True

    def unseal(self) -> None:
        """Allow a copy of a sealed segment to take new cells, in its own storage.

        Does nothing unless its cells begin at place 0, as in a freshly evaluated text: only then is
        a continuation the same to the bit.
        """
        if self.first_place == 0 and not self.compressed:
            self.sealed = False

    def part(self, first: int, count: int) -> "list[Segment]":
        """Return some of its cells as sealed segments in the same storage, one per run of slots."""
        parts = []
        for slots in self.slot_ranges(first, count) if count else []:
            part = shallow_copy(self)
            part.block, part.start = self.block.part(slots), 0
            part.length = slots.stop - slots.start
            part.limit = part.first_place + part.length
            part.frozen = part.sealed = True
            part.grows_lazily, part.protected = False, None
            parts.append(part)
        return parts

    def tail(self, first: int) -> "list[Segment]":
        """Return its cells from index `first` on, as one segment that can grow or sealed ones."""
        if not first:
            return [self]
        if self.frozen or self.wrapped or self.first_place + self.length == self.limit:
            return self.part(first, self.length - first)
        tail, begin = shallow_copy(self), self.start + first
        tail.block, tail.start, tail.length = self.block.tail(begin), 0, self.length - first
        if self.protected is not None and self.protected.block is self.block:
            tail.protected = self.protected.tail(tail.block, begin)
        return [tail]

    def compact(self) -> None:
        """Copy its cells, in one run of slots, to storage of exactly their size; places stay."""
        if isinstance(self.block.slots, RaggedCells):
            self.block = self.block.copy()
            return
        self._relocate(self.length, 0, place_offset=self.first_place)

    def successor(self, log: UndoLog) -> "Segment":
        """Return a segment of the same cells and storage, whose writes can be rolled back."""
        successor = shallow_copy(self)
        successor.protected = ProtectedCells(self.block, self.start, self.length, log)
        return successor

    def share(self) -> "Segment":
        """Return a segment of the same cells, for another session (copy-on-write)."""
        shared = shallow_copy(self)
        shared.protected = None
        # Slots after the last cell are not shared, except in a wrapped ring, which needs them all.
        slot_count = self.capacity if self.wrapped else self.start + self.length
        shared.block = self.block.share(slot_count)
        return shared

    def fork(self) -> "Segment":
        """Return a segment of the same cells for a fork.

        It is sealed if this one can still grow: the fork's new cells go to another segment.
        """
        fork = self.share()
        if self.frozen or (self.first_place == 0 and self.length < self.limit):
            fork.frozen = fork.sealed = True
        return fork

    def normalise(self) -> "Segment":
        """Arrange its storage as a ring if its places have wrapped, else in one run; returns self.

        A segment that was read from a file may have its cells in another order of slots.
        """
        if not self._is_ring:
            if self.places_wrap:
                self._relocate(self.limit, self.first_place % self.limit, place_offset=0)
            elif self.wrapped:
                self._relocate(self.length, 0, place_offset=0)
        return self

    @property
    def places_wrap(self) -> bool:
        """Whether its newest cells have begun again at place 0."""
        return not self.frozen and self.first_place + self.length > self.limit

    def to(self, device: torch.device) -> "Segment":
        """Move its storage to a device; returns self."""
        slots = self.block.slots.to(device)
        if slots is not self.block.slots:
            self.block = Block(slots, self.block.shared_slot_count, self.block.place_offset)
        self.layout = replace(self.layout, device=device)
        return self

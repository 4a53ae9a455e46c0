"""A run of cells that share one storage block and one position map."""

from dataclasses import replace

import torch
from torch import Tensor

from kvkeep.cache.block import Block, Cells, Layout
from kvkeep.cache.position_map import PositionMap
from kvkeep.cache.ragged import Ragged
from kvkeep.cache.shallow_copy import shallow_copy
from kvkeep.cache.undo_log import Guarded, Overwritten

GROWTH = 256  # cells added at least when a segment outgrows its storage


class Segment:
    """A run of cells: which slots of a block are live, in which order, and seen from where.

    start, length: the live cells are in slots `start, start + 1, ... (modulo capacity)`, oldest
        first.
    limit: the most cells it may hold; storage grows up to it.
    anchor: its cells stay. Those of other segments go, oldest first, when the window is full.
    frozen: takes no new cells; see `reopen`.
    sealed: will never take any again: others build on it.
    lazy_growth: storage is only allocated as it fills, because other segments of the window still
        hold cells.
    leaving: its newest cells that are still counted in the window, too: they leave it in the step
        that is about to run.
    guarded: of a successor, the cells that must be there again if what comes next fails.

    Each cell has a *place*, the number of its slot plus the block's origin, and keeps it. Sums are
    made over blocks of places, so that the last bit of a sum depends on places and on nothing
    else: not on how much storage there is, nor on who shares it. Storage is moved and cut freely.

    Places begin at 0, and none is beyond the limit: there a segment becomes a ring, in which a new
    cell takes the place of the oldest. With a limit of 6:

        five cells, places 0 1 2 3 4
        two go              2 3 4        (cut to three slots: origin 2)
        four come           2 3 4 5 0 1  (a ring of six slots: origin 0, start 2)
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
        self.sealed = False
        self.lazy_growth = False
        self.leaving = 0
        self.guarded: Guarded | None = None
        self.start = 0
        self.length = 0
        self.block = Block(Cells.empty(layout, 0, compressed))

    @classmethod
    def from_cells(
        cls, layout: Layout, cells: Cells, position_map: PositionMap, anchor: bool
    ) -> "Segment":
        """A frozen segment of exactly these cells, not copied where the layout keeps them so."""
        segment = cls(layout, len(cells), position_map, anchor)
        block = Block(cells.in_layout(layout))
        segment.block, segment.length, segment.frozen = block, len(cells), True
        return segment

    @property
    def capacity(self) -> int:
        return self.block.capacity

    @property
    def place(self) -> int:
        """That of the oldest cell."""
        return self.block.origin + self.start

    @property
    def wrapped(self) -> bool:
        """Whether its cells lie in two runs of slots."""
        return self.start + self.length > self.capacity

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
        return Cells.concatenate([self.block.slots.part(s) for s in self.slots(first, count)])

    def view(self, first: int, count: int) -> Cells:
        """The same, copied only where they lie in two runs: for who does not write to them."""
        slots = self.slots(first, count)
        return self.block.slots.part(slots[0]) if len(slots) == 1 else self.read(first, count)

    def serials(self) -> list[int]:
        """Which tokens the live cells are of, oldest first."""
        parts = [self.block.slots.serials[s] for s in self.slots(0, self.length)]
        return [serial for part in parts for serial in part.tolist()]

    def positions(self) -> Tensor:
        """Where the live cells are, oldest first: `[n]`; of compressed ones for each head."""
        positions = self.block.slots.positions
        if isinstance(self.block.slots, Ragged):
            return positions
        return torch.cat([positions[..., slot] for slot in self.slots(0, self.length)], -1)

    def reserve(self, count: int) -> None:
        """Makes storage for `count` live cells in all, or for as many as the limit allows.

        The first storage is as asked for; later growth is generous, so that cells which come one
        by one are rarely copied.
        """
        if self.place + count > self.limit:
            if not self._is_ring:
                self._lie_in(self.limit, self.place % self.limit, origin=0)
        elif self.start + count > self.capacity:
            growth = max(GROWTH, self.capacity // 8) if self.capacity else 0
            growth = self.slack if self.lazy_growth else growth
            grown = max(count, self.capacity - self.start + growth)
            self._lie_in(min(grown, self.limit - self.place), 0, origin=self.place)

    @property
    def _is_ring(self) -> bool:
        """Whether its storage is all that it can have, so that places are slots."""
        return self.capacity == self.limit and not self.block.origin

    def _lie_in(self, capacity: int, start: int, origin: int) -> None:
        """Moves the live cells to other storage, from slot `start` on; all of them or none."""
        cells, there = self.view(0, self.length), shallow_copy(self)
        slots = Cells.empty(self.layout, capacity, self.compressed)
        there.block, there.start = Block(slots, origin=origin), start
        there._write(cells, 0)
        self.block, self.start = there.block, start

    def next_slot(self) -> int:
        """The slot for one more cell, ready to be written: in a full ring that of the oldest."""
        self.reserve(self.length + 1)
        slots = self.slots(self.length, 1)
        self._claim(slots)
        return int(slots[0].start)

    def occupy(self, slot: int, position: int, serial: int) -> None:
        """Counts a cell written into `next_slot()` as the newest."""
        # By numpy, in a fraction of the time: this is done for each token.
        self.block.slots.positions.numpy()[slot] = position
        self.block.slots.serials.numpy()[slot] = serial
        self.length += 1

    def append(self, cells: Cells) -> None:
        """Adds cells as the newest; the limit must leave room for them."""
        self.reserve(self.length + len(cells))
        self._claim(self.slots(self.length, len(cells)))
        self._write(cells, self.length)
        self.length += len(cells)

    def _write(self, cells: Cells, first: int) -> None:
        """Writes cells behind the `first` oldest."""
        done = 0
        for slot in self.slots(first, len(cells)):
            upto = done + slot.stop - slot.start
            self.block.slots.write(slot, cells.part(slice(done, upto)))
            done = upto

    def _claim(self, slots: list[slice]) -> None:
        """Copies the storage, or what is in these slots, before others' cells are overwritten."""
        if any(slot.start < self.block.shared for slot in slots):
            self.block = self.block.copy()
        elif self.guarded is not None and self.guarded.block is self.block:
            self.guarded.keep(slots)

    @property
    def slack(self) -> int:
        """Cells of storage that may lie idle in each segment of an edited window."""
        return self.limit // 16

    def drop_oldest(self, count: int) -> None:
        self.length -= count
        self.start += count
        if self._is_ring:
            self.start %= self.capacity

    def drop_newest(self, count: int) -> None:
        self.length -= count

    def reopen(self, limit: int) -> bool:
        """Whether it can take new cells, up to a limit; made so, if nothing is built on it."""
        if self.compressed or self.sealed or self.length > limit:
            return False
        if self.frozen and self.map != PositionMap():
            return False
        if limit != self.limit and self.wrapped:
            return False  # a ring of another size has other places
        self.frozen, self.limit = False, limit
        return True

    def unseal(self) -> None:
        """Lets a twin of what others build on take new cells, in storage of its own."""
        if self.place == 0 and not self.compressed:
            self.sealed = False

    def part(self, first: int, count: int) -> "list[Segment]":
        """Some of its cells where they lie, as segments that take no more: one for each run."""
        parts = []
        for slot in self.slots(first, count) if count else []:
            part = shallow_copy(self)
            part.block, part.start = self.block.part(slot), 0
            part.length, part.limit = slot.stop - slot.start, part.place + slot.stop - slot.start
            part.frozen = part.sealed = True
            part.lazy_growth, part.guarded = False, None
            parts.append(part)
        return parts

    def rest(self, first: int) -> "list[Segment]":
        """Its cells from the `first`-oldest on; they take more where this one would."""
        if not first:
            return [self]
        if self.frozen or self.wrapped or self.place + self.length == self.limit:
            return self.part(first, self.length - first)
        rest, begin = shallow_copy(self), self.start + first
        rest.block, rest.start, rest.length = self.block.rest(begin), 0, self.length - first
        if self.guarded is not None and self.guarded.block is self.block:
            rest.guarded = self.guarded.rest(rest.block, begin)
        return [rest]

    def move(self) -> None:
        """Moves its cells, which lie in one run, to storage with room for no more; places stay."""
        if isinstance(self.block.slots, Ragged):
            self.block = self.block.copy()
            return
        self._lie_in(self.length, 0, origin=self.place)

    def successor(self, overwritten: list[Overwritten]) -> "Segment":
        """The same cells in the same storage, to be changed; see `KVCache.successor`."""
        successor = shallow_copy(self)
        successor.guarded = Guarded(self.block, self.start, self.length, overwritten)
        return successor

    def twin(self) -> "Segment":
        """The same cells for another owner. Storage is shared until one side must write to it."""
        twin = shallow_copy(self)
        twin.guarded = None
        # A run goes on behind its last cell wherever it is; a ring needs all its slots.
        twin.block = self.block.share(self.capacity if self.wrapped else self.start + self.length)
        return twin

    def branch(self) -> "Segment":
        """A twin for a fork: where the run can still grow, the fork builds on it elsewhere."""
        twin = self.twin()
        if self.frozen or (self.place == 0 and not self.full):
            twin.frozen = twin.sealed = True
        return twin

    def settled(self) -> "Segment":
        """Itself, in a ring if its places are those of one, and else in line."""
        if not self._is_ring:
            if self.places_wrap:
                self._lie_in(self.limit, self.place % self.limit, origin=0)
            elif self.wrapped:
                self._lie_in(self.length, 0, origin=0)
        return self

    @property
    def places_wrap(self) -> bool:
        """Whether its newest cells have begun anew at place 0, wherever they lie."""
        return not self.frozen and self.place + self.length > self.limit

    def to(self, device: torch.device) -> "Segment":
        """Itself, with its storage moved to a device."""
        slots = self.block.slots.to(device)
        if slots is not self.block.slots:
            self.block = Block(slots, self.block.shared, self.block.origin)
        self.layout = replace(self.layout, device=device)
        return self

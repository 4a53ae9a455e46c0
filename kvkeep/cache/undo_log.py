"""What must be there again if a change fails, kept before other cells take its slots."""

from dataclasses import dataclass

from kvkeep.cache.block import Block, Cells


@dataclass(frozen=True)
class Overwritten:
    """What was in some slots. slots: where; cells: a copy."""

    slots: Cells
    cells: Cells

    def rollback(self) -> None:
        self.slots.write(slice(None), self.cells)


@dataclass(frozen=True)
class Guarded:
    """The cells of a segment that another one takes the place of.

    start, length: where in the block they are. overwritten: what was copied before others took
    their slots.
    """

    block: Block
    start: int
    length: int
    overwritten: list[Overwritten]

    def keep(self, slots: list[slice]) -> None:
        """Copies what is in some slots, if any of it is guarded."""
        for slot in slots:
            first = (slot.start - self.start) % self.block.capacity
            if first < self.length or first + slot.stop - slot.start > self.block.capacity:
                there = self.block.slots.part(slot)
                self.overwritten.append(Overwritten(there, there.clone()))

    def rest(self, block: Block, first: int) -> "Guarded":
        """The same for a block of the slots from `first` on."""
        inside = max(0, self.start + self.length - first)
        return Guarded(block, 0, inside, self.overwritten)

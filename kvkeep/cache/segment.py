"""A run of cells: storage for keys and values, and the bookkeeping of which cells are live."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvkeep.cache.position_map import PositionMap

GROWTH = 256  # cells added at least when a segment outgrows its storage


@dataclass(frozen=True)
class Layout:
    """The shape and kind of every cell in a cache."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def cell_bytes(self) -> int:
        """Bytes of one cell's key and value over all layers and KV heads."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize


class Segment:
    """A run of cells that share one storage block and one position map.

    keys, values: `[layers, kv_heads, capacity, head_dim]`; keys are rotated to their positions.
    positions: `[capacity]` int64, the position of each cell; stale where no cell is live.
    start, length: the live cells are `start, start + 1, ... (modulo capacity)`, oldest first.
    limit: the most cells it may hold; storage grows up to it.
    rotates: at the limit, the oldest cells make room for the newest. Without, its owner adds no
        more cells than the limit.

    Until a rotating segment is full its run starts at slot 0. From then on it is a ring, in which
    order of storage means nothing.
    """

    def __init__(self, layout: Layout, position_map: PositionMap, limit: int, rotates: bool):
        self.layout = layout
        self.map = position_map
        self.limit = limit
        self.rotates = rotates
        self.start = 0
        self.length = 0
        self._allocate(0)

    def _allocate(self, capacity: int) -> None:
        layout = self.layout
        shape = (layout.layers, layout.kv_heads, capacity, layout.head_dim)
        self.keys = torch.zeros(shape, dtype=layout.dtype, device=layout.device)
        self.values = torch.zeros(shape, dtype=layout.dtype, device=layout.device)
        self.positions = torch.zeros(capacity, dtype=torch.int64, device=layout.device)

    @property
    def capacity(self) -> int:
        return self.keys.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of storage for keys and values, filled or not."""
        return self.keys.nbytes + self.values.nbytes

    @property
    def full(self) -> bool:
        return self.length == self.limit

    @property
    def first_position(self) -> int:
        """The position of the oldest live cell."""
        return int(self.positions[self.start])

    @property
    def last_position(self) -> int:
        """The position of the newest live cell."""
        return int(self.positions[(self.start + self.length - 1) % self.capacity])

    def oldest_visible(self, time: int) -> int | None:
        """The first position that a query at `time` still sees; None if it sees all."""
        return time - self.limit + 1 if self.rotates else None

    def slots(self, first: int, count: int) -> list[slice]:
        """Where the `count` cells from the `first`-oldest on lie (or would): one slice, or two."""
        begin = (self.start + first) % self.capacity if self.capacity else 0
        end = begin + count
        if end <= self.capacity:
            return [slice(begin, end)]
        return [slice(begin, self.capacity), slice(0, end - self.capacity)]

    def read(self, first: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, values and positions of `count` cells from the `first`-oldest on, copied."""
        slots = self.slots(first, count)
        keys, values = (
            torch.cat([x[:, :, s] for s in slots], 2) for x in (self.keys, self.values)
        )
        return keys, values, torch.cat([self.positions[s] for s in slots])

    def reserve(self, count: int) -> None:
        """Makes storage for `count` live cells in all, or for as many as the limit allows.

        The first storage is as asked for; later growth is generous, so that cells which come one
        by one are rarely copied.
        """
        if min(count, self.limit) <= self.capacity:
            return
        growth = max(GROWTH, self.capacity // 8) if self.capacity else 0
        grown = max(count, self.capacity + growth)
        keys, values, positions = self.read(0, self.length)
        self._allocate(min(grown, self.limit))
        self.start = 0
        self._write(0, keys, values, positions)

    def append(self, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        """Adds cells as the newest; as many of the oldest go as the limit demands.

        keys, values: `[layers, kv_heads, n, head_dim]`; positions: `[n]`; oldest first.
        """
        count = positions.shape[0]
        self.reserve(self.length + count)
        unseen = max(0, count - self.capacity)
        self.drop_oldest(min(self.length, max(0, self.length + count - self.capacity)))
        self._write(
            self.length, keys[:, :, unseen:], values[:, :, unseen:], positions[unseen:]
        )
        self.length += count - unseen

    def _write(self, first: int, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        done = 0
        for slot in self.slots(first, positions.shape[0]):
            upto = done + slot.stop - slot.start
            self.keys[:, :, slot] = keys[:, :, done:upto]
            self.values[:, :, slot] = values[:, :, done:upto]
            self.positions[slot] = positions[done:upto]
            done = upto

    def occupy(self, slot: int, position: int) -> None:
        """Counts a cell written straight into `slot`, the one after the newest, as the newest."""
        self.positions[slot] = position
        if self.full:
            self.start = (self.start + 1) % self.capacity
        else:
            self.length += 1

    def drop_oldest(self, count: int) -> None:
        self.length -= count
        self.start = (self.start + count) % self.capacity if self.length else 0

    def drop_newest(self, count: int) -> None:
        self.length -= count
        if not self.length:
            self.start = 0

"""Storage for cells, which segments of several sessions may look at together."""

from dataclasses import dataclass

import torch
from torch import Tensor


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


@dataclass(frozen=True)
class Cells:
    """Some cells, or slots for them.

    keys, values: `[layers, kv_heads, n, head_dim]`; keys are rotated to their positions.
    positions: `[n]` int64 on the CPU.
    serials: `[n]` int64 on the CPU: which tokens they are of. Each token that is evaluated has a
        number of its own.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    serials: Tensor

    @classmethod
    def empty(cls, layout: Layout, count: int) -> "Cells":
        """Slots with nothing in them but zeros."""
        shape = (layout.layers, layout.kv_heads, count, layout.head_dim)
        return cls(
            torch.zeros(shape, dtype=layout.dtype, device=layout.device),
            torch.zeros(shape, dtype=layout.dtype, device=layout.device),
            torch.zeros(count, dtype=torch.int64),
            torch.zeros(count, dtype=torch.int64),
        )

    @classmethod
    def joined(cls, parts: list["Cells"]) -> "Cells":
        """The cells of all parts, copied."""
        return cls(
            torch.cat([p.keys for p in parts], 2),
            torch.cat([p.values for p in parts], 2),
            torch.cat([p.positions for p in parts]),
            torch.cat([p.serials for p in parts]),
        )

    def __len__(self) -> int:
        return self.positions.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return self.keys.nbytes + self.values.nbytes

    def part(self, where: slice) -> "Cells":
        """Some of these cells, not copied."""
        return Cells(
            self.keys[:, :, where],
            self.values[:, :, where],
            self.positions[where],
            self.serials[where],
        )

    def write(self, where: slice, cells: "Cells") -> None:
        """Puts cells into the slots of a slice."""
        self.keys[:, :, where] = cells.keys
        self.values[:, :, where] = cells.values
        self.positions[where] = cells.positions
        self.serials[where] = cells.serials

    def to(self, device: torch.device) -> "Cells":
        """The same cells with keys and values on a device; themselves, if they are there."""
        if self.keys.device == device:
            return self
        return Cells(self.keys.to(device), self.values.to(device), self.positions, self.serials)


@dataclass
class Block:
    """Slots for cells.

    shared: slots below this one are seen by others too, and are never written here again.
    """

    slots: Cells
    shared: int = 0

    @property
    def capacity(self) -> int:
        return len(self.slots)

    def share(self, extent: int) -> "Block":
        """The first `extent` slots, for another to look at: neither side writes them again."""
        self.shared = max(self.shared, extent)
        return Block(self.slots.part(slice(0, extent)), extent)

    def copy(self) -> "Block":
        """The same slots in storage of its own."""
        return Block(Cells.joined([self.slots]))

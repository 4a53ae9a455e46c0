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


@dataclass
class Block:
    """Keys and values in slots.

    keys, values: `[layers, kv_heads, capacity, head_dim]`; keys are rotated to their positions.
    positions: `[capacity]` int64 on the CPU, the position of each cell; stale in a free slot.
    shared: slots below this one are seen by others too, and are never written here again.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    shared: int = 0

    @classmethod
    def allocate(cls, layout: Layout, capacity: int) -> "Block":
        shape = (layout.layers, layout.kv_heads, capacity, layout.head_dim)
        return cls(
            keys=torch.zeros(shape, dtype=layout.dtype, device=layout.device),
            values=torch.zeros(shape, dtype=layout.dtype, device=layout.device),
            positions=torch.zeros(capacity, dtype=torch.int64),
        )

    @property
    def capacity(self) -> int:
        return self.positions.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of storage for keys and values, filled or not."""
        return self.keys.nbytes + self.values.nbytes

    def share(self, extent: int) -> "Block":
        """The first `extent` slots, for another to look at: neither side writes them again."""
        self.shared = max(self.shared, extent)
        return Block(
            self.keys[:, :, :extent], self.values[:, :, :extent], self.positions[:extent], extent
        )

    def to(self, device: torch.device) -> "Block":
        """The same cells on a device; itself, if it is there."""
        if self.keys.device == device:
            return self
        return Block(self.keys.to(device), self.values.to(device), self.positions)

    def copy(self) -> "Block":
        """The same slots in storage of its own."""
        return Block(self.keys.clone(), self.values.clone(), self.positions.clone())

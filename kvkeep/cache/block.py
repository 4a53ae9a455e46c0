"""Storage for cells, which segments of several sessions may look at together."""

from dataclasses import dataclass

import torch
from torch import Tensor

NO_TOKEN = -1  # serial of compressed cells


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
    positions: int64 on the CPU, `[n]`; of compressed cells `[layers, kv_heads, n]`, since each KV
        head keeps other ones.
    serials: `[n]` int64 on the CPU: which tokens they are of. Each token that is evaluated has a
        number of its own; compressed cells are of no one token: `NO_TOKEN`.
    bias: of compressed cells `[layers, kv_heads, n]` float32, added to every query's logit: the
        log of how many cells one stands for, or so. None: 0 for all.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    serials: Tensor
    bias: Tensor | None = None

    @classmethod
    def empty(cls, layout: Layout, count: int, compressed: bool = False) -> "Cells":
        """Slots with nothing in them but zeros."""
        shape = (layout.layers, layout.kv_heads, count, layout.head_dim)
        return cls(
            torch.zeros(shape, dtype=layout.dtype, device=layout.device),
            torch.zeros(shape, dtype=layout.dtype, device=layout.device),
            torch.zeros(shape[:3] if compressed else (count,), dtype=torch.int64),
            torch.full((count,), NO_TOKEN) if compressed else torch.zeros(count, dtype=torch.int64),
            torch.zeros(shape[:3], device=layout.device) if compressed else None,
        )

    @classmethod
    def joined(cls, parts: list["Cells"]) -> "Cells":
        """The cells of all parts, copied; all are compressed, or none is."""
        biases = [p.bias for p in parts if p.bias is not None]
        return cls(
            torch.cat([p.keys for p in parts], 2),
            torch.cat([p.values for p in parts], 2),
            torch.cat([p.positions for p in parts], -1),
            torch.cat([p.serials for p in parts]),
            torch.cat(biases, -1) if biases else None,
        )

    def __len__(self) -> int:
        return self.serials.shape[0]

    @property
    def compressed(self) -> bool:
        """Whether each KV head has cells of its own choice, of no one token."""
        return self.bias is not None

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and what they are seen with."""
        extra = 0 if self.bias is None else self.bias.nbytes + self.positions.nbytes
        return self.keys.nbytes + self.values.nbytes + extra

    def part(self, where: slice) -> "Cells":
        """Some of these cells, not copied."""
        return Cells(
            self.keys[:, :, where],
            self.values[:, :, where],
            self.positions[..., where],
            self.serials[where],
            None if self.bias is None else self.bias[..., where],
        )

    def biases(self, where: slice) -> tuple[Tensor | None, ...]:
        """The bias of some of these cells: for each layer `[kv_heads, n]`, or None."""
        if self.bias is None:
            return (None,) * self.keys.shape[0]
        return self.bias[..., where].unbind(0)

    def write(self, where: slice, cells: "Cells") -> None:
        """Puts cells into the slots of a slice."""
        self.keys[:, :, where] = cells.keys
        self.values[:, :, where] = cells.values
        self.positions[..., where] = cells.positions
        self.serials[where] = cells.serials
        if self.bias is not None:
            self.bias[..., where] = cells.bias  # type: ignore[assignment]

    def to(self, device: torch.device) -> "Cells":
        """The same cells with all that queries read on a device; themselves, if they are there."""
        if self.keys.device == device:
            return self
        bias = None if self.bias is None else self.bias.to(device)
        keys, values = self.keys.to(device), self.values.to(device)
        return Cells(keys, values, self.positions, self.serials, bias)


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

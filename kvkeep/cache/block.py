"""Storage for cells, which segments of several sessions may look at together."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from weakref import WeakSet

import torch
from torch import Tensor

from kvkeep.cache.quantised import (
    SCALE,
    KVTensor,
    Quantised,
    concatenate_stored,
    copy_stored,
    dequantise,
    quantise,
    scale_count,
    tensors,
)
from kvkeep.cache.rope import Rope

NO_TOKEN = -1  # serial of compressed cells


@dataclass(frozen=True)
class Layout:
    """The shape and kind of cells.

    key_bits, value_bits: 8 or 4 where they are quantised; 16 where they are plain, in `dtype`.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    key_bits: int = 16
    value_bits: int = 16

    @property
    def plain(self) -> "Layout":
        """The same of cells as they are evaluated."""
        return replace(self, key_bits=16, value_bits=16)

    @property
    def quantised(self) -> bool:
        return min(self.key_bits, self.value_bits) < 16

    @property
    def cell_bytes(self) -> int:
        """Bytes of one cell's key and value over all layers and KV heads."""
        both = self._vector_bytes(self.key_bits) + self._vector_bytes(self.value_bits)
        return both * self.layers * self.kv_heads

    def _vector_bytes(self, bits: int) -> int:
        if bits == 16:
            return self.head_dim * self.dtype.itemsize
        return self.head_dim * bits // 8 + scale_count(self.head_dim, bits) * SCALE.itemsize

    def slots(self, count: int, bits: int) -> KVTensor:
        """Zeros for `count` keys or values, `[layers, kv_heads, count, head_dim]`."""
        shape = (self.layers, self.kv_heads, count, self.head_dim)
        if bits == 16:
            return torch.zeros(shape, dtype=self.dtype, device=self.device)
        return Quantised.empty(shape, bits, self.device)


@dataclass(frozen=True)
class Cells:
    """Some cells, or slots for them.

    stored_keys, stored_values: `[layers, kv_heads, n, head_dim]`, plain or quantised; keys are
        rotated to their positions.
    positions: int64 on the CPU, `[n]`; of compressed cells `[layers, kv_heads, n]`, since each KV
        head keeps other ones.
    serials: `[n]` int64 on the CPU: which tokens they are of. Each token that is evaluated has a
        number of its own; compressed cells are of no one token: `NO_TOKEN`.
    bias: of compressed cells `[layers, kv_heads, n]` float32, added to every query's logit: the
        log of how many cells one stands for, or so. None: 0 for all.
    """

    stored_keys: KVTensor
    stored_values: KVTensor
    positions: Tensor
    serials: Tensor
    bias: Tensor | None = None

    @classmethod
    def empty(cls, layout: Layout, count: int, compressed: bool = False) -> "Cells":
        """Slots with nothing in them but zeros."""
        shape = (layout.layers, layout.kv_heads, count)
        return cls(
            layout.slots(count, layout.key_bits),
            layout.slots(count, layout.value_bits),
            torch.zeros(shape if compressed else (count,), dtype=torch.int64, device="cpu"),
            torch.full((count,), NO_TOKEN if compressed else 0, dtype=torch.int64, device="cpu"),
            torch.zeros(shape, dtype=torch.float32, device=layout.device) if compressed else None,
        )

    @classmethod
    def concatenate(cls, parts: Sequence["Cells"]) -> "Cells":
        """The cells of all parts, copied; all are compressed, or none is, and all kept alike."""
        return next((type(part) for part in parts if type(part) is not Cells), Cells)._concatenate(
            parts
        )

    @classmethod
    def _concatenate(cls, parts: Sequence["Cells"]) -> "Cells":
        biases = [p.bias for p in parts if p.bias is not None]
        return cls(
            concatenate_stored([p.stored_keys for p in parts], 2),
            concatenate_stored([p.stored_values for p in parts], 2),
            torch.cat([p.positions for p in parts], -1),
            torch.cat([p.serials for p in parts]),
            torch.cat(biases, -1) if biases else None,
        )

    def __len__(self) -> int:
        return self.serials.shape[0]

    @property
    def keys(self) -> Tensor:
        """Of plain cells."""
        assert isinstance(self.stored_keys, Tensor), "quantised cells are to be restored first"
        return self.stored_keys

    @property
    def values(self) -> Tensor:
        """Of plain cells."""
        assert isinstance(self.stored_values, Tensor), "quantised cells are to be restored first"
        return self.stored_values

    @property
    def quantised(self) -> bool:
        """Whether keys or values are kept in fewer bits than they were evaluated in."""
        return isinstance(self.stored_keys, Quantised) or isinstance(self.stored_values, Quantised)

    def dequantised(self, dtype: torch.dtype) -> "Cells":
        """Plain cells; themselves, if they are that."""
        if not self.quantised:
            return self
        keys, values = dequantise(self.stored_keys, dtype), dequantise(self.stored_values, dtype)
        return replace(self, stored_keys=keys, stored_values=values)

    def shifted(self, rope: Rope, by: Tensor) -> "Cells":
        """The same cells, rotated on by a number of positions each and kept as they are.

        by: of the shape of `positions`, or `[1]`.
        """
        keys, turns = self.stored_keys, self.key_shifts(rope, by)
        if isinstance(keys, Quantised):
            exact = rope.shifted(dequantise(keys, torch.float32), turns)
            keys = quantise(exact, keys.bits)
        else:
            keys = rope.shifted(keys, turns)
        return replace(self, stored_keys=keys, positions=self.positions + by)

    def key_shifts(self, rope: Rope, by: Tensor) -> Tensor:
        """By how many positions keys are rotated that move by so many: 0 where layers have no RoPE.

        by: as of `moved`. Returns what broadcasts to `[layers, kv_heads, n]`; of ragged cells to
        `[total]`.
        """
        if not rope.unrotated:
            return by
        turns = by.expand(*self.stored_keys.shape[:2], -1).clone()
        turns[list(rope.unrotated)] = 0
        return turns

    def in_layout(self, layout: Layout) -> "Cells":
        """The same cells as a layout keeps them; themselves, if they are kept so."""
        kept = Cells.empty(layout, 0)
        if _bits(kept) == _bits(self):
            return self
        kept = Cells.empty(layout, len(self), self.compressed)
        kept.write(slice(None), self)
        return kept

    @property
    def compressed(self) -> bool:
        """Whether each KV head has cells of its own choice, of no one token."""
        return self.bias is not None

    def tensors(self) -> tuple[Tensor, ...]:
        """Keys, values, and of compressed cells what they are seen with."""
        own = () if self.bias is None else (self.bias, self.positions)
        return (*tensors(self.stored_keys), *tensors(self.stored_values), *own)

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and what they are seen with."""
        return sum(tensor.nbytes for tensor in self.tensors())

    def clone(self) -> "Cells":
        """The same cells, copied."""
        return Cells(
            self.stored_keys.clone(),
            self.stored_values.clone(),
            self.positions.clone(),
            self.serials.clone(),
            None if self.bias is None else self.bias.clone(),
        )

    def part(self, where: slice) -> "Cells":
        """Some of these cells, not copied."""
        return Cells(
            self.stored_keys[:, :, where],
            self.stored_values[:, :, where],
            self.positions[..., where],
            self.serials[where],
            None if self.bias is None else self.bias[..., where],
        )

    def biases(self, where: slice) -> tuple[Tensor | None, ...]:
        """The bias of some of these cells: for each layer `[kv_heads, n]`, or None."""
        if self.bias is None:
            return (None,) * self.stored_keys.shape[0]
        return self.bias[..., where].unbind(0)

    def write(self, where: slice, cells: "Cells") -> None:
        """Puts cells into the slots of a slice, and keeps them as these slots do."""
        copy_stored(self.stored_keys[:, :, where], cells.stored_keys)
        copy_stored(self.stored_values[:, :, where], cells.stored_values)
        self.positions[..., where] = cells.positions
        self.serials[where] = cells.serials
        if self.bias is not None:
            self.bias[..., where] = cells.bias  # type: ignore[assignment]

    def to(self, device: torch.device) -> "Cells":
        """The same cells with all that queries read on a device; themselves, if they are there."""
        if self.stored_keys.device == device:
            return self
        bias = None if self.bias is None else self.bias.to(device)
        keys, values = self.stored_keys.to(device), self.stored_values.to(device)
        return replace(self, stored_keys=keys, stored_values=values, bias=bias)


class Storage:
    """The memory of some slots, which several blocks may look at.

    cells: how many fit. nbytes: of all of it. blocks: those that look at it, whoever's they are.
    """

    def __init__(self, slots: Cells):
        self.cells = len(slots)
        self.nbytes = slots.nbytes
        self.blocks: WeakSet[Block] = WeakSet()


class Block:
    """Slots for cells.

    shared: slots below this one are seen by others too, and are never written here again.
    origin: the place of slot 0; see `Segment`. storage: what the slots are in, all of it or a part.
    """

    def __init__(
        self, slots: Cells, shared: int = 0, origin: int = 0, storage: Storage | None = None
    ):
        self.slots = slots
        self.shared = shared
        self.origin = origin
        self.storage = storage or Storage(slots)
        self.storage.blocks.add(self)

    @property
    def capacity(self) -> int:
        return len(self.slots)

    def part(self, where: slice) -> "Block":
        """Some of the slots where they are, to be looked at alone."""
        extent = where.stop - where.start
        return Block(self.slots.part(where), extent, self.origin + where.start, self.storage)

    def rest(self, first: int) -> "Block":
        """The slots from one on, as places from 0; those not shared can be written."""
        shared = max(0, self.shared - first)
        return Block(self.slots.part(slice(first, self.capacity)), shared, 0, self.storage)

    def share(self, extent: int) -> "Block":
        """The first `extent` slots, for another to look at: neither side writes them again."""
        self.shared = max(self.shared, extent)
        return self.part(slice(0, extent))

    def copy(self) -> "Block":
        """The same slots in storage of its own."""
        return Block(self.slots.clone(), origin=self.origin)


def _bits(cells: Cells) -> tuple[int, int]:
    keys, values = cells.stored_keys, cells.stored_values
    return (
        keys.bits if isinstance(keys, Quantised) else 16,
        values.bits if isinstance(values, Quantised) else 16,
    )

"""Cells, the blocks of storage that segments of several sessions share, and an undo log."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from kvkeep.cache.layout import Layout
from kvkeep.cache.quantised import (
    KVTensor,
    QuantisedTensor,
    copy_stored,
    dequantise,
    map_stored,
    quantise,
    requantise,
    stored_tensors,
)
from kvkeep.cache.rope import Rope

NO_TOKEN = -1  # serial of compressed cells
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


@dataclass(frozen=True)
class Cells:
    """A number of cells, or of slots to write cells to.

    stored_keys, stored_values: `[layers, kv_heads, n, head_dim]`, plain or quantised; keys are
        rotated to their positions.
    positions: int64 on the CPU, `[n]`; for compressed cells `[layers, kv_heads, n]`, because each
        KV head keeps different ones.
    serials: `[n]` int64 on the CPU, the serial number of each cell's token. Every evaluated token
        has a serial of its own; compressed cells belong to no single token and have `NO_TOKEN`.
    bias: for compressed cells `[layers, kv_heads, n]` float32, added to every query's logit:
        roughly the log of how many cells one stands for. None: 0 for all.
    """

    stored_keys: KVTensor
    stored_values: KVTensor
    positions: Tensor
    serials: Tensor
    bias: Tensor | None = None

    @classmethod
    def zeros(cls, layout: Layout, count: int, compressed: bool = False) -> "Cells":
        shape = (layout.layers, layout.kv_heads, count)
        return cls(
            layout.zeros(count, layout.key_bits),
            layout.zeros(count, layout.value_bits),
            torch.zeros(shape if compressed else (count,), dtype=torch.int64, device="cpu"),
            torch.full((count,), NO_TOKEN if compressed else 0, dtype=torch.int64, device="cpu"),
            torch.zeros(shape, dtype=torch.float32, device=layout.device) if compressed else None,
        )

    @classmethod
    def concatenate(cls, parts: Sequence["Cells"]) -> "Cells":
        """Return the cells of all parts, copied.

        All parts are compressed or none is, and all have the same layout. Ragged cells among them
        make the result ragged.
        """
        result_class = next((type(part) for part in parts if type(part) is not Cells), Cells)
        return result_class._concatenate(parts)  # of ragged cells, if there are any

    @classmethod
    def _concatenate(cls, parts: Sequence["Cells"]) -> "Cells":
        biases = [p.bias for p in parts if p.bias is not None]
        return cls(
            map_stored(lambda *x: torch.cat(x, 2), *(p.stored_keys for p in parts)),
            map_stored(lambda *x: torch.cat(x, 2), *(p.stored_values for p in parts)),
            torch.cat([p.positions for p in parts], -1),
            torch.cat([p.serials for p in parts]),
            torch.cat(biases, -1) if biases else None,
        )

    def __len__(self) -> int:
        return self.serials.shape[0]

    @property
    def keys(self) -> Tensor:
        assert isinstance(self.stored_keys, Tensor), "quantised cells must be dequantised first"
        return self.stored_keys

    @property
    def values(self) -> Tensor:
        assert isinstance(self.stored_values, Tensor), "quantised cells must be dequantised first"
        return self.stored_values

    @property
    def quantised(self) -> bool:
        """Whether keys or values are stored in fewer bits than they were evaluated in."""
        return any(isinstance(x, QuantisedTensor) for x in (self.stored_keys, self.stored_values))

    def dequantise(self, dtype: torch.dtype) -> "Cells":
        """Return plain cells; themselves if they are plain."""
        if not self.quantised:
            return self
        keys, values = dequantise(self.stored_keys, dtype), dequantise(self.stored_values, dtype)
        return replace(self, stored_keys=keys, stored_values=values)

    def shift(self, rope: Rope, shifts: Tensor) -> "Cells":
        """Return the cells moved by a number of positions each, keys rotated, stored as before.

        shifts: of the shape of `positions`, or `[1]`.
        """
        keys, key_shifts = self.stored_keys, self.key_shifts(rope, shifts)
        if isinstance(keys, QuantisedTensor):
            keys = quantise(rope.shift(dequantise(keys, torch.float32), key_shifts), keys.bits)
        else:
            keys = rope.shift(keys, key_shifts)
        return replace(self, stored_keys=keys, positions=self.positions + shifts)

    def key_shifts(self, rope: Rope, shifts: Tensor) -> Tensor:
        """Return by how many positions to rotate each key: `shifts`, or 0 in layers without RoPE.

        shifts: as in `shift`. The result broadcasts to `[layers, kv_heads, n]`; for ragged cells
        to `[total]`.
        """
        if not rope.unrotated_layers:
            return shifts
        key_shifts = shifts.expand(*self.stored_keys.shape[:2], -1).clone()
        key_shifts[list(rope.unrotated_layers)] = 0
        return key_shifts

    def to_layout(self, layout: Layout) -> "Cells":
        """Return the cells quantised as a layout says; themselves if they are already."""
        keys = requantise(self.stored_keys, layout.key_bits, layout.dtype)
        values = requantise(self.stored_values, layout.value_bits, layout.dtype)
        if keys is self.stored_keys and values is self.stored_values:
            return self
        return replace(self, stored_keys=keys, stored_values=values)

    @property
    def compressed(self) -> bool:
        """Whether each KV head has selected cells of its own, which belong to no single token."""
        return self.bias is not None

    def to_compressed_format(self) -> "Cells":
        """Return cells with positions and a bias of each KV head; the bias of plain cells is 0."""
        if self.bias is not None:
            return self
        shape, device = self.stored_keys.shape[:3], self.stored_keys.device
        bias = torch.zeros(shape, dtype=torch.float32, device=device)
        serials = torch.full_like(self.serials, NO_TOKEN)
        return replace(self, positions=self.positions.expand(shape), serials=serials, bias=bias)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return keys and values, and the biases and positions of compressed cells."""
        compressed = () if self.bias is None else (self.bias, self.positions)
        return (*stored_tensors(self.stored_keys), *stored_tensors(self.stored_values), *compressed)

    def same_bits(self, other: "Cells") -> bool:
        """Whether others, of the same layout and as many, are the same to the bit."""
        pairs = zip(
            (self.positions, self.serials, *self.tensors()),
            (other.positions, other.serials, *other.tensors()),
            strict=True,
        )
        return all(
            a.data_ptr() == b.data_ptr() or torch.equal(_as_integers(a), _as_integers(b))
            for a, b in pairs
        )

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, and of compressed cells' biases and positions."""
        return sum(tensor.nbytes for tensor in self.tensors())

    def clone(self) -> "Cells":
        keys, values = self.stored_keys.clone(), self.stored_values.clone()
        bias = None if self.bias is None else self.bias.clone()
        return Cells(keys, values, self.positions.clone(), self.serials.clone(), bias)

    def part(self, slot_range: slice) -> "Cells":
        """Return a slice of the cells or slots, not copied."""
        keys, values = self.stored_keys[:, :, slot_range], self.stored_values[:, :, slot_range]
        bias = None if self.bias is None else self.bias[..., slot_range]
        return Cells(keys, values, self.positions[..., slot_range], self.serials[slot_range], bias)

    def layer_biases(self, slot_range: slice) -> tuple[Tensor | None, ...]:
        """Return the bias of a slice of the cells for each layer: `[kv_heads, n]`, or None."""
        if self.bias is None:
            return (None,) * self.stored_keys.shape[0]
        return self.bias[..., slot_range].unbind(0)

    def write(self, slot_range: slice, cells: "Cells") -> None:
        """Copy cells into a slice of these slots, quantised as the slots are."""
        copy_stored(self.stored_keys[:, :, slot_range], cells.stored_keys)
        copy_stored(self.stored_values[:, :, slot_range], cells.stored_values)
        self.positions[..., slot_range] = cells.positions
        self.serials[slot_range] = cells.serials
        if self.bias is not None:
            self.bias[..., slot_range] = cells.bias  # type: ignore[assignment]

    def to(self, device: torch.device) -> "Cells":
        """Move keys, values and biases to a device; positions and serials stay on the CPU."""
        if self.stored_keys.device == device:
            return self
        bias = None if self.bias is None else self.bias.to(device)
        keys, values = self.stored_keys.to(device), self.stored_values.to(device)
        return replace(self, stored_keys=keys, stored_values=values, bias=bias)


def _as_integers(tensor: Tensor) -> Tensor:
    """Return the bits of numbers as integers: as floats, 0 equals -0, and NaN nothing."""
    return tensor.view(_INTEGERS[tensor.dtype.itemsize])


class Storage:
    """The memory of `capacity` slots, and all blocks that use it, in any session."""

    def __init__(self, slots: Cells):
        self.capacity = len(slots)
        self.nbytes = slots.nbytes
        self.blocks: WeakSet[Block] = WeakSet()


class Block:
    """A run of slots for cells: all of a storage, or a part of one.

    shared_slot_count: how many of the first slots other blocks use as well; this block never writes
        to them again (copy-on-write).
    place_offset: the place of slot 0, which is added to a slot's number; see `Segment`.
    last_view: a `View` of these slots without a bias, or None; see `View.of_segment`.
    """

    def __init__(
        self,
        slots: Cells,
        shared_slot_count: int = 0,
        place_offset: int = 0,
        storage: Storage | None = None,
    ):
        self.slots = slots
        self.shared_slot_count = shared_slot_count
        self.place_offset = place_offset
        self.last_view: Any = None
        self.storage = storage or Storage(slots)
        self.storage.blocks.add(self)

    @property
    def capacity(self) -> int:
        return len(self.slots)

    def part(self, slot_range: slice) -> "Block":
        """Return a read-only block of some of the slots, in the same storage and places."""
        slots = self.slots.part(slot_range)
        return Block(slots, len(slots), self.place_offset + slot_range.start, self.storage)

    def tail(self, first: int) -> "Block":
        """Return a block of the slots from `first` on, whose places are renumbered from 0.

        Shared slots stay read-only, the others can be written to.
        """
        shared_count = max(0, self.shared_slot_count - first)
        return Block(self.slots.part(slice(first, self.capacity)), shared_count, 0, self.storage)

    def share(self, count: int) -> "Block":
        """Return a block of the first `count` slots, to which neither block writes from now on."""
        self.shared_slot_count = max(self.shared_slot_count, count)
        return self.part(slice(0, count))

    def copy(self) -> "Block":
        """Return the same slots in a storage of their own."""
        return Block(self.slots.clone(), place_offset=self.place_offset)


class UndoLog:
    """Copies of overwritten cells, by which a change to a cache can be rolled back."""

    def __init__(self) -> None:
        self._entries: list[tuple[Cells, Cells]] = []  # slots, and a copy of what they held

    def record(self, slots: Cells) -> None:
        """Copy the cells in these slots, which are about to be overwritten."""
        self._entries.append((slots, slots.clone()))

    def rollback(self) -> None:
        """Restore all recorded cells. Can be repeated."""
        for slots, cells in reversed(self._entries):
            slots.write(slice(None), cells)

    def clear(self) -> None:
        self._entries.clear()


@dataclass(frozen=True)
class ProtectedCells:
    """The cells of a segment that a rollback must restore.

    start, length: they are in slots `start, start + 1, ... (modulo capacity)` of the block.
    """

    block: Block
    start: int
    length: int
    undo_log: UndoLog

    def record(self, slot_ranges: list[slice]) -> None:
        """Record each of these ranges of slots that has a protected cell, before it is written."""
        for slots in slot_ranges:
            index = (slots.start - self.start) % self.block.capacity  # in order of age
            wraps = index + slots.stop - slots.start > self.block.capacity  # to the oldest cell
            if index < self.length or wraps:
                self.undo_log.record(self.block.slots.part(slots))

    def tail(self, block: Block, first: int) -> "ProtectedCells":
        """Return the protected cells from slot `first` on, as cells of `block`, its tail."""
        length = max(0, self.start + self.length - first)
        return ProtectedCells(block, 0, length, self.undo_log)

"""A segment as tensors and a table entry in a snapshot, and back."""

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from kvkeep.cache import Block, Cells, Layout, PositionMap, Segment
from kvkeep.cache.quantised import SCALE, Quantised, Stored, scales

_PLACES = ("positions", "serials")
_COMPRESSED = (*_PLACES, "bias")


def segment_tensors(index: int, segment: Segment) -> dict[str, Tensor]:
    """The live cells, oldest first; those of a full ring as they lie."""
    slots = segment.slots(0, segment.length)
    if _in_slot_order(segment):
        cells = segment.block.slots
    elif len(slots) == 1:
        cells = segment.block.slots.part(slots[0])
    else:
        cells = segment.read(0, segment.length)
    names = _COMPRESSED if segment.compressed else _PLACES
    tensors = _named(f"segment.{index}.keys", cells.stored_keys)
    tensors |= _named(f"segment.{index}.values", cells.stored_values)
    return tensors | {f"segment.{index}.{name}": getattr(cells, name) for name in names}


def segment_entry(segment: Segment) -> dict[str, Any]:
    """All of a segment that is not in its tensors. Of the storage only what decides places."""
    return {
        "map": asdict(segment.map),
        "limit": segment.limit,
        "anchor": segment.anchor,
        "frozen": segment.frozen,
        "sealed": segment.sealed,
        "start": segment.place,
        "length": segment.length,
        "capacity": segment.capacity if segment.wrapped else segment.place + segment.length,
        "slot_order": _in_slot_order(segment),
        "compressed": segment.compressed,
    }


def read_segment(
    index: int, layouts: tuple[Layout, Layout], entry: dict[str, Any], tensors: dict[str, Tensor]
) -> Segment:
    """The segment of that tensors and an entry were made, without a copy where that can be.

    layouts: of the cells of windows, and of anchors.

    Raises KeyError, TypeError or ValueError where they are not of one segment.
    """
    compressed = entry.get("compressed", False)
    layout = layouts[1 if entry["anchor"] else 0]
    names = _COMPRESSED if compressed else _PLACES
    cells = Cells(
        _stored(f"segment.{index}.keys", layout.key_bits, tensors),
        _stored(f"segment.{index}.values", layout.value_bits, tensors),
        *(tensors[f"segment.{index}.{name}"] for name in names),
    )
    _check_entry(entry)
    _check_cells(cells, layout, entry["capacity"] if entry["slot_order"] else entry["length"])
    segment = Segment(
        layout, entry["limit"], PositionMap(**entry["map"]), entry["anchor"], compressed
    )
    segment.frozen, segment.sealed = entry["frozen"], entry.get("sealed", False)
    segment.length = entry["length"]
    segment.block, segment.start = _storage(cells, layout, entry)
    return segment


def _storage(cells: Cells, layout: Layout, entry: dict[str, Any]) -> tuple[Block, int]:
    """A block with the cells in their places, and the slot of the oldest."""
    start, capacity = entry["start"], entry["capacity"]
    if start + len(cells) <= capacity or (entry["slot_order"] and not start):
        return Block(cells, origin=start), 0
    if entry["slot_order"]:
        return Block(cells), start
    first = capacity - start  # cells before the storage's end; the others begin anew at slot 0
    block = Block(Cells.empty(layout, capacity, cells.compressed))
    block.slots.write(slice(start, capacity), cells.part(slice(0, first)))
    block.slots.write(slice(0, len(cells) - first), cells.part(slice(first, None)))
    return block, start


def require(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(what)


def require_tensor(name: str, tensor: Tensor, dtype: torch.dtype, *shape: int | None) -> None:
    """None in a shape stands for any length."""
    fits = len(shape) == tensor.ndim and all(
        wanted in (None, found) for wanted, found in zip(shape, tensor.shape, strict=True)
    )
    require(fits and tensor.dtype == dtype, f"{name} has another shape or dtype")


def _named(name: str, stored: Stored) -> dict[str, Tensor]:
    if isinstance(stored, Tensor):
        return {name: stored}
    return {f"{name}.int{stored.bits}": stored.data, f"{name}.scale": stored.scale}


def _stored(name: str, bits: int, tensors: dict[str, Tensor]) -> Stored:
    if bits == 16:
        return tensors[name]
    return Quantised(tensors[f"{name}.int{bits}"], tensors[f"{name}.scale"])


def _in_slot_order(segment: Segment) -> bool:
    """A full ring is saved as it lies: in another order, sums would be rounded otherwise."""
    return segment.length == segment.capacity and (segment.wrapped or not segment.place)


def _check_entry(entry: dict[str, Any]) -> None:
    start, length, capacity = entry["start"], entry["length"], entry["capacity"]
    numbers = (start, length, capacity, entry["limit"], *entry["map"].values())
    require(all(type(number) is int for number in numbers), "a segment without whole numbers")
    require(0 <= start < capacity, "a segment that starts outside its storage")
    require(0 < length <= min(capacity, entry["limit"]), "a segment longer than its storage")
    require(length == capacity or not entry["slot_order"], "a ring that is not full")


def _check_cells(cells: Cells, layout: Layout, count: int) -> None:
    _check_stored("keys", cells.stored_keys, layout, layout.key_bits, count)
    _check_stored("values", cells.stored_values, layout, layout.value_bits, count)
    require_tensor("serials", cells.serials, torch.int64, count)
    if cells.bias is None:
        require_tensor("positions", cells.positions, torch.int64, count)
    else:
        heads = (layout.layers, layout.kv_heads)
        require_tensor("positions", cells.positions, torch.int64, *heads, count)
        require_tensor("bias", cells.bias, torch.float32, *heads, count)


def _check_stored(name: str, stored: Stored, layout: Layout, bits: int, count: int) -> None:
    shape, width = (layout.layers, layout.kv_heads, count), layout.head_dim
    if isinstance(stored, Tensor):
        require_tensor(name, stored, layout.dtype, *shape, width)
        return
    kind = torch.int8 if bits == 8 else torch.uint8
    require_tensor(f"{name}.int{bits}", stored.data, kind, *shape, width * bits // 8)
    require_tensor(f"{name}.scale", stored.scale, SCALE, *shape, scales(width, bits))

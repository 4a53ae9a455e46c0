"""Conversion of segments to tensors and a document entry of a snapshot, and back."""

from dataclasses import asdict
from typing import Any

from torch import Tensor

from kvkeep.cache import Block, Cells, Layout, PositionMap, Ragged, Segment
from kvkeep.cache.quantised import KVTensor, Quantised
from kvkeep.cache.state import check_cells


def _tensor_names(compressed: bool, ragged: bool, worth: bool) -> list[str]:
    """Return the names of a segment's tensors besides keys and values."""
    names = {"positions": True, "serials": True, "bias": compressed, "counts": ragged}
    return [name for name, is_stored in {**names, "worth": worth}.items() if is_stored]


def segment_tensors(index: int, segment: Segment) -> dict[str, Tensor]:
    """Return the live cells as tensors, oldest first; those of a full ring in slot order."""
    in_slot_order = _in_slot_order(segment)
    cells = segment.block.slots if in_slot_order else segment.view(0, segment.length)
    tensors = _named(f"segment.{index}.keys", cells.stored_keys)
    tensors |= _named(f"segment.{index}.values", cells.stored_values)
    # In files, `Ragged.scores` is called "worth", its name when the format was made.
    return tensors | {
        f"segment.{index}.{name}": getattr(cells, "scores" if name == "worth" else name)
        for name in _tensor_names(segment.compressed, is_ragged(segment), knows_worth(segment))
    }


def is_ragged(segment: Segment) -> bool:
    """Whether the number of cells differs between layers and KV heads."""
    return isinstance(segment.block.slots, Ragged)


def knows_worth(segment: Segment) -> bool:
    """Whether the segment records the worth of each cell."""
    slots = segment.block.slots
    return isinstance(slots, Ragged) and slots.scores is not None


def segment_entry(segment: Segment, local: bool = False) -> dict[str, Any]:
    """Return what defines a segment and its slots besides its tensors, as JSON values.

    local: whether the segment is of local layers.
    """
    wraps = segment.wrapped or segment.places_wrap
    optional = {"ragged": is_ragged(segment), "worth": knows_worth(segment), "local": local}
    return {
        "map": asdict(segment.map),
        "limit": segment.limit,
        "anchor": segment.anchor,
        "frozen": segment.frozen,
        "sealed": segment.sealed,
        "start": segment.place,
        "length": segment.length,
        "capacity": segment.limit if wraps else segment.place + segment.length,
        "slot_order": _in_slot_order(segment),
        "compressed": segment.compressed,
        **{name: True for name, is_set in optional.items() if is_set},
    }


def read_segment(
    index: int, layout: Layout, entry: dict[str, Any], tensors: dict[str, Tensor]
) -> Segment:
    """Return the segment that an entry and tensors describe. Its tensors are not copied.

    entry: checked by `check_document`. A ring that is not full is stored linearly until a cache
    takes the segment. Raises KeyError, TypeError or ValueError if entry and tensors do not match.
    """
    compressed, ragged = entry.get("compressed", False), entry.get("ragged", False)
    names = _tensor_names(compressed, ragged, entry.get("worth", False))
    cells = (Ragged if ragged else Cells)(
        _stored(f"segment.{index}.keys", layout.key_bits, tensors),
        _stored(f"segment.{index}.values", layout.value_bits, tensors),
        *(tensors[f"segment.{index}.{name}"] for name in names),
    )
    check_cells(cells, layout, entry["length"])
    segment = Segment(
        layout, entry["limit"], PositionMap(**entry["map"]), entry["anchor"], compressed
    )
    segment.frozen, segment.sealed = entry["frozen"], entry.get("sealed", False)
    segment.length = entry["length"]
    if entry["slot_order"]:
        segment.block, segment.start = Block(cells), entry["start"]
    else:
        segment.block = Block(cells, origin=entry["start"])
    return segment


def _named(name: str, stored: KVTensor) -> dict[str, Tensor]:
    if isinstance(stored, Tensor):
        return {name: stored}
    return {f"{name}.int{stored.bits}": stored.data, f"{name}.scale": stored.scale}


def _stored(name: str, bits: int, tensors: dict[str, Tensor]) -> KVTensor:
    if bits == 16:
        return tensors[name]
    return Quantised(tensors[f"{name}.int{bits}"], tensors[f"{name}.scale"])


def _in_slot_order(segment: Segment) -> bool:
    """Whether to save cells in slot order, as for a full ring: another order changes rounding."""
    return segment.length == segment.capacity and (segment.wrapped or not segment.place)

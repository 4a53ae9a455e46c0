"""A segment as tensors and a table entry in a snapshot, and back."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from torch import Tensor

from kvkeep.cache import Block, Cells, Layout, PositionMap, Ragged, Segment
from kvkeep.cache.quantised import KVTensor, Quantised
from kvkeep.cache.state import check_cells

_PLACES = ("positions", "serials")
_COMPRESSED = (*_PLACES, "bias")
_RAGGED = (*_COMPRESSED, "counts")


def segment_tensors(index: int, segment: Segment) -> dict[str, Tensor]:
    """The live cells, oldest first; those of a full ring as they lie."""
    slots = segment.slots(0, segment.length)
    if _in_slot_order(segment):
        cells = segment.block.slots
    elif len(slots) == 1:
        cells = segment.block.slots.part(slots[0])
    else:
        cells = segment.read(0, segment.length)
    tensors = _named(f"segment.{index}.keys", cells.stored_keys)
    tensors |= _named(f"segment.{index}.values", cells.stored_values)
    # In files, `Ragged.scores` is called "worth", its name when the format was made.
    return tensors | {
        f"segment.{index}.{name}": getattr(cells, "scores" if name == "worth" else name)
        for name in _names(segment)
    }


def is_ragged(segment: Segment) -> bool:
    """Whether its layers and KV heads have numbers of cells of their own."""
    return isinstance(segment.block.slots, Ragged)


def knows_worth(segment: Segment) -> bool:
    """Whether it says what each cell is worth."""
    slots = segment.block.slots
    return isinstance(slots, Ragged) and slots.scores is not None


def _names(segment: Segment) -> tuple[str, ...]:
    if is_ragged(segment):
        return (*_RAGGED, "worth") if knows_worth(segment) else _RAGGED
    return _COMPRESSED if segment.compressed else _PLACES


def segment_entry(segment: Segment, local: bool = False) -> dict[str, Any]:
    """All of a segment that is not in its tensors. Of the storage only what decides places.

    local: whether it is of local layers.
    """
    begun_anew = segment.wrapped or segment.places_wrap
    return {
        "map": asdict(segment.map),
        "limit": segment.limit,
        "anchor": segment.anchor,
        "frozen": segment.frozen,
        "sealed": segment.sealed,
        "start": segment.place,
        "length": segment.length,
        "capacity": segment.limit if begun_anew else segment.place + segment.length,
        "slot_order": _in_slot_order(segment),
        "compressed": segment.compressed,
        **({"ragged": True} if is_ragged(segment) else {}),
        **({"worth": True} if knows_worth(segment) else {}),
        **({"local": True} if local else {}),
    }


def read_segment(
    index: int, layouts: Sequence[Layout], entry: dict[str, Any], tensors: dict[str, Tensor]
) -> Segment:
    """The segment that tensors and an entry were made of, not copied.

    layouts: of the cells of windows, of anchors, and of local layers. entry: checked; see
    `check_document`.

    Where its places are those of a ring that is not full, it lies in line until a cache takes it.
    Raises KeyError, TypeError or ValueError where they are not of one segment.
    """
    compressed, ragged = entry.get("compressed", False), entry.get("ragged", False)
    layout = layouts[2 if entry.get("local", False) else 1 if entry["anchor"] else 0]
    names = _RAGGED if ragged else _COMPRESSED if compressed else _PLACES
    if entry.get("worth", False):
        names = (*names, "worth")
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
    """A full ring is saved as it lies: in another order, sums would be rounded otherwise."""
    return segment.length == segment.capacity and (segment.wrapped or not segment.place)

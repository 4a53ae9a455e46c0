"""Conversion of cache segments to tensors and a JSON entry of a snapshot file, and back."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from torch import Tensor

from kvkeep.cache import Block, Cells, Layout, PositionMap, RaggedCells, Segment
from kvkeep.cache.quantised import KVTensor, QuantisedTensor
from kvkeep.cache.state import check_cells

_SCORES_FIELD = "worth"  # the name of `RaggedCells.scores` in files


def _tensor_names(compressed: bool, ragged: bool, scored: bool) -> list[str]:
    """Return the names of a segment's tensors besides keys and values."""
    optional = {"bias": compressed, "counts": ragged, _SCORES_FIELD: scored}
    return ["positions", "serials", *(name for name, is_stored in optional.items() if is_stored)]


def segment_tensors(index: int, segment: Segment) -> dict[str, Tensor]:
    """Return the cells of the file's segment `index`, oldest first; a full ring's in slot order."""
    names = _tensor_names(segment.compressed, is_ragged(segment), has_scores(segment))
    return cell_tensors(f"segment.{index}", cells_to_store(segment), names)


def cells_to_store(segment: Segment) -> Cells:
    """Return the cells of a segment in the order of its tensors in a file; not copied if possible.

    That is oldest first, or of a full ring in slot order.
    """
    return segment.block.slots if _in_slot_order(segment) else segment.view(0, segment.length)


def cell_tensors(prefix: str, cells: Cells, names: Sequence[str]) -> dict[str, Tensor]:
    """Return the tensors of cells by their names in a file. names: besides keys and values."""
    tensors = _kv_tensors(f"{prefix}.keys", cells.stored_keys)
    tensors |= _kv_tensors(f"{prefix}.values", cells.stored_values)
    return tensors | {
        f"{prefix}.{name}": getattr(cells, "scores" if name == _SCORES_FIELD else name)
        for name in names
    }


def is_ragged(segment: Segment) -> bool:
    """Whether KV heads hold different numbers of cells."""
    return isinstance(segment.block.slots, RaggedCells)


def has_scores(segment: Segment) -> bool:
    """Whether its cells have scores, of an eviction method that scores each cell once."""
    cells = segment.block.slots
    return isinstance(cells, RaggedCells) and cells.scores is not None


def segment_entry(segment: Segment, local: bool = False) -> dict[str, Any]:
    """Return a segment's JSON entry: everything but its tensors. local: is it of local layers."""
    wraps = segment.wrapped or segment.places_wrap
    optional = {"ragged": is_ragged(segment), _SCORES_FIELD: has_scores(segment), "local": local}
    return {
        "map": asdict(segment.position_map),
        "limit": segment.limit,
        "anchor": segment.is_anchor,
        "frozen": segment.frozen,  # takes no new cells until it is reopened
        "sealed": segment.sealed,  # never takes new cells
        "start": segment.first_place,  # of the oldest cell, in the order of summation
        "length": segment.length,
        "capacity": segment.limit if wraps else segment.first_place + segment.length,
        "slot_order": _in_slot_order(segment),
        "compressed": segment.compressed,
        **{name: True for name, is_set in optional.items() if is_set},
    }


def read_segment(
    index: int, layout: Layout, entry: dict[str, Any], tensors: dict[str, Tensor]
) -> Segment:
    """Return the segment that an entry and tensors describe. Its tensors are not copied.

    index: of the segment in the file. entry: checked by `check_document`. A ring that is not full
    is stored linearly until a cache takes the segment. Raises KeyError, TypeError or ValueError if
    entry and tensors do not match.
    """
    compressed, ragged = entry.get("compressed", False), entry.get("ragged", False)
    names = _tensor_names(compressed, ragged, entry.get(_SCORES_FIELD, False))
    cells = read_cells(f"segment.{index}", layout, tensors, names, ragged)
    check_cells(cells, layout, entry["length"])
    return segment_of_entry(entry, layout, block_of_entry(entry, cells))


def read_cells(
    prefix: str,
    layout: Layout,
    tensors: Mapping[str, Tensor],
    names: Sequence[str] = ("positions", "serials"),
    ragged: bool = False,
) -> Cells:
    """Undo `cell_tensors`. Raises KeyError if a tensor is missing."""
    return (RaggedCells if ragged else Cells)(
        _read_kv(f"{prefix}.keys", layout.key_bits, tensors),
        _read_kv(f"{prefix}.values", layout.value_bits, tensors),
        *(tensors[f"{prefix}.{name}"] for name in names),
    )


def block_of_entry(entry: Mapping[str, Any], cells: Cells) -> Block:
    """Return a block of the cells of an entry, in their places."""
    return Block(cells, place_offset=0 if entry["slot_order"] else entry["start"])


def segment_of_entry(entry: Mapping[str, Any], layout: Layout, block: Block) -> Segment:
    """Return the segment of an entry, with a block from `block_of_entry`."""
    compressed = entry.get("compressed", False)
    segment = Segment(
        layout, entry["limit"], PositionMap(**entry["map"]), entry["anchor"], compressed
    )
    segment.frozen, segment.sealed = entry["frozen"], entry.get("sealed", False)
    segment.length, segment.block = entry["length"], block
    segment.start = entry["start"] if entry["slot_order"] else 0
    return segment


def _kv_tensors(name: str, kv: KVTensor) -> dict[str, Tensor]:
    if isinstance(kv, Tensor):
        return {name: kv}
    return {f"{name}.int{kv.bits}": kv.data, f"{name}.scale": kv.scale}


def _read_kv(name: str, bits: int, tensors: Mapping[str, Tensor]) -> KVTensor:
    if bits == 16:  # not quantised
        return tensors[name]
    return QuantisedTensor(tensors[f"{name}.int{bits}"], tensors[f"{name}.scale"])


def _in_slot_order(segment: Segment) -> bool:
    """Whether to save cells in slot order, as for a full ring: another order changes rounding."""
    return segment.length == segment.capacity and (segment.wrapped or not segment.first_place)

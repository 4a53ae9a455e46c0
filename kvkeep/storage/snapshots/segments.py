"""Conversion of cache segments to tensors and a JSON entry of a snapshot file, and back."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from kvkeep.cache import Block, Cells, Layout, PositionMap, RaggedCells, Segment
from kvkeep.cache.checks import require, require_within
from kvkeep.cache.quantised import KVTensor, QuantisedTensor
from kvkeep.cache.state import check_cells

_SCORES_FIELD = "worth"  # the name of `RaggedCells.scores` in files
_NAMES = ("positions", "serials")  # of a segment's tensors besides keys and values
_FIELDS = {"bias": "bias", "counts": "counts", _SCORES_FIELD: "scores", "residual": "residual"}


def segment_tensors(index: int, segment: Segment) -> dict[str, Tensor]:
    """Return the cells of the file's segment `index`, oldest first; a full ring's in slot order."""
    cells = cells_to_store(segment)
    optional = (name for name, field in _FIELDS.items() if getattr(cells, field, None) is not None)
    return cell_tensors(f"segment.{index}", cells, (*_NAMES, *optional))


def cells_to_store(segment: Segment) -> Cells:
    """Return the cells of a segment in the order of its tensors in a file; not copied if possible.

    That is oldest first, or of a full ring in slot order.
    """
    return segment.block.slots if _in_slot_order(segment) else segment.view(0, segment.length)


def cell_tensors(prefix: str, cells: Cells, names: Sequence[str]) -> dict[str, Tensor]:
    """Return the tensors of cells by their names in a file. names: besides keys and values."""
    tensors = _kv_tensors(f"{prefix}.keys", cells.stored_keys)
    tensors |= _kv_tensors(f"{prefix}.values", cells.stored_values)
    others = {f"{prefix}.{name}": getattr(cells, _FIELDS.get(name, name)) for name in names}
    return tensors | {
        name: tensor.to(torch.uint8) if tensor.dtype == torch.bool else tensor
        for name, tensor in others.items()
    }


def is_ragged(segment: Segment) -> bool:
    """Whether KV heads hold different numbers of cells."""
    return isinstance(segment.block.slots, RaggedCells)


def has_scores(segment: Segment) -> bool:
    """Whether its cells have scores, of an eviction method that scores each cell once."""
    cells = segment.block.slots
    return isinstance(cells, RaggedCells) and cells.scores is not None


def has_residual_cells(segment: Segment) -> bool:
    """Whether some of its cells are marked as residual: each stands for a cluster of others."""
    cells = segment.block.slots
    return isinstance(cells, RaggedCells) and cells.residual is not None


def segment_entry(segment: Segment, local: bool = False) -> dict[str, Any]:
    """Return a segment's JSON entry: everything but its tensors. local: is it of local layers."""
    wraps = segment.wrapped or segment.places_wrap
    optional = {
        "ragged": is_ragged(segment),
        _SCORES_FIELD: has_scores(segment),
        "residual": has_residual_cells(segment),
        "local": local,
    }
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
    ragged = entry.get("ragged", False)
    is_stored = {
        "bias": entry.get("compressed", False),
        "counts": ragged,
        **{name: entry.get(name, False) for name in (_SCORES_FIELD, "residual")},
    }
    names = (*_NAMES, *(name for name in _FIELDS if is_stored[name]))
    cells = read_cells(f"segment.{index}", layout, tensors, names, ragged)
    check_cells(cells, layout, entry["length"])
    return segment_of_entry(entry, layout, block_of_entry(entry, cells))


def read_cells(
    prefix: str,
    layout: Layout,
    tensors: Mapping[str, Tensor],
    names: Sequence[str] = _NAMES,
    ragged: bool = False,
) -> Cells:
    """Undo `cell_tensors`. Raises KeyError if a tensor is missing, ValueError for a bad mark."""
    fields = {_FIELDS.get(name, name): tensors[f"{prefix}.{name}"] for name in names}
    if "residual" in fields:
        fields["residual"] = _read_marks(f"{prefix}.residual", fields["residual"])
    return (RaggedCells if ragged else Cells)(
        _read_kv(f"{prefix}.keys", layout.key_bits, tensors),
        _read_kv(f"{prefix}.values", layout.value_bits, tensors),
        **fields,
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


def _read_marks(name: str, tensor: Tensor) -> Tensor:
    """Return bytes of 0 and 1 as bool. Raises ValueError for others."""
    require(tensor.dtype == torch.uint8, f"{name} must be uint8; found {tensor.dtype}")
    require_within(name, tensor, 0, 1)
    return tensor.to(torch.bool)


def _read_kv(name: str, bits: int, tensors: Mapping[str, Tensor]) -> KVTensor:
    if bits == 16:  # not quantised
        return tensors[name]
    return QuantisedTensor(tensors[f"{name}.int{bits}"], tensors[f"{name}.scale"])


def _in_slot_order(segment: Segment) -> bool:
    """Whether to save cells in slot order, as for a full ring: another order changes rounding."""
    return segment.length == segment.capacity and (segment.wrapped or not segment.first_place)

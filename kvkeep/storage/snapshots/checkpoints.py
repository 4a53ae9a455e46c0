"""Conversion of checkpoints to tensors and a JSON entry of a snapshot file, and back.

The windows of neighbouring checkpoints, and the session's own, have many cells in common. Each is
written once: the windows of checkpoints are lists of runs of cells, in the tensors of the session's
segments or in further ones, which hold what no earlier tensor does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvkeep.cache import Block, CacheState, Cells, Layout, Segment
from kvkeep.cache.checkpoint import Checkpoint, Checkpoints
from kvkeep.cache.checks import require, require_tensor
from kvkeep.cache.state import check_cells
from kvkeep.storage.snapshots.segments import (
    block_of_entry,
    cell_tensors,
    cells_to_store,
    read_cells,
    segment_entry,
    segment_of_entry,
)

_Run = tuple[str, int, int]  # a name of tensors, the index of the first cell, and how many


def checkpoints_entry(
    checkpoints: Checkpoints, cache: CacheState
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the JSON entry of checkpoints, and the tensors that it needs besides the session's."""
    writer = _WindowWriter()
    for index, segment in enumerate(cache.local_segments, len(cache.segments)):
        writer.add(f"segment.{index}", cells_to_store(segment))
    entries, states = list[dict[str, Any]](), dict[str, Tensor]()
    for index, checkpoint in reversed(list(enumerate(checkpoints.entries))):
        segments = checkpoint.local_segments
        entry = {
            "tokens": checkpoint.num_tokens,
            "clock": checkpoint.time,
            "branches": checkpoint.branches,
            "segments": [
                {**segment_entry(segment, local=True), "cells": writer.runs_of(segment)}
                for segment in segments
            ],
        }
        entries.insert(0, entry)
        own_states = {name: id(state) for name, state in cache.recurrent_states.items()}
        if {name: id(state) for name, state in checkpoint.recurrent_states.items()} != own_states:
            states |= {_state_name(index, n): s for n, s in checkpoint.recurrent_states.items()}
        elif own_states:
            entry["session_states"] = True
    document = {
        "max_bytes": checkpoints.max_bytes,
        "branch": checkpoints.branch,
        "answer_ends": list(checkpoints.answer_ends),
        "windows": writer.lengths,
        "entries": entries,
    }
    return document, writer.tensors | states


def window_shapes(
    document: Mapping[str, Any], layout: Layout | None, stored: Mapping[str, Tensor]
) -> dict[str, list[int]]:
    """Return the shapes of the keys and values of windows in a checked document, by name.

    Raises KeyError or ValueError if their serials, which are never encoded, are not as many.
    """
    shapes: dict[str, list[int]] = {}
    for index, length in enumerate(document.get("checkpoints", {}).get("windows", [])):
        require(layout is not None, "windows without local layers")
        assert layout is not None
        require_tensor("serials", stored[f"window.{index}.serials"], torch.int64, length)
        shape = [layout.layers, layout.kv_heads, length, layout.head_dim]
        shapes |= {f"window.{index}.{name}": shape for name in ("keys", "values")}
    return shapes


def read_checkpoints(
    document: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    cache: CacheState,
    layout: Layout | None,
) -> Checkpoints:
    """Return the checkpoints of a checked document. layout: of local layers, None without them.

    Raises KeyError or ValueError if document and tensors do not match.
    """
    if "checkpoints" not in document:
        return Checkpoints()
    entry = document["checkpoints"]
    reader = _WindowReader()
    for index, segment in enumerate(cache.local_segments, len(cache.segments)):
        reader.sources[f"segment.{index}"] = segment.block.slots
    for index, length in enumerate(entry["windows"]):
        require(layout is not None, "windows without local layers")
        assert layout is not None
        cells = read_cells(f"window.{index}", layout, tensors)
        check_cells(cells, layout, length)
        reader.sources[f"window.{index}"] = cells
    checkpoints = list[Checkpoint]()
    for index, each in reversed(list(enumerate(entry["entries"]))):
        states = cache.recurrent_states
        if not each.get("session_states", False):
            states = {name: tensors[_state_name(index, name)] for name in states}
        segments = [reader.segment(segment, layout) for segment in each["segments"]]
        checkpoint = (each["tokens"], each["clock"], tuple(segments), states, each["branches"])
        checkpoints.insert(0, Checkpoint(*checkpoint))
    answer_ends = tuple(entry.get("answer_ends", ()))  # earlier files lack them
    return Checkpoints(entry["max_bytes"], tuple(checkpoints), entry["branch"], answer_ends)


def _state_name(index: int, name: str) -> str:
    return f"checkpoint.{index}.{name}"


@dataclass
class _WindowWriter:
    """Writes the cells of windows to a file's tensors, each cell once.

    lengths: of the windows in `tensors`.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    lengths: list[int] = field(default_factory=list)
    _sources: dict[str, Cells] = field(default_factory=dict)
    _places: dict[int, tuple[str, int]] = field(default_factory=dict)  # of cells, by serial

    def add(self, name: str, cells: Cells) -> None:
        """Note that a file has these cells under a name."""
        self._sources[name] = cells
        serials: list[int] = cells.serials.tolist()
        self._places |= {serial: (name, index) for index, serial in enumerate(serials)}

    def runs_of(self, segment: Segment) -> list[_Run]:
        """Return where the cells of a segment are; those that the file does not have are added."""
        cells, runs, first_new = cells_to_store(segment), list[_Run](), 0
        for first, run in self._known_runs(cells.serials.tolist()):
            name, source_first, count = run
            source = self._sources[name].part(slice(source_first, source_first + count))
            if cells.part(slice(first, first + count)).same_bits(source):
                runs += [*self._added(cells, first_new, first), run]
                first_new = first + count
        return [*runs, *self._added(cells, first_new, len(cells))]

    def _known_runs(self, serials: Sequence[int]) -> list[tuple[int, _Run]]:
        """Return runs of cells whose serials the file has, each with the index of its first."""
        runs = list[tuple[int, _Run]]()
        for index, serial in enumerate(serials):
            if serial not in self._places:
                continue
            name, place = self._places[serial]
            if runs:
                first, (last_name, last_place, count) = runs[-1]
                if (last_name, last_place + count, first + count) == (name, place, index):
                    runs[-1] = (first, (name, last_place, count + 1))
                    continue
            runs.append((index, (name, place, 1)))
        return runs

    def _added(self, cells: Cells, first: int, end: int) -> list[_Run]:
        """Write cells `first ... end - 1`, if there are any; return where they are."""
        if first == end:
            return []
        name, part = f"window.{len(self.lengths)}", cells.part(slice(first, end))
        self.lengths.append(len(part))
        self.tensors |= cell_tensors(name, part, ("positions", "serials"))
        self.add(name, part)
        return [(name, 0, len(part))]


@dataclass
class _WindowReader:
    """The cells of windows in a file, by the names of their tensors."""

    sources: dict[str, Cells] = field(default_factory=dict)
    _blocks: dict[tuple[str, int, int], Block] = field(default_factory=dict)

    def segment(self, entry: Mapping[str, Any], layout: Layout | None) -> Segment:
        """Return the segment of a checked entry, in storage of its own.

        Only windows that were still filling share storage, if the longest of them is read first.
        """
        require(layout is not None, "a window without local layers")
        assert layout is not None
        runs: list[_Run] = entry["cells"]
        for name, first, count in runs:
            require(name in self.sources, f"cells of {name!r}, which holds none of a window")
            require(first + count <= len(self.sources[name]), f"more cells than {name!r} holds")
        require(sum(count for _, _, count in runs) == entry["length"], "runs of another length")
        name, first, count = runs[0]
        key, is_linear = (name, first, entry["start"]), not (entry["slot_order"] and entry["start"])
        can_share = is_linear and len(runs) == 1
        if can_share and (longer := self._blocks.get(key)) and count <= longer.capacity:
            return segment_of_entry(entry, layout, longer.part(slice(0, count)))
        # Copied: else a checkpoint would keep all cells of the sources in memory.
        parts = [self.sources[n].part(slice(first, first + count)) for n, first, count in runs]
        block = block_of_entry(entry, Cells.concatenate(parts))
        if can_share:
            self._blocks[key] = block
        return segment_of_entry(entry, layout, block)

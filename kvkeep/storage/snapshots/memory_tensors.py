"""Conversion of a session's memory to the tensors of a snapshot file, and back."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvkeep.cache import Bits, CacheState, Layout, Queries, Segment, Window
from kvkeep.cache.checks import require, require_tensor
from kvkeep.storage.snapshots.checkpoints import read_checkpoints, window_shapes
from kvkeep.storage.snapshots.codec import decode
from kvkeep.storage.snapshots.document import layout_of
from kvkeep.storage.snapshots.memory_state import MemoryState
from kvkeep.storage.snapshots.segments import read_segment, segment_tensors

_STATE_PREFIX = "recurrent."  # of the names of recurrent states


def memory_tensors(memory: MemoryState) -> dict[str, Tensor]:
    """Return the tensors of a memory by name, without those of checkpoints."""
    cache, tensors = memory.cache, dict[str, Tensor]()
    for index, segment in enumerate((*cache.segments, *cache.local_segments)):
        tensors |= segment_tensors(index, segment)
    tensors |= {"tokens": memory.tokens, "serials": memory.serials}
    if memory.hidden is not None and memory.logits is not None:
        tensors |= {"hidden": memory.hidden, "logits": memory.logits}
    if (observed := cache.observed_queries) is not None:
        tensors |= {"queries": observed.vectors, "query_times": observed.times}
    states = cache.recurrent_states.items()
    return tensors | {f"{_STATE_PREFIX}{name}": state for name, state in states}


def read_memory(document: Mapping[str, Any], stored: Mapping[str, Tensor]) -> MemoryState:
    """Return the memory that a checked document and the tensors stored with it describe.

    Raises KeyError, TypeError or ValueError if they do not match, or no memory can be like that.
    """
    layouts = _StoredLayouts.of(document)
    _check_encoded_shapes(document, stored, layouts)
    tensors = decode(stored, document["coding"])
    require(len(tensors["tokens"]) == document["tokens"], "the number of tokens differs")
    cache = _cache_state(document, tensors, layouts)
    checkpoints = read_checkpoints(document, tensors, cache, layouts.local)
    memory = MemoryState(
        tokens=tensors["tokens"],
        serials=tensors["serials"],
        pins=document["settings"].get("pins", []),
        hidden=tensors.get("hidden"),
        logits=tensors.get("logits"),
        cache=cache,
        checkpoints=checkpoints,
    )
    observed = cache.observed_queries
    query_heads = observed.vectors.shape[1] if observed else 0
    cache.check(layouts.window, layouts.anchor, query_heads, layouts.local)
    memory.check_consistency()
    checkpoints.check(cache, document["tokens"], layouts.local)
    return memory


@dataclass(frozen=True)
class _StoredLayouts:
    """The layouts of the cells in a file, which may be quantised. local: None without them."""

    window: Layout
    anchor: Layout
    local: Layout | None

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> "_StoredLayouts":
        bits, local = Bits(**document.get("bits", {})), None
        window, anchor = bits.layouts(layout_of(document["layout"]))
        if "local_layout" in document:
            local = bits.layouts(layout_of(document["local_layout"]))[0]
        return cls(window, anchor, local)

    def of_segment(self, entry: Mapping[str, Any]) -> Layout:
        if not entry.get("local", False):
            return self.anchor if entry["anchor"] else self.window
        assert self.local is not None, "`check_document` requires a layout of local segments"
        return self.local


def _cache_state(
    document: Mapping[str, Any], tensors: dict[str, Tensor], layouts: _StoredLayouts
) -> CacheState:
    """Return the state of the cache that a document and tensors describe."""
    segments, local_segments = list[Segment](), list[Segment]()
    for index, entry in enumerate(document["segments"]):
        segment = read_segment(index, layouts.of_segment(entry), entry, tensors)
        (local_segments if entry.get("local", False) else segments).append(segment)
    queries = tensors.get("queries")
    return CacheState(
        segments=tuple(segments),
        window=Window(**document["settings"].get("window", {})),
        time=document["clock"],
        serial=document["serial"],
        observed_queries=None if queries is None else Queries(queries, tensors["query_times"]),
        local_segments=tuple(local_segments),
        recurrent_states={
            name.removeprefix(_STATE_PREFIX): state
            for name, state in tensors.items()
            if name.startswith(_STATE_PREFIX)
        },
    )


def _check_encoded_shapes(
    document: Mapping[str, Any], stored: Mapping[str, Tensor], layouts: _StoredLayouts
) -> None:
    """Check encoded keys and values against their cells' shape, before they are allocated."""
    shapes = window_shapes(document, layouts.local, stored)
    for index, entry in enumerate(document["segments"]):
        layout = layouts.of_segment(entry)
        # Serials and positions are not encoded.
        positions = stored[f"segment.{index}.positions"]
        serials = stored[f"segment.{index}.serials"]
        require_tensor("serials", serials, torch.int64, entry["length"])
        shape = [layout.layers, layout.kv_heads, entry["length"], layout.head_dim]
        if entry.get("ragged", False):
            require_tensor("positions", positions, torch.int64, None)
            shape[:3] = [len(positions)]  # the cells of all layers and KV heads in one row
        shapes |= {f"segment.{index}.{name}": shape for name in ("keys", "values")}
    for name, encoding in document["coding"].items():
        require(encoding["shape"] == shapes[name], f"{name} has a codec entry with another shape")

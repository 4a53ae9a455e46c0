"""The contents of a cache at rest: taken from one cache, checked before another restores them."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvkeep.cache.block import NO_TOKEN, Cells
from kvkeep.cache.checks import (
    require,
    require_bool,
    require_finite,
    require_instance,
    require_int,
    require_tensor,
    require_within,
)
from kvkeep.cache.layout import Layout
from kvkeep.cache.observer import MAX_QUERIES, Queries
from kvkeep.cache.quantised import SCALE_DTYPE, KVTensor, QuantisedTensor, scale_count
from kvkeep.cache.ragged import RaggedCells
from kvkeep.cache.segment import Segment
from kvkeep.cache.window import Window

MAX_EXACT_INT = 2**53  # of times, positions and serials: float64 represents every integer up to it
MAX_CELLS = 2**30  # of a segment: kernels index its places with 32 bits


@dataclass(frozen=True)
class CacheState:
    """The contents of a cache; see `KVCache`.

    observed_queries: the newest, if the cache records them. local_segments: those of local layers.
    recurrent_states: of layers that have no cells, by name.
    """

    segments: tuple[Segment, ...]
    window: Window
    time: int
    serial: int
    observed_queries: Queries | None
    local_segments: tuple[Segment, ...] = ()
    recurrent_states: Mapping[str, Tensor] = field(default_factory=dict)

    def check(
        self, layout: Layout, far_layout: Layout, heads: int, local_layout: Layout | None = None
    ) -> None:
        """Check that a cache of such cells can hold these contents. Raises ValueError.

        heads: number of query heads. local_layout: of local layers; None if there are none.
        """
        require_int("the serial", self.serial, 0, MAX_EXACT_INT)
        require_int("the clock", self.time, -MAX_EXACT_INT, self.serial)
        if self.window.size is not None:
            require_int("the window's size", self.window.size, 0, MAX_CELLS)
        require_int("the window's discard", self.window.discard, 1, MAX_CELLS)
        require_bool("the window's moves", self.window.moves)
        for index, segment in enumerate(self.segments):
            with _error_prefix(f"segment {index}"):
                self._check_segment(segment, layout, far_layout)
        if self.observed_queries is not None:
            _check_queries(self.observed_queries, layout, heads, self.time)
        self.check_overwritten(local_layout)

    def check_overwritten(self, local_layout: Layout | None) -> None:
        """Check local windows and recurrent states, which later tokens overwrite; see `check`."""
        for index, segment in enumerate(self.local_segments):
            if local_layout is None:
                raise ValueError("cells of local layers, but the model has no local layers")
            with _error_prefix(f"segment {index} of local layers"):
                self._check_segment(segment, local_layout, local_layout)
                is_window = not (segment.is_anchor or segment.compressed)
                is_plain = is_window and segment.position_map.group == 1
                require(is_plain, "cells that are not a plain window")
        for name, state in self.recurrent_states.items():
            require_finite(f"the state {name!r}", state)

    def serials(self) -> Tensor:
        """Return the serials of uncompressed live cells, `[n]` int64, oldest first."""
        parts = [s.select_live(s.block.slots.serials) for s in self.segments if not s.compressed]
        return torch.cat([torch.empty(0, dtype=torch.int64, device="cpu"), *parts])

    def _check_segment(self, segment: Segment, layout: Layout, far_layout: Layout) -> None:
        require_instance("it", segment, Segment)
        flags = {"anchor": segment.is_anchor, "frozen": segment.frozen, "sealed": segment.sealed}
        for name, flag in flags.items():
            require_bool(name, flag)
        require(not segment.arriving_count, "cells of an unfinished step")
        require_int("a map's group", segment.position_map.group, 1, MAX_CELLS)
        require_int("a map's offset", segment.position_map.offset, -MAX_EXACT_INT, MAX_EXACT_INT)
        require_int("the limit", segment.limit, 1, MAX_CELLS)
        require_int("the length", segment.length, 1, min(segment.limit, segment.capacity))
        require_int("the first slot", segment.start, 0, segment.capacity - 1)
        require_int("the first place", segment.first_place, 0, MAX_CELLS)
        cells = segment.block.slots
        if isinstance(cells, RaggedCells):
            is_full = segment.length == segment.capacity == segment.limit
            is_whole = is_full and segment.frozen and not segment.first_place
            require(is_whole, "ragged cells that are incomplete or not frozen")
        check_cells(cells, far_layout if segment.is_anchor else layout, segment.capacity)
        serials = segment.select_live(cells.serials)
        if cells.bias is not None:
            require(bool((serials == NO_TOKEN).all()), "compressed cells have token serials")
            require_finite("the bias", segment.select_live(cells.bias))
            if isinstance(cells, RaggedCells) and cells.scores is not None:
                require_finite("the scores", cells.scores)
        else:
            require_within("serials", serials, 0, self.serial - 1)
        now = segment.position_map(self.time)
        require_within("positions", segment.positions(), -MAX_EXACT_INT, now)


@contextmanager
def _error_prefix(prefix: str) -> Iterator[None]:
    """Put the name of the checked object in front of a ValueError's message."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{prefix}: {error}") from None


def check_cells(cells: Cells, layout: Layout, count: int) -> None:
    """Check shapes and dtypes of `count` cells of a layout. Raises ValueError."""
    require_tensor("serials", cells.serials, torch.int64, count)
    head_shape = (layout.layers, layout.kv_heads)
    vector_shape: tuple[int, ...] = (*head_shape, count)
    if isinstance(cells, RaggedCells):
        vector_shape = (_checked_total(cells, head_shape, count),)
    position_shape = (count,) if cells.bias is None else vector_shape  # and of biases
    _check_stored("keys", cells.stored_keys, layout, layout.key_bits, vector_shape)
    _check_stored("values", cells.stored_values, layout, layout.value_bits, vector_shape)
    require_tensor("positions", cells.positions, torch.int64, *position_shape)
    if cells.bias is not None:
        require_tensor("bias", cells.bias, torch.float32, *position_shape)
    if isinstance(cells, RaggedCells) and cells.scores is not None:
        require_tensor("scores", cells.scores, torch.float32, *position_shape)
    if isinstance(cells, RaggedCells) and cells.residual is not None:
        require_tensor("residual", cells.residual, torch.bool, *position_shape)


def _checked_total(cells: RaggedCells, head_shape: tuple[int, int], count: int) -> int:
    """Check ragged cells' counts against `count`, their mean rounded up; return their sum."""
    require_tensor("counts", cells.counts, torch.int64, *head_shape)
    require_within("counts", cells.counts, 0, MAX_CELLS)
    total, head_count = int(cells.counts.sum()), math.prod(head_shape)
    matches = (count - 1) * head_count < total <= count * head_count
    require(matches, f"{total} ragged cells do not match a mean of {count} cells per head")
    return total


def _check_stored(
    name: str, stored: KVTensor, layout: Layout, bits: int, shape: tuple[int, ...]
) -> None:
    """Check stored keys or values. name: in errors. shape: of the vectors, without head_dim."""
    width = layout.head_dim
    if bits == 16:
        require_tensor(name, stored, layout.dtype, *shape, width)
        return
    require(isinstance(stored, QuantisedTensor), f"{name} must be quantised to {bits} bits")
    assert isinstance(stored, QuantisedTensor)
    dtype = torch.int8 if bits == 8 else torch.uint8
    require_tensor(f"{name}.int{bits}", stored.data, dtype, *shape, width * bits // 8)
    require_tensor(f"{name}.scale", stored.scale, SCALE_DTYPE, *shape, scale_count(width, bits))


def _check_queries(observed: Queries, layout: Layout, heads: int, time: int) -> None:
    require_instance("the observed queries", observed, Queries)
    require_tensor("query times", observed.times, torch.int64, None)
    require_int("the number of queries", len(observed), 1, MAX_QUERIES)
    shape = (layout.layers, heads, len(observed), layout.head_dim)
    require_tensor("queries", observed.vectors, layout.dtype, *shape)
    require_finite("queries", observed.vectors)
    require_within("query times", observed.times, -MAX_EXACT_INT, time - 1)
    require(bool((observed.times.diff() > 0).all()), "query times must increase")

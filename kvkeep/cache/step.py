"""One forward's view of a cache: what each query sees, prepared once and used by every layer.

A step adds `count` tokens at times `time ... time + count - 1` to the newest segment. The cache
does not count them until `commit`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from kvkeep.cache.attention import AttentionConfig, combine, merge_heads, range_bias
from kvkeep.cache.block import Cells
from kvkeep.cache.quantised import KVTensor, copy_stored
from kvkeep.cache.rope import Rotation
from kvkeep.cache.segment import Segment
from kvkeep.cache.view import View
from kvkeep.cache.window import Window


class LayerAttention(Protocol):
    """The attention that a model's forward calls, once for each layer."""

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        """Attend as `Step.attend` does."""


@dataclass(frozen=True)
class LayerPlacement:
    """The cache, and its layer, that hold the cells read by a decoder layer."""

    is_local: bool  # whether it is the cache of local layers
    index: int  # of the layer in that cache


@dataclass(frozen=True)
class LayerDispatch:
    """Attention of a decoder with local layers or state layers: each attends in its cache's step.

    placements: of each decoder layer; of a state layer, which never attends, any.
    """

    placements: Sequence[LayerPlacement]
    global_attention: LayerAttention
    local_attention: LayerAttention

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        placement = self.placements[layer]
        attention = self.local_attention if placement.is_local else self.global_attention
        return attention.attend(placement.index, q, k, v)


def dispatch(
    placements: Sequence[LayerPlacement],
    global_attention: LayerAttention,
    local_attention: LayerAttention | None,
) -> LayerAttention:
    """Return the attention of a decoder's layers. local_attention: of local ones, if any."""
    if not placements:
        return global_attention
    return LayerDispatch(placements, global_attention, local_attention or global_attention)


class Step:
    """Times, rotations and views of stored cells, which decode and chunk steps share.

    Window cells are numbered by rank, 0 for the oldest held. The i-th new token evicts the first
    `evicted_counts[i]` of them: it does not see them, and anchors before them come as much closer.

    For example, a cache of the anchor 0 and a window of three holds tokens 3, 4, 5, and a chunk
    adds tokens 6 and 7. The anchor's map is m(t) = t - 2, because 1 and 2 are gone:

        evicted_counts   [1, 2]              query 6 sees 4, 5 and itself; 7 sees 5, 6 and itself
        query_positions  [[6, 7], [3, 3]]    towards the anchor 6 - 2 - 1 and 7 - 2 - 2
        views            the anchor by rotation 1; cells 4 and 5 by rotation 0, 4 hidden from 7

    query_positions: lists of a position for each query. The first has the new tokens' own; the
        others are those that the queries take towards segments with other position maps.
    views: the segments as the queries see them. all_views: `views`, and a chunk's new cells.
    queries: `[layers, n, heads, head_dim]` to record the queries in; None if none are wanted.
    log_sums: `[layers, heads, n]` float32 to store the natural log of the sum in each query's
        softmax denominator; None if it is not wanted.
    sampled: whether the model has just sampled the token, in contrast to a prompt's. Executors may
        choose other weights by it; the cache does not depend on it.
    local_step: the step of the local layers' cache, if the decoder has such layers.
    placements: for each decoder layer, the cache and layer that has its cells; empty if that is
        this cache and the same layer, for all of them.
    recurrent_states: of layers without cells, by name. The executor replaces them and never writes
        to one.
    """

    sampled = False
    local_step: "Step | None" = None
    placements: Sequence[LayerPlacement] = ()
    recurrent_states: Mapping[str, Tensor] = MappingProxyType({})
    queries: Tensor | None = None
    log_sums: Tensor | None = None
    _written_count = 0  # new cells that go to the newest segment's storage before attention

    def __init__(
        self, segments: Sequence[Segment], window: Window, times: range, attention: AttentionConfig
    ):
        self.segments = segments
        self.newest_segment = segments[-1]
        self.window = window
        self.times = times
        self.count = len(times)
        self.attention = attention
        self._window_cells = sum(s.length for s in segments if not s.is_anchor)
        added_counts = [0 if self.newest_segment.is_anchor else i + 1 for i in range(self.count)]
        self.evicted_counts = [window.evicted_count(self._window_cells + n) for n in added_counts]
        self.query_positions = [[self.newest_segment.position_map(t) for t in times]]
        self._rotation_indices = {tuple(self.query_positions[0]): 0}  # by query positions
        self.views: list[View] = []
        preceding_cells = 0  # window cells in segments before this one
        for segment in segments:
            view = self._view_segment(segment, preceding_cells)
            if view is not None:
                self.views.append(view)
            preceding_cells += 0 if segment.is_anchor else segment.length
        self.all_views = self.views

    @property
    def layer_attention(self) -> LayerAttention:
        """The attention of all decoder layers, those of the local cache included."""
        return dispatch(self.placements, self, self.local_step)

    @cached_property
    def rotations(self) -> list[Rotation]:
        return [self.attention.rope.rotation_at(positions) for positions in self.query_positions]

    def _view_segment(self, segment: Segment, preceding_cells: int) -> View | None:
        """Return what the queries see of a segment; None if they see none of it.

        preceding_cells: number of window cells in the segments before it. Cells evicted beyond
        these are of this segment; or, of an anchor, stood between it and the queries, whose
        positions towards it are then lower by as many, unless `window.moves`.
        """
        length = segment.length + (self._written_count if segment is self.newest_segment else 0)
        evicted_here = [max(0, n - preceding_cells) for n in self.evicted_counts]
        positions = [segment.position_map(time) for time in self.times]
        first = 0
        visible_ranks: list[tuple[int, int]] = []
        if not segment.is_anchor:
            # In the example above the window has 3 cells, evicted_here is [1, 2], and the view is
            # of the 2 newest.
            first = evicted_here[0]
            if evicted_here[-1] > first:
                visible_ranks = [(n, length) for n in evicted_here]
        else:
            if not self.window.moves:
                positions = [p - n for p, n in zip(positions, evicted_here, strict=True)]
            if segment.arriving_count:
                # A query sees arriving cells, which are copies, once their originals are evicted:
                # with 10 cells, 2 of them arriving, and evicted [1, 2], it sees 9, the next one 10.
                settled_count = length - segment.arriving_count
                visible_ranks = [(0, settled_count + n) for n in self.evicted_counts]
        if length <= first:
            return None
        rotation_index = self._rotation_indices.setdefault(
            tuple(positions), len(self.query_positions)
        )
        if rotation_index == len(self.query_positions):
            self.query_positions.append(positions)
        return View.of_segment(segment, first, length, rotation_index, visible_ranks)

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        """Store the new cells of a layer and attend to all that its queries see.

        layer: index in this cache. q: `[n, heads, head_dim]`. k, v: `[n, kv_heads, head_dim]`, or
        None for a layer that reads the cells of another one. All are unrotated. Returns
        `[n, heads * head_dim]`.
        """
        self.observe(layer, q)
        attention = self.attention
        if k is not None and v is not None:
            self.write(layer, attention.rope.rotate_layer(layer, k, self.rotations[0]), v)
        queries = [attention.rope.rotate_layer(layer, q, rotation) for rotation in self.rotations]
        parts = [v.attend(layer, queries[v.rotation_index], attention) for v in self.all_views]
        part = attention.with_sinks(layer, combine(parts), self.count)
        if self.log_sums is not None:
            self.log_sums[layer] = part.log_sum.transpose(0, 1).flatten(0, 1)
        return merge_heads(part.out, self.count).to(q.dtype)

    def observe(self, layer: int, q: Tensor) -> None:
        """Record the queries of a layer, `[n, heads, head_dim]`, if `queries` is set."""
        if self.queries is not None:
            self.queries[layer].copy_(q)

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write the new cells of a layer; both `[n, kv_heads, head_dim]`, keys rotated."""
        raise NotImplementedError

    def commit(self, serial: int) -> None:
        """Add the new cells to the cache; the first one's token has that serial."""
        raise NotImplementedError


class DecodeStep(Step):
    """A step of one token, whose cell is written to its slot before attention.

    slot: of the newest segment.
    slot_tensors: the key and value in that slot, both `[layers, kv_heads, head_dim]`.
    overwrites_oldest: whether the slot is that of the oldest cell, as in a full ring.

    Of several steps of one cache in one forward (`row_steps`):

    follows: whether the step before in the forward is of the token before, in the same cache.
    keeps_states: whether `recurrent_states` after this token are wanted, though others follow.
    overwritten: what the slots of all these steps held before, in their order, `[layers, kv_heads,
        steps, head_dim]`; None if they held no cells. Earlier tokens still see these cells.
    """

    _written_count = 1
    follows = False
    keeps_states = True
    overwritten: Cells | None = None

    def __init__(
        self, segments: Sequence[Segment], window: Window, times: range, attention: AttentionConfig
    ):
        newest = segments[-1]
        self.slot = newest.next_slot()
        slots = newest.block.slots
        self.slot_tensors = [x[:, :, self.slot] for x in (slots.stored_keys, slots.stored_values)]
        self.overwrites_oldest = newest.length == newest.capacity
        super().__init__(segments, window, times, attention)

    @cached_property
    def _layer_slots(self) -> list[tuple[KVTensor, ...]]:
        return [x.unbind() for x in self.slot_tensors]

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        key_slots, value_slots = self._layer_slots
        copy_stored(key_slots[layer], keys[0])
        copy_stored(value_slots[layer], values[0])

    def commit(self, serial: int) -> None:
        self.window.evict(self.segments, max(0, self.evicted_counts[-1] - self.window.spare_cells))
        self.newest_segment.occupy(self.slot, self.query_positions[0][0], serial)


class ChunkStep(Step):
    """A step of several tokens, whose cells go to `new_cells` until all layers are done.

    Thus the first tokens still see old cells that the last tokens overwrite.
    """

    def __init__(
        self, segments: Sequence[Segment], window: Window, times: range, attention: AttentionConfig
    ):
        super().__init__(segments, window, times, attention)
        self.new_cells = Cells.zeros(self.newest_segment.layout.plain, self.count)
        bias = None  # each query sees all new tokens before it, unless the chunk fills the window
        if self.evicted_counts[-1] > self._window_cells:
            ranks = torch.arange(self.count, dtype=torch.int64, device="cpu")
            first_ranks = [n - self._window_cells for n in self.evicted_counts]
            visible_ranks = [(first, i + 1) for i, first in enumerate(first_ranks)]
            bias = range_bias(ranks, visible_ranks, self.newest_segment.layout.device)
        new_view = View(self.new_cells, slice(0, self.count), 0, bias, 0, causal=bias is None)
        self.all_views = [new_view, *self.views]

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        self.new_cells.keys[layer].copy_(keys.transpose(0, 1))
        self.new_cells.values[layer].copy_(values.transpose(0, 1))

    def commit(self, serial: int) -> None:
        positions = torch.tensor(self.query_positions[0], dtype=torch.int64, device="cpu")
        serials = torch.arange(serial, serial + self.count, dtype=torch.int64, device="cpu")
        evict_count = max(0, self.evicted_counts[-1] - self.window.spare_cells)
        self.window.evict(self.segments, min(evict_count, self._window_cells))
        dropped_count = max(0, evict_count - self._window_cells)  # if the chunk exceeds the window
        new = Cells(self.new_cells.keys, self.new_cells.values, positions, serials)
        self.newest_segment.append(new.part(slice(dropped_count, None)))
        for segment in self.segments:
            if segment.is_anchor:
                segment.position_map = segment.position_map.closer_by(dropped_count)

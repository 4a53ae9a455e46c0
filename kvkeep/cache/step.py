"""One forward's view of a cache: what each query sees, prepared once and used by every layer.

A step adds `count` tokens at times `time ... time + count - 1` to the newest segment. The cache
does not count them until `commit`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import torch
from torch import Tensor

from kvkeep.cache.attention import (
    AttentionConfig,
    Part,
    attend_cells,
    combine,
    hiding_bias,
    merge_heads,
)
from kvkeep.cache.block import Cells
from kvkeep.cache.layers import LayerAttention, LayerDispatch, LayerPlacement
from kvkeep.cache.quantised import KVTensor, copy_stored
from kvkeep.cache.ragged import Ragged
from kvkeep.cache.rope import Rotation
from kvkeep.cache.segment import Segment
from kvkeep.cache.window import Window


@dataclass(frozen=True)
class View:
    """Stored cells as the queries of this step see them.

    slots, span: the storage of the cells, and their range in it. origin: the place of its slot 0.
    rotation: index of the step's rotation that the queries take towards these cells.
    bias: `[n, cells]` float32, or None where every query sees every cell, as with ragged cells.
    """

    slots: Cells
    span: slice
    rotation: int
    bias: Tensor | None
    origin: int = 0

    @cached_property
    def keys(self) -> tuple[KVTensor, ...]:
        """For each layer `[kv_heads, cells, head_dim]`; not for ragged cells."""
        return self.slots.stored_keys[:, :, self.span].unbind()

    @cached_property
    def values(self) -> tuple[KVTensor, ...]:
        """For each layer `[kv_heads, cells, head_dim]`; not for ragged cells."""
        return self.slots.stored_values[:, :, self.span].unbind()

    @cached_property
    def cell_bias(self) -> tuple[Tensor | None, ...]:
        """For each layer `[kv_heads, cells]` float32, or None."""
        return self.slots.layer_biases(self.span)

    def attend(self, layer: int, q: Tensor, attention: AttentionConfig) -> Part:
        """Attend with queries `[n, heads, head_dim]`, rotated; see `attend_cells`."""
        if isinstance(self.slots, Ragged):
            return self.slots.attend(layer, q, attention.scale, attention.softcap)
        return attend_cells(
            q,
            self.keys[layer],
            self.values[layer],
            scale=attention.scale,
            bias=self.bias,
            causal=False,
            cell_bias=self.cell_bias[layer],
            softcap=attention.softcap,
        )


class Step:
    """Times, rotations and views of stored cells, which decode and chunk steps share.

    Window cells are numbered by rank, 0 for the oldest held. The i-th new token evicts the first
    `evicted[i]` of them: they are hidden from it, and anchors before them come that much closer.

    For example, a cache of the anchor 0 and a window of three holds tokens 3, 4, 5, and a chunk
    adds tokens 6 and 7. The anchor's map is m(t) = t - 2, because 1 and 2 are gone:

        evicted          [1, 2]              query 6 sees 4, 5 and itself; 7 sees 5, 6 and itself
        query_positions  [[6, 7], [3, 3]]    towards the anchor 6 - 2 - 1 and 7 - 2 - 2
        views            the anchor by rotation 1; cells 4 and 5 by rotation 0, 4 hidden from 7

    query_positions: the different lists of positions, one for each query, that the queries take
        towards segments; the first is that of the new tokens themselves.
    queries: `[layers, n, heads, head_dim]` to record the queries in; None if none are wanted.
    sampled: whether the model has just sampled the token; else it was given from outside, as in a
        prompt. The cache does not depend on it, but executors may choose other weights by it.
    local: the step of the local layers' cache, if the decoder has such layers.
    placements: for each decoder layer, the cache and layer that has its cells.
    recurrent: states of layers without cells, by name. The executor replaces them, and writes to
        none.
    """

    sampled = False
    local: "Step | None" = None
    placements: Sequence[LayerPlacement] = ()
    recurrent: Mapping[str, Tensor] = MappingProxyType({})

    def __init__(
        self,
        segments: Sequence[Segment],
        window: Window,
        time: int,
        count: int,
        attention: AttentionConfig,
    ):
        self.segments = segments
        self.newest = segments[-1]
        self.window = window
        self.count = count
        self.attention = attention
        self.times = range(time, time + count)
        held = sum(s.length for s in segments if not s.anchor)
        grows = not self.newest.anchor
        self.evicted = [window.evicted(held + (i + 1 if grows else 0)) for i in range(count)]
        self.query_positions: list[list[int]] = [[self.newest.map(t) for t in self.times]]
        self.views: list[View] = []
        self.queries: Tensor | None = None
        rank = 0
        for segment in segments:
            view = self._view_segment(segment, rank)
            if view is not None:
                self.views.append(view)
            rank += 0 if segment.anchor else segment.length

    @property
    def layer_attention(self) -> LayerAttention:
        """The attention of all decoder layers, those of the local cache included."""
        return self if self.local is None else LayerDispatch(self.placements, self, self.local)

    @property
    def quantised(self) -> bool:
        """Whether any of the viewed cells or of the cells to be written are quantised."""
        viewed = (view.slots.quantised for view in self.views)
        return self.newest.layout.quantised or any(viewed)

    @cached_property
    def rotations(self) -> list[Rotation]:
        """One for each entry of `query_positions`."""
        return [self.attention.rope.at(positions) for positions in self.query_positions]

    def _view_segment(self, segment: Segment, rank: int) -> View | None:
        """Return what the queries see of a segment; `rank` window cells are before its first."""
        if not segment.length:
            return None
        if segment.anchor:
            before = None if self.window.moves else rank
            own = segment.length - segment.leaving
            visible = [(0, own + evicted) for evicted in self.evicted] if segment.leaving else None
            positions = self._positions_towards(segment, before)
            return self._view(segment, 0, segment.length, positions, visible)
        first = max(0, self.evicted[0] - rank)
        live = segment.length - first
        if live <= 0:
            return None
        visible = [(evicted - rank, segment.length) for evicted in self.evicted]
        some_hidden = visible[-1][0] > first
        positions = self._positions_towards(segment, None)
        return self._view(segment, first, live, positions, visible if some_hidden else None)

    def _positions_towards(self, segment: Segment, rank: int | None) -> list[int]:
        """Return the position that each query takes towards a segment.

        rank: for an anchor, the number of window cells before it. Evicted cells beyond these were
        between the anchor and the query.
        """
        gone = [0 if rank is None else max(0, evicted - rank) for evicted in self.evicted]
        return [segment.map(t) - n for t, n in zip(self.times, gone, strict=True)]

    def _view(
        self,
        segment: Segment,
        first: int,
        live: int,
        positions: list[int],
        visible: list[tuple[int, int]] | None,
    ) -> View:
        """Return the view of the `live` cells from the `first`-oldest on.

        positions: of each query. visible: for each query, the range (first, end) of the segment's
        cells that it sees; None if all queries see all of these cells.
        """
        slots = segment.slots(first, live)
        span = slots[0] if len(slots) == 1 else slice(0, segment.capacity)
        if positions not in self.query_positions:
            self.query_positions.append(positions)
        return View(
            slots=segment.block.slots,
            span=span,
            rotation=self.query_positions.index(positions),
            bias=_bias(segment, span, first, live, visible),
            origin=segment.block.origin,
        )

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        """Store the new cells of a layer and attend to all that its queries see.

        layer: index in this cache. q: `[n, heads, head_dim]`. k, v: `[n, kv_heads, head_dim]`, or
        None for a layer that reads the cells of another one. All are unrotated: positions are the
        step's concern. Returns `[n, heads * head_dim]`.
        """
        raise NotImplementedError

    def commit(self, serial: int) -> None:
        """Add the new cells to the cache; the first one's token has that serial."""
        raise NotImplementedError

    def observe(self, layer: int, q: Tensor) -> None:
        """Record the queries of a layer, `[n, heads, head_dim]`, if they are wanted."""
        if self.queries is not None:
            self.queries[layer].copy_(q)

    def _rotated(self, layer: int, q: Tensor) -> list[Tensor]:
        """Return the queries rotated by each of the step's rotations."""
        return [self.attention.rope.rotate_layer(layer, q, rotation) for rotation in self.rotations]

    def _attend_views(self, layer: int, queries: list[Tensor]) -> list[Part]:
        return [view.attend(layer, queries[view.rotation], self.attention) for view in self.views]


def _bias(
    segment: Segment, span: slice, first: int, live: int, visible: list[tuple[int, int]] | None
) -> Tensor | None:
    """Return the bias `[n, cells]` of the slots of `span`; None if every query sees every cell."""
    if visible is None and live == span.stop - span.start:
        return None
    slots = torch.arange(span.start, span.stop, dtype=torch.int64, device="cpu")
    # 0 for the oldest cell. A cell that is being written comes last, whether its slot was free or
    # that of an evicted cell.
    order = (slots - segment.start - first) % segment.capacity + first
    bounds = torch.tensor(visible or [(first, first + live)], dtype=torch.int64, device="cpu")
    seen = (order >= bounds[:, :1]) & (order < bounds[:, 1:])
    seen &= (order >= first) & (order < first + live)
    return hiding_bias(~seen).to(segment.layout.device)


class DecodeStep(Step):
    """A step of one token, whose cell is written first, into the slot where it will stay.

    slot: of the newest segment.
    slot_tensors: the key and value in that slot, both `[layers, kv_heads, head_dim]`.
    in_full_ring: whether the slot is that of the oldest cell.
    """

    def __init__(
        self, segments: Sequence[Segment], window: Window, time: int, attention: AttentionConfig
    ):
        newest = segments[-1]
        self.slot = newest.next_slot()
        slots = newest.block.slots
        self.slot_tensors = [x[:, :, self.slot] for x in (slots.stored_keys, slots.stored_values)]
        self.in_full_ring = newest.length == newest.capacity
        super().__init__(segments, window, time, 1, attention)

    def _view_segment(self, segment: Segment, rank: int) -> View | None:
        if segment is not self.newest:
            return super()._view_segment(segment, rank)
        # The new cell counts as written; in a full ring, it has replaced the oldest.
        first = 0 if segment.anchor else max(0, self.evicted[0] - rank)
        live = segment.length + 1 - first
        return self._view(segment, first, live, self.query_positions[0], None)

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        self.observe(layer, q)
        if k is not None and v is not None:
            key = self.attention.rope.rotate_layer(layer, k, self.rotations[0])[0]
            self.write(layer, key, v[0])
        part = combine(self._attend_views(layer, self._rotated(layer, q)))
        return merge_heads(self.attention.with_sinks(layer, part, 1).out, 1).to(q.dtype)

    @cached_property
    def _layer_slots(self) -> list[tuple[KVTensor, ...]]:
        return [x.unbind() for x in self.slot_tensors]

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Write the new cell of a layer; key and value: `[kv_heads, head_dim]`, key rotated."""
        keys, values = self._layer_slots
        copy_stored(keys[layer], key)
        copy_stored(values[layer], value)

    def commit(self, serial: int) -> None:
        self.window.forget(self.segments, max(0, self.evicted[-1] - self.window.spare))
        self.newest.occupy(self.slot, self.query_positions[0][0], serial)


class ChunkStep(Step):
    """A step of several tokens, whose cells are kept apart until every layer has been through.

    So the first tokens still see old cells that the last ones do not.

    new_cells: their cells.
    own_bias: `[n, n]` among the new tokens; None if each query sees all new tokens before it.
    log_sums: `[layers, heads, n]` float32 to store the natural log of the sum in each query's
        softmax denominator; None if it is not wanted.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        window: Window,
        time: int,
        count: int,
        attention: AttentionConfig,
    ):
        super().__init__(segments, window, time, count, attention)
        self._held = sum(s.length for s in segments if not s.anchor)
        self.new_cells = Cells.zeros(self.newest.layout.plain, count)
        self.log_sums: Tensor | None = None
        self.own_bias = self._banded_bias() if self.evicted[-1] > self._held else None

    def _banded_bias(self) -> Tensor:
        """Return `[n, n]` that hides the oldest cells of a chunk longer than the window."""
        order = torch.arange(self.count, dtype=torch.int64, device="cpu")
        floors = torch.tensor(self.evicted, dtype=torch.int64, device="cpu") - self._held
        seen = (order <= order[:, None]) & (order >= floors[:, None])
        return hiding_bias(~seen).to(self.new_cells.keys.device)

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        self.observe(layer, q)
        keys, values = self.new_cells.keys[layer], self.new_cells.values[layer]
        if k is not None and v is not None:
            rotated = self.attention.rope.rotate_layer(layer, k, self.rotations[0])
            keys.copy_(rotated.transpose(0, 1))
            values.copy_(v.transpose(0, 1))
        queries = self._rotated(layer, q)
        own = attend_cells(
            queries[0],
            keys,
            values,
            scale=self.attention.scale,
            bias=self.own_bias,
            causal=self.own_bias is None,
            softcap=self.attention.softcap,
        )
        part = combine([own, *self._attend_views(layer, queries)])
        part = self.attention.with_sinks(layer, part, self.count)
        if self.log_sums is not None:
            self.log_sums[layer] = part.log_sum.transpose(0, 1).flatten(0, 1)
        return merge_heads(part.out, self.count).to(q.dtype)

    def commit(self, serial: int) -> None:
        positions = torch.tensor(self.query_positions[0], dtype=torch.int64, device="cpu")
        serials = torch.arange(serial, serial + self.count, dtype=torch.int64, device="cpu")
        dropped = max(0, self.evicted[-1] - self.window.spare)
        self.window.forget(self.segments, min(dropped, self._held))
        dropped_new = max(0, dropped - self._held)  # of the new cells themselves
        new = Cells(self.new_cells.keys, self.new_cells.values, positions, serials)
        self.newest.append(new.part(slice(dropped_new, None)))
        for segment in self.segments:
            if segment.anchor:
                segment.map = segment.map.closer(dropped_new)

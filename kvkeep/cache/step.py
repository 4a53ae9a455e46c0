"""One forward's view of a cache: what each query sees, prepared once and used by every layer.

A step adds `count` tokens at times `time ... time + count - 1` to the newest segment. Nothing of
it counts until `commit`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import torch
from torch import Tensor

from kvkeep.cache.attending import AttentionConfig
from kvkeep.cache.attention import Part, attend_cells, combine, hiding, rows
from kvkeep.cache.block import Cells
from kvkeep.cache.layers import LayerAttention, LayerDispatch, LayerPlacement
from kvkeep.cache.quantised import KVTensor, copy_stored
from kvkeep.cache.ragged import Ragged
from kvkeep.cache.rope import Rotation
from kvkeep.cache.segment import Segment
from kvkeep.cache.window import Window


@dataclass(frozen=True)
class View:
    """KVTensor cells as the queries of this step see them.

    slots, span: the storage that they lie in, and where in it. origin: the place of its slot 0.
    rotation: which of the step's rotations the queries take towards these cells.
    bias: `[n, cells]` float32, or None where every query sees every cell, as of ragged ones.
    """

    slots: Cells
    span: slice
    rotation: int
    bias: Tensor | None
    origin: int = 0

    @cached_property
    def keys(self) -> tuple[KVTensor, ...]:
        """For each layer `[kv_heads, cells, head_dim]`, unless they are ragged."""
        return self.slots.stored_keys[:, :, self.span].unbind()

    @cached_property
    def values(self) -> tuple[KVTensor, ...]:
        """For each layer `[kv_heads, cells, head_dim]`."""
        return self.slots.stored_values[:, :, self.span].unbind()

    @cached_property
    def cell_bias(self) -> tuple[Tensor | None, ...]:
        """For each layer `[kv_heads, cells]` float32, or None."""
        return self.slots.biases(self.span)

    def attend(self, layer: int, q: Tensor, attention: AttentionConfig) -> Part:
        """q: `[n, heads, head_dim]`, rotated. As `attend_cells`."""
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
    """What decode and chunk steps share: times, rotations, and views of stored cells.

    Window cells are seen by rank, 0 for the oldest held. The i-th new token evicts the first
    `evicted[i]` of them; those are hidden from it, and what lies before them is that much closer.

    sampled: whether the model has just chosen the token, or else it was given from outside, as a
        prompt is. Nothing in a cache depends on it, but which weights are read may.
    local: the step of the local layers' cache, where the decoder has such layers. placements: where
        each of its layers has its cells.
    recurrent: states of the decoder's layers that have such in the place of cells, by name. Who
        computes the step puts others there; none is written to.
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
        # Rotation 0 is that of the new tokens themselves.
        self.query_positions: list[list[int]] = [[self.newest.map(t) for t in self.times]]
        self.views: list[View] = []
        self.queries: Tensor | None = None  # [layers, n, heads, head_dim], where they are wanted
        rank = 0
        for segment in segments:
            view = self._look_at(segment, rank)
            if view is not None:
                self.views.append(view)
            rank += 0 if segment.anchor else segment.length

    @property
    def layer_attention(self) -> LayerAttention:
        """What a forward asks, of whichever layer of the decoder."""
        return self if self.local is None else LayerDispatch(self.placements, self, self.local)

    @property
    def quantised(self) -> bool:
        """Whether any cells are, of those that are looked at or those that will be written."""
        seen = (view.slots.quantised for view in self.views)
        return self.newest.layout.quantised or any(seen)

    @cached_property
    def rotations(self) -> list[Rotation]:
        """One for each entry of `where`, the positions that the queries take."""
        return [self.attention.rope.at(where) for where in self.query_positions]

    def _look_at(self, segment: Segment, rank: int) -> View | None:
        """What the queries see of a segment; `rank` window cells lie before its first."""
        if not segment.length:
            return None
        if segment.anchor:
            before = None if self.window.moves else rank
            own = segment.length - segment.leaving
            shown = [(0, own + evicted) for evicted in self.evicted] if segment.leaving else None
            return self._view(segment, 0, segment.length, self._places(segment, before), shown)
        first = max(0, self.evicted[0] - rank)
        live = segment.length - first
        if live <= 0:
            return None
        seen = [(evicted - rank, segment.length) for evicted in self.evicted]
        some_hidden = seen[-1][0] > first
        where = self._places(segment, None)
        return self._view(segment, first, live, where, seen if some_hidden else None)

    def _places(self, segment: Segment, rank: int | None) -> list[int]:
        """Where each query stands towards a segment.

        rank: for an anchor, the window cells before it. What is evicted beyond them lay between it
        and the query.
        """
        gone = [0 if rank is None else max(0, evicted - rank) for evicted in self.evicted]
        return [segment.map(t) - n for t, n in zip(self.times, gone, strict=True)]

    def _view(
        self,
        segment: Segment,
        first: int,
        live: int,
        where: list[int],
        seen: list[tuple[int, int]] | None,
    ) -> View:
        """The `live` cells from the `first`-oldest on.

        seen: which of the segment's cells query i sees, from and up to; None for all of these.
        """
        slots = segment.slots(first, live)
        span = slots[0] if len(slots) == 1 else slice(0, segment.capacity)
        if where not in self.query_positions:
            self.query_positions.append(where)
        return View(
            slots=segment.block.slots,
            span=span,
            rotation=self.query_positions.index(where),
            bias=_bias(segment, span, first, live, seen),
            origin=segment.block.origin,
        )

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        """Stores the new cells of a layer and attends to all that its queries see.

        layer: of those that the cache is of. q: `[n, heads, head_dim]`; k, v: `[n, kv_heads,
        head_dim]`, or None of a layer that looks at what another has stored; unrotated: positions
        are the step's business. Returns `[n, heads * head_dim]`.
        """
        raise NotImplementedError

    def commit(self, serial: int) -> None:
        """Keeps the new cells, of which the first is of the token with that serial."""
        raise NotImplementedError

    def observe(self, layer: int, q: Tensor) -> None:
        """Notes the queries of a layer, `[n, heads, head_dim]`, if they are wanted."""
        if self.queries is not None:
            self.queries[layer].copy_(q)

    def _rotated(self, layer: int, q: Tensor) -> list[Tensor]:
        """Queries, as they stand in each of the step's rotations."""
        return [self.attention.rope.rotate_layer(layer, q, rotation) for rotation in self.rotations]

    def _attend_views(self, layer: int, queries: list[Tensor]) -> list[Part]:
        return [view.attend(layer, queries[view.rotation], self.attention) for view in self.views]


def _bias(
    segment: Segment, span: slice, first: int, live: int, seen: list[tuple[int, int]] | None
) -> Tensor | None:
    """`[n, cells]` for the slots of `span`; None where every query sees every cell."""
    if seen is None and live == span.stop - span.start:
        return None
    slots = torch.arange(span.start, span.stop, dtype=torch.int64, device="cpu")
    # 0 for the oldest cell; the one being written comes last, in the slot of an evicted one or not.
    order = (slots - segment.start - first) % segment.capacity + first
    bounds = torch.tensor(seen or [(first, first + live)], dtype=torch.int64, device="cpu")
    visible = (order >= bounds[:, :1]) & (order < bounds[:, 1:])
    visible &= (order >= first) & (order < first + live)
    return hiding(~visible).to(segment.layout.device)


class DecodeStep(Step):
    """One token. Its cell is written first, into the slot where it will stay.

    slot: of the newest segment. cells: its key and value, both `[layers, kv_heads, head_dim]`.
    in_full_ring: the cell takes the place of the oldest one.
    """

    def __init__(
        self, segments: Sequence[Segment], window: Window, time: int, attention: AttentionConfig
    ):
        newest = segments[-1]
        self.slot = newest.next_slot()
        block = newest.block.slots
        self.cells = [x[:, :, self.slot] for x in (block.stored_keys, block.stored_values)]
        self.in_full_ring = newest.length == newest.capacity
        super().__init__(segments, window, time, 1, attention)

    def _look_at(self, segment: Segment, rank: int) -> View | None:
        if segment is not self.newest:
            return super()._look_at(segment, rank)
        # The new cell is there already, in a full ring in the place of the oldest.
        first = 0 if segment.anchor else max(0, self.evicted[0] - rank)
        return self._view(segment, first, segment.length + 1 - first, self.query_positions[0], None)

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        self.observe(layer, q)
        if k is not None and v is not None:
            self.write(
                layer, self.attention.rope.rotate_layer(layer, k, self.rotations[0])[0], v[0]
            )
        found = combine(self._attend_views(layer, self._rotated(layer, q)))
        return rows(self.attention.with_sinks(layer, found, 1).out, 1).to(q.dtype)

    @cached_property
    def _cells_of_layers(self) -> list[tuple[KVTensor, ...]]:
        return [x.unbind() for x in self.cells]

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Puts the new cell into its slot; key and value: `[kv_heads, head_dim]`, key rotated."""
        keys, values = self._cells_of_layers
        copy_stored(keys[layer], key)
        copy_stored(values[layer], value)

    def commit(self, serial: int) -> None:
        self.window.forget(self.segments, max(0, self.evicted[-1] - self.window.spare))
        self.newest.occupy(self.slot, self.query_positions[0][0], serial)


class ChunkStep(Step):
    """Several tokens. Their cells are held apart until every layer has been through.

    new: their cells. own_bias: `[n, n]`, or None where each query sees what came before it.
    log_sums: `[layers, heads, n]` float32, where they are wanted: the natural log of the sum that
        each query's softmax divides by.
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
        self.new = Cells.empty(self.newest.layout.plain, count)
        self.log_sums: Tensor | None = None
        self.own_bias = self._band() if self.evicted[-1] > self._held else None

    def _band(self) -> Tensor:
        """`[n, n]`: a chunk longer than the window hides its own oldest cells from its newest."""
        order = torch.arange(self.count, dtype=torch.int64, device="cpu")
        floors = torch.tensor(self.evicted, dtype=torch.int64, device="cpu") - self._held
        seen = (order <= order[:, None]) & (order >= floors[:, None])
        return hiding(~seen).to(self.new.keys.device)

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        self.observe(layer, q)
        keys, values = self.new.keys[layer], self.new.values[layer]
        if k is not None and v is not None:
            turned = self.attention.rope.rotate_layer(layer, k, self.rotations[0])
            keys.copy_(turned.transpose(0, 1))
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
        found = combine([own, *self._attend_views(layer, queries)])
        found = self.attention.with_sinks(layer, found, self.count)
        if self.log_sums is not None:
            self.log_sums[layer] = found.log_sum.transpose(0, 1).flatten(0, 1)
        return rows(found.out, self.count).to(q.dtype)

    def commit(self, serial: int) -> None:
        positions = torch.tensor(self.query_positions[0], dtype=torch.int64, device="cpu")
        serials = torch.arange(serial, serial + self.count, dtype=torch.int64, device="cpu")
        gone = max(0, self.evicted[-1] - self.window.spare)
        self.window.forget(self.segments, min(gone, self._held))
        unseen = max(0, gone - self._held)  # of the new cells themselves
        new = Cells(self.new.keys, self.new.values, positions, serials)
        self.newest.append(new.part(slice(unseen, None)))
        for segment in self.segments:
            if segment.anchor:
                segment.map = segment.map.closer(unseen)

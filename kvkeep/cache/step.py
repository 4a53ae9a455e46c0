"""One forward's view of a cache: what each query sees, prepared once and used by every layer.

A step adds `count` tokens at times `time ... time + count - 1` to the newest segment. Nothing of
it counts until `commit`; `abort` leaves the cache as it was.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvkeep.cache.attention import HIDDEN, Part, attend_cells, combine, rows
from kvkeep.cache.rope import Rope, Rotation, rotate
from kvkeep.cache.segment import Segment


@dataclass(frozen=True)
class View:
    """Stored cells as the queries of this step see them.

    keys, values: for each layer `[kv_heads, cells, head_dim]`.
    rotation: which of the step's rotations the queries take towards these cells.
    bias: `[n, cells]` float32, or None where every query sees every cell.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    rotation: int
    bias: Tensor | None


class Step:
    """What decode and chunk steps share: times, rotations, and views of stored cells.

    Window segments are seen by rank: the i-th new token sees the newest `window` cells of those
    held and those up to itself, so it outruns the first `held + i + 1 - window`.
    """

    def __init__(self, segments: list[Segment], time: int, count: int, rope: Rope, scale: float):
        self.segments = segments
        self.newest = segments[-1]
        self.count = count
        self.scale = scale
        self.times = range(time, time + count)
        # Rotation 0 is that of the new tokens themselves: the newest segment has m(t) = t.
        self._where: list[list[int]] = [list(self.times)]
        self.held = sum(s.length for s in segments if s.window is not None)
        self.views: list[View] = []
        rank = 0
        for segment in segments:
            view = self._look_at(segment, rank)
            if view is not None:
                self.views.append(view)
            rank += segment.length if segment.window is not None else 0
        self.rotations: list[Rotation] = [rope.at(where) for where in self._where]

    def _look_at(self, segment: Segment, rank: int) -> View | None:
        """What the queries see of a segment; `rank` window cells lie before its first."""
        first = max(0, self._outrun(segment, 0) - rank)
        live = segment.length - first
        if live <= 0:
            return None
        limits = None
        if self._outrun(segment, self.count - 1) > rank + first:
            limits = [self._outrun(segment, i) - rank for i in range(self.count)]
        return self._view(segment, first, live, limits)

    def _outrun(self, segment: Segment, query: int) -> int:
        """How many of the window cells held the query no longer sees."""
        return 0 if segment.window is None else self.held + query + 1 - segment.window

    def _view(self, segment: Segment, first: int, live: int, limits: list[int] | None) -> View:
        """The `live` cells from the `first`-oldest on; query i sees those from `limits[i]` on."""
        slots = segment.slots(first, live)
        span = slots[0] if len(slots) == 1 else slice(0, segment.capacity)
        return View(
            keys=segment.block.keys[:, :, span].unbind(0),
            values=segment.block.values[:, :, span].unbind(0),
            rotation=self._rotation_towards(segment),
            bias=_bias(segment, span, first, live, limits),
        )

    def _rotation_towards(self, segment: Segment) -> int:
        where = [segment.map(t) for t in self.times]
        if where not in self._where:
            self._where.append(where)
        return self._where.index(where)

    def _attend_views(self, layer: int, q: Tensor) -> list[Part]:
        queries = [rotate(q, rotation) for rotation in self.rotations]
        return [
            attend_cells(
                queries[view.rotation],
                view.keys[layer],
                view.values[layer],
                scale=self.scale,
                bias=view.bias,
                causal=False,
            )
            for view in self.views
        ]

    def _forget(self) -> None:
        """Lets the oldest window cells go that the new ones have pushed out."""
        window = [s for s in self.segments if s.window is not None]
        excess = sum(s.length for s in window) - (self.newest.window or 0)
        for segment in window:
            if excess > 0:
                gone = min(excess, segment.length)
                segment.drop_oldest(gone)
                excess -= gone


def _bias(
    segment: Segment, span: slice, first: int, live: int, limits: list[int] | None
) -> Tensor | None:
    """`[n, cells]` for the slots of `span`; None where every query sees every cell."""
    if limits is None and live == span.stop - span.start:
        return None
    slots = torch.arange(span.start, span.stop)
    order = (slots - segment.start) % segment.capacity  # 0 for the oldest cell
    floors = torch.tensor([first] if limits is None else limits)
    seen = (order >= floors[:, None]) & (order >= first) & (order < first + live)
    return torch.where(seen, 0.0, HIDDEN).to(segment.layout.device)


class DecodeStep(Step):
    """One token. Its cell is written first, into the slot where it will stay."""

    def __init__(self, segments: list[Segment], time: int, rope: Rope, scale: float):
        newest = segments[-1]
        self._slot = newest.next_slot()
        self._cells = [x[:, :, self._slot] for x in (newest.block.keys, newest.block.values)]
        overwrites = newest.length == newest.capacity
        self._overwritten = [x.clone() for x in self._cells] if overwrites else None
        self._key_cells, self._value_cells = (x.unbind(0) for x in self._cells)
        super().__init__(segments, time, 1, rope, scale)

    def _look_at(self, segment: Segment, rank: int) -> View | None:
        if segment is not self.newest:
            return super()._look_at(segment, rank)
        # The new cell is there already, in a full ring in the place of the oldest.
        return self._view(segment, 0, min(segment.length + 1, segment.capacity), None)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self._key_cells[layer].copy_(rotate(k, self.rotations[0])[0])
        self._value_cells[layer].copy_(v[0])
        return rows(combine(self._attend_views(layer, q)).out, 1).to(q.dtype)

    def commit(self) -> None:
        self.newest.occupy(self._slot, self.times[0])
        self._forget()

    def abort(self) -> None:
        if self._overwritten is not None:
            for cells, before in zip(self._cells, self._overwritten, strict=True):
                cells.copy_(before)


class ChunkStep(Step):
    """Several tokens. Their cells are held apart until every layer has been through."""

    def __init__(self, segments: list[Segment], time: int, count: int, rope: Rope, scale: float):
        super().__init__(segments, time, count, rope, scale)
        layout, window = self.newest.layout, self.newest.window
        shape = (layout.layers, layout.kv_heads, count, layout.head_dim)
        self._keys = torch.empty(shape, dtype=layout.dtype, device=layout.device)
        self._values = torch.empty_like(self._keys)
        self._own_bias = self._band(window) if window is not None and count > window else None

    def _band(self, window: int) -> Tensor:
        """`[n, n]`: a chunk longer than the window hides its own oldest cells from its newest."""
        seen = torch.ones(self.count, self.count, dtype=torch.bool, device=self._keys.device)
        seen = seen.tril() & ~seen.tril(-window)
        return torch.where(seen, 0.0, HIDDEN)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self._keys[layer], self._values[layer]
        keys.copy_(rotate(k, self.rotations[0]).transpose(0, 1))
        values.copy_(v.transpose(0, 1))
        own = attend_cells(
            rotate(q, self.rotations[0]),
            keys,
            values,
            scale=self.scale,
            bias=self._own_bias,
            causal=self._own_bias is None,
        )
        parts = [own, *self._attend_views(layer, q)]
        return rows(combine(parts).out, self.count).to(q.dtype)

    def commit(self) -> None:
        self.newest.append(self._keys, self._values, torch.tensor(self.times))
        self._forget()

    def abort(self) -> None:
        """Nothing was written where the cache could see it."""

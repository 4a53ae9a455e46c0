"""One forward's view of a cache: what each query sees, prepared once and used by every layer.

A step adds `count` tokens at times `time ... time + count - 1` to the newest segment. Nothing of
it counts until `commit`; `abort` leaves the cache as it was.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvkeep.cache.attention import HIDDEN, attend_cells, combine, rows
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
    """What decode and chunk steps share: times, rotations, and views of stored cells."""

    def __init__(self, segments: list[Segment], time: int, count: int, rope: Rope, scale: float):
        self.newest = segments[-1]
        self.count = count
        self.scale = scale
        self.times = range(time, time + count)
        # Rotation 0 is that of the new tokens themselves: the newest segment has m(t) = t.
        self._where: list[list[int]] = [list(self.times)]
        self.views = self._look_at(segments)
        self.rotations: list[Rotation] = [rope.at(where) for where in self._where]

    def _look_at(self, segments: list[Segment]) -> list[View]:
        return [self._view(s, s.length) for s in segments if s.length]

    def _view(self, segment: Segment, live: int) -> View:
        """Slots `0 ... span - 1`: all that the run of `live` cells touches."""
        wraps = segment.start + live > segment.capacity
        span = segment.capacity if wraps else segment.start + live
        return View(
            keys=segment.keys[:, :, :span].unbind(0),
            values=segment.values[:, :, :span].unbind(0),
            rotation=self._rotation_towards(segment),
            bias=self._bias(segment, live, span),
        )

    def _rotation_towards(self, segment: Segment) -> int:
        where = [segment.map(t) for t in self.times]
        if where not in self._where:
            self._where.append(where)
        return self._where.index(where)

    def _bias(self, segment: Segment, live: int, span: int) -> Tensor | None:
        """`[n, span]`: hides slots with no live cell, and cells that a query has outrun."""
        outrun = self.count > 1 and self._outruns(segment)
        if live == span and not outrun:
            return None
        seen = torch.zeros(span, dtype=torch.bool, device=segment.positions.device)
        for slot in segment.slots(0, live):
            seen[slot] = True
        if outrun:
            floor = [segment.oldest_visible(t) for t in self.times]
            floors = torch.tensor(floor, dtype=torch.int64, device=seen.device)
            seen = seen & (segment.positions[:span] >= floors[:, None])
        return torch.where(seen, 0.0, HIDDEN).expand(self.count, span)

    def _outruns(self, segment: Segment) -> bool:
        """Whether a query of this step no longer sees the oldest cell."""
        oldest = segment.oldest_visible(self.times[-1])
        return oldest is not None and segment.first_position < oldest


class DecodeStep(Step):
    """One token. Its cell is written first, into the slot where it will stay."""

    def __init__(self, segments: list[Segment], time: int, rope: Rope, scale: float):
        newest = segments[-1]
        newest.reserve(newest.length + 1)
        self._slot = newest.slots(newest.length, 1)[0].start
        self._live = newest.length if newest.full else newest.length + 1
        self._key_cells = newest.keys[:, :, self._slot].unbind(0)
        self._value_cells = newest.values[:, :, self._slot].unbind(0)
        self._overwritten = (
            (newest.keys[:, :, self._slot].clone(), newest.values[:, :, self._slot].clone())
            if newest.full
            else None
        )
        super().__init__(segments, time, 1, rope, scale)

    def _look_at(self, segments: list[Segment]) -> list[View]:
        older = super()._look_at(segments[:-1])
        return [*older, self._view(segments[-1], self._live)]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self._key_cells[layer].copy_(rotate(k, self.rotations[0])[0])
        self._value_cells[layer].copy_(v[0])
        queries = [rotate(q, rotation) for rotation in self.rotations]
        parts = [
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
        return rows(combine(parts).out, 1).to(q.dtype)

    def commit(self) -> None:
        self.newest.occupy(self._slot, self.times[0])

    def abort(self) -> None:
        if self._overwritten is not None:
            keys, values = self._overwritten
            self.newest.keys[:, :, self._slot] = keys
            self.newest.values[:, :, self._slot] = values


class ChunkStep(Step):
    """Several tokens. Their cells are held apart until every layer has been through."""

    def __init__(
        self, segments: list[Segment], time: int, count: int, rope: Rope, scale: float
    ):
        super().__init__(segments, time, count, rope, scale)
        newest = segments[-1]
        shape = (newest.layout.layers, newest.layout.kv_heads, count, newest.layout.head_dim)
        self._keys = newest.keys.new_empty(shape)
        self._values = newest.values.new_empty(shape)
        self._own_bias = self._band(newest.limit) if count > newest.limit else None

    def _band(self, limit: int) -> Tensor:
        """`[n, n]`: a chunk longer than the window hides its own oldest cells from its newest."""
        seen = torch.ones(self.count, self.count, dtype=torch.bool, device=self._keys.device)
        seen = seen.tril() & ~seen.tril(-limit)
        return torch.where(seen, 0.0, HIDDEN)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self._keys[layer], self._values[layer]
        keys.copy_(rotate(k, self.rotations[0]).transpose(0, 1))
        values.copy_(v.transpose(0, 1))
        queries = [rotate(q, rotation) for rotation in self.rotations]
        own, causal = self._own_bias, self._own_bias is None
        parts = [
            attend_cells(queries[0], keys, values, scale=self.scale, bias=own, causal=causal)
        ]
        for view in self.views:
            parts.append(
                attend_cells(
                    queries[view.rotation],
                    view.keys[layer],
                    view.values[layer],
                    scale=self.scale,
                    bias=view.bias,
                    causal=False,
                )
            )
        return rows(combine(parts).out, self.count).to(q.dtype)

    def commit(self) -> None:
        positions = torch.tensor(self.times, dtype=torch.int64, device=self._keys.device)
        self.newest.append(self._keys, self._values, positions)

    def abort(self) -> None:
        """Nothing was written where the cache could see it."""

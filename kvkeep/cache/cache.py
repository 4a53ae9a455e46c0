"""The KV cache: segments, the clock, and one step at a time."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from kvkeep.cache.block import Layout
from kvkeep.cache.rope import Rope
from kvkeep.cache.segment import Segment, runs
from kvkeep.cache.step import ChunkStep, DecodeStep


class KVCache:
    """What a decoder remembers, as segments of cells.

    segments: oldest first; new cells go to the last one. Which segments there are, and what
        happens when the budget is reached, is a policy's choice.
    time: tokens evaluated so far, which is the position of the next token.
    """

    def __init__(self, layout: Layout, rope: Rope, scale: float):
        self.layout = layout
        self.rope = rope
        self.scale = scale
        self.segments: list[Segment] = []
        self.time = 0
        self._step: DecodeStep | ChunkStep | None = None

    @property
    def cells(self) -> int:
        """Live cells of each KV head in each layer."""
        return sum(segment.length for segment in self.segments)

    @property
    def nbytes(self) -> int:
        """Bytes that keys and values take in memory, storage not yet filled included."""
        return sum(segment.block.nbytes for segment in self.segments)

    @contextmanager
    def step(self, count: int) -> Iterator[None]:
        """A forward of `count` tokens into the last segment: all of it, or nothing.

        Inside, each layer calls `attend` once. On leaving, the new cells are kept; on an
        exception the cache is as it was before.
        """
        kind = (self.segments, self.time)
        step = (
            DecodeStep(*kind, self.rope, self.scale)
            if count == 1
            else ChunkStep(*kind, count, self.rope, self.scale)
        )
        self._step = step
        try:
            yield
        except BaseException:
            step.abort()
            raise
        else:
            step.commit()
            self.time += count
        finally:
            self._step = None
            self.segments = [s for s in self.segments if s.length]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Stores the new cells of a layer and attends to all that its queries see.

        q: `[n, heads, head_dim]`; k, v: `[n, kv_heads, head_dim]`; unrotated: positions are the
        cache's business. Returns `[n, heads * head_dim]`.
        """
        assert self._step is not None, "attend belongs inside a step"
        return self._step.attend(layer, q, k, v)

    def read(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Keys and values of `count` cells from the `first`-oldest on, copied.

        Each `[layers, kv_heads, count, head_dim]`.
        """
        parts = [s.read(at, n)[:2] for s, at, n in runs(self.segments, first, count)]
        keys, values = zip(*parts, strict=True)
        return torch.cat(keys, 2), torch.cat(values, 2)

    def fork(self) -> "KVCache":
        """A cache with the same cells that goes its own way; memory is shared."""
        fork = KVCache(self.layout, self.rope, self.scale)
        fork.segments, fork.time = [s.branch() for s in self.segments], self.time
        return fork

    @property
    def rewindable(self) -> int:
        """How many of the newest tokens are held without a gap."""
        held, expected = 0, self.time - 1
        for segment in reversed(self.segments):
            if segment.length and segment.last_position != expected:
                break
            held += segment.length
            expected -= segment.length
        return held

    def drop_newest(self, count: int) -> None:
        """Takes the newest `count` cells (at most `rewindable`) and their time back."""
        self.time -= count
        while count:
            segment = self.segments[-1]
            taken = min(count, segment.length)
            segment.drop_newest(taken)
            count -= taken
            if not segment.length:
                self.segments.pop()

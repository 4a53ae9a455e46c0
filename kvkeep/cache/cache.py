"""The KV cache: segments, the clock, and one step at a time."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from kvkeep.cache.attention import AttentionConfig
from kvkeep.cache.block import Cells, UndoLog
from kvkeep.cache.cell_runs import read_cells, reassign_anchors
from kvkeep.cache.checkpoint import Checkpoint
from kvkeep.cache.layout import Layout
from kvkeep.cache.observer import Observer, Queries
from kvkeep.cache.rope import Rope
from kvkeep.cache.segment import Segment
from kvkeep.cache.shallow_copy import shallow_copy
from kvkeep.cache.state import CacheState
from kvkeep.cache.step import ChunkStep, DecodeStep, LayerPlacement, Step
from kvkeep.cache.storage import merge_complete_segments, nbytes, trim
from kvkeep.cache.window import Window


class KVCache:
    """The keys and values of a decoder, as segments of cells.

    Constructor arguments, which stay the same in all copies of a cache:

    layout: of cells in the window.
    far_layout: of anchors, which may have other bits; None for `layout`.
    local_cache: of layers that see only a window (local attention, arXiv:2004.05150), if there are
        such layers. It has its own segments and window, follows this cache's clock, and holds
        no more than its window under any policy.
    placements: of each decoder layer's cells; empty without local layers and state layers.

    State:

    segments: oldest first; new cells go to the last one. The policy decides which there are.
    window: the bound on cells that are not anchors.
    time: of the next token, and its position towards the newest segment; every token adds 1.
    serial: the serial number of the next token; no number is used twice.
    observer: records the newest queries, if a method needs them.
    recurrent_states: of layers that have no cells (linear attention, convolution), by name. They
        summarise all tokens so far, and no token can be removed from them.
    """

    def __init__(
        self,
        layout: Layout,
        attention: AttentionConfig,
        far_layout: Layout | None = None,
        local_cache: "KVCache | None" = None,
        placements: Sequence[LayerPlacement] = (),
    ):
        self.layout = layout
        self.far_layout = far_layout or layout
        self.attention = attention
        self.local_cache = local_cache
        self.placements = placements
        self.observer: Observer | None = None
        self.segments: list[Segment] = []
        self.window = Window()
        self.time = 0
        self.serial = 0
        self.recurrent_states: Mapping[str, Tensor] = {}
        self._undo_log = UndoLog()

    def __repr__(self) -> str:
        return (
            f"<KVCache: {self.cells:,} cells in {len(self.segments)} segments, "
            f"{self.nbytes / 1e6:,.1f} MB>"
        )

    @property
    def rope(self) -> Rope:
        return self.attention.rope

    @property
    def scale(self) -> float:
        return self.attention.scale

    @property
    def cells(self) -> int:
        """Live cells of each KV head in each layer; of local layers, see `local_cache`."""
        return sum(segment.length for segment in self.segments)

    @property
    def reach(self) -> int:
        """The distance from the next token to the oldest cell."""
        if not self.segments or not self.segments[0].length:
            return 0
        oldest = self.segments[0]
        positions = oldest.positions()
        if not oldest.compressed:  # else each head has a different oldest cell
            positions = positions[:1]
        return oldest.position_map(self.time) - int(positions.min())

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and states in memory, idle storage included."""
        states = sum(state.nbytes for state in self.recurrent_states.values())
        return nbytes(self.all_segments) + states

    @property
    def all_segments(self) -> list[Segment]:
        return [*self.segments, *(self.local_cache.segments if self.local_cache else ())]

    def serials(self) -> list[int]:
        """Return the serials of the live cells' tokens, oldest first."""
        return [serial for segment in self.segments for serial in segment.serials()]

    @contextmanager
    def step(self, count: int, sampled: bool = False) -> Iterator[DecodeStep | ChunkStep]:
        """Open a step of `count` tokens into the last segment.

        Inside the context, each layer calls the step's `attend` once. On leaving it, the new cells
        are committed. After an exception the cache must not be used: to get the old state back,
        step a `successor` and roll that back.

        sampled: whether the one token was sampled by the model itself; see `Step`.
        """
        step = self.open_step(count, sampled)
        yield step
        self.take_cells(step)
        self.take_results(step)

    def open_step(self, count: int, sampled: bool) -> DecodeStep | ChunkStep:
        """Return an open step; its forward, `take_cells` and `take_results` complete it."""
        step = self._new_step(count)
        step.sampled, step.recurrent_states = sampled, self.recurrent_states
        step.placements = self.placements
        if self.observer is not None:
            layout = self.layout
            shape = (layout.layers, count, self.attention.heads, layout.head_dim)
            step.queries = torch.empty(shape, dtype=layout.dtype, device=layout.device)
        if (local := self.local_cache) is not None:
            local.time, local.serial = self.time, self.serial
            local.open_local_window()
            step.local_step = local._new_step(count)
        return step

    def _new_step(self, count: int) -> DecodeStep | ChunkStep:
        step_class = DecodeStep if count == 1 else ChunkStep
        times = range(self.time, self.time + count)
        return step_class(self.segments, self.window, times, self.attention)

    def open_local_window(self) -> Segment:
        """Return the last segment of the cache of local layers, ready for the next cells."""
        assert self.window.capacity is not None
        newest = self.open_window(self.window.capacity)
        newest.grows_lazily = len(self.segments) > 1
        return newest

    def take_cells(self, step: Step) -> None:
        """Count the cells of a step, of local layers too, and evict what they exceed."""
        step.commit(self.serial)
        self.time += step.count
        self.serial += step.count
        for segment in self.segments:  # cells arrive as their originals are evicted
            arriving = segment.arriving_count - step.evicted_counts[-1]
            segment.arriving_count = max(0, arriving)
        self.drop_empty_segments()
        if self.local_cache is not None and step.local_step is not None:
            self.local_cache.take_cells(step.local_step)

    def take_results(self, step: Step) -> None:
        """Take the queries and the states that a step's forward has computed."""
        if self.observer is not None and step.queries is not None:
            self.observer.add(step.times.start, step.queries)
        self.recurrent_states = step.recurrent_states
        local_views = () if step.local_step is None else step.local_step.views
        for view in (*step.views, *local_views):
            view.release()

    def drop_empty_segments(self) -> None:
        self.segments = [segment for segment in self.segments if segment.length]

    def open_window(self, size: int) -> Segment:
        """Return the last segment, ready for the next cells of a window of up to `size`."""
        newest = self.segments[-1] if self.segments else None
        if newest is not None and not newest.is_anchor:
            if newest.reopen(size):
                return newest
            if not newest.frozen:
                # A ring of another size: cut into pieces that take no more cells, oldest first.
                self.segments[-1:] = newest.part(0, newest.length)
        return self.begin_segment(size)

    def unseal(self) -> None:
        """Allow the newest segments to take new cells; see `Segment.unseal`."""
        for cache in (self, self.local_cache):
            if cache is not None and cache.segments:
                cache.segments[-1].unseal()

    def begin_segment(self, limit: int, is_anchor: bool = False) -> Segment:
        """Append an empty segment as `append_segment` does, behind few others.

        These are merged if they have become too many, as after a chain of forks.
        """
        self.merge_complete_segments()
        return self.append_segment(limit, is_anchor)

    @torch.inference_mode()
    def merge_complete_segments(self) -> None:
        """Merge segments that take no more cells; see `storage.merge_complete_segments`."""
        self.segments = merge_complete_segments(self.segments)

    def append_segment(self, limit: int, is_anchor: bool = False) -> Segment:
        """Append an empty segment for up to `limit` cells; return it."""
        self.segments.append(Segment(self.layout_for(is_anchor), limit, is_anchor=is_anchor))
        return self.segments[-1]

    def observe(self, earlier: Queries | None = None) -> None:
        """Record the newest queries from now on. earlier: the queries of earlier tokens."""
        self.observer = Observer(earlier)

    def read(self, first: int, count: int) -> list[tuple[Segment, Cells]]:
        """Return copies of `count` cells from index `first` on, 0 the oldest; by segment."""
        return read_cells(self.segments, first, count)

    def read_window(self, count: int) -> list[tuple[Segment, Cells]]:
        """Return copies of the `count` oldest cells that are not anchors, by segment."""
        return read_cells([s for s in self.segments if not s.is_anchor], 0, count)

    def drop_newest(self, count: int) -> None:
        """Remove the newest `count` cells and set the clock back.

        Local layers no longer have the cells that these evicted, beyond their window's spare cells:
        their queries see fewer cells until the window is full again. Recurrent states are removed.
        A checkpoint has both.
        """
        if count:
            self.recurrent_states = {}
        self.time -= count
        if self.observer is not None:
            self.observer.drop_from(self.time)
        remaining = count
        for segment in reversed(self.segments):
            dropped = min(remaining, segment.length)
            segment.drop_newest(dropped)
            remaining -= dropped
        self.drop_empty_segments()
        if self.local_cache is not None:
            self.local_cache.drop_newest(min(count, self.local_cache.cells))

    def restart_clock(self) -> None:
        """Set the clock of an empty cache to 0. Recorded queries are of tokens that are gone.

        There may be some: an edit in place removes tokens, and leaves the clock as it is.
        """
        self.time = 0
        if self.observer is not None:
            self.observer = Observer()

    def checkpoint(self, num_tokens: int) -> Checkpoint:
        """Return a copy of what later tokens overwrite. num_tokens: all so far."""
        segments = () if self.local_cache is None else self.local_cache.segments
        shared = tuple(segment.share() for segment in segments)
        return Checkpoint(num_tokens, self.time, shared, self.recurrent_states)

    def load_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Take local windows and recurrent states from a checkpoint at the present time."""
        assert checkpoint.time == self.time, "a checkpoint of another time"
        if self.local_cache is not None:
            shared = [segment.share() for segment in checkpoint.local_segments]
            device = self.layout.device
            self.local_cache.segments = [s.normalise().to(device) for s in shared]
        states = checkpoint.recurrent_states
        self.recurrent_states = {name: x.to(self.layout.device) for name, x in states.items()}

    def take_overwritten(self, other: "KVCache") -> None:
        """Take local windows and recurrent states from a cache of the same text, used no longer."""
        self.recurrent_states = other.recurrent_states
        if self.local_cache is not None and other.local_cache is not None:
            self.local_cache.segments = other.local_cache.segments

    def evict_to(self, max_cells: int) -> None:
        """Evict the oldest cells of the window until at most `max_cells` cells are held."""
        self.window.evict(self.segments, max(0, self.cells - max_cells))
        self.drop_empty_segments()

    def successor(self) -> "KVCache":
        """Return a cache of the same cells and storage, to be changed instead of this one.

        Then either it is committed and replaces this cache, or it is rolled back and this cache is
        as it was.
        """
        log = UndoLog()
        return self._copy(lambda segment: segment.successor(log), log)

    def fork(self) -> "KVCache":
        """Return an independent cache of the same cells; memory is shared (copy-on-write)."""
        return self._copy(Segment.fork, UndoLog())

    def _copy(self, copy_segment: Callable[[Segment], Segment], undo_log: UndoLog) -> "KVCache":
        """Return a copy whose segments, also of the local cache, `copy_segment` makes."""
        copied = shallow_copy(self)
        copied._undo_log = undo_log
        copied.segments = [copy_segment(segment) for segment in self.segments]
        copied.observer = None if self.observer is None else self.observer.fork()
        if self.local_cache is not None:
            copied.local_cache = self.local_cache._copy(copy_segment, undo_log)
        return copied

    def commit(self) -> None:
        """Discard what a rollback to the previous cache would need."""
        self._undo_log.clear()
        for segment in self.all_segments:
            segment.protected = None

    @torch.inference_mode()
    def rollback(self) -> None:
        """Restore every overwritten cell of the previous cache. Can be repeated."""
        self._undo_log.rollback()

    def new_empty(self) -> "KVCache":
        """Return a cache for the same kind of cells that holds none."""
        local_cache = None if self.local_cache is None else self.local_cache.new_empty()
        if local_cache is not None and self.local_cache is not None:
            local_cache.window = self.local_cache.window
        return KVCache(self.layout, self.attention, self.far_layout, local_cache, self.placements)

    def layout_for(self, is_anchor: bool) -> Layout:
        return self.far_layout if is_anchor else self.layout

    def state(self) -> CacheState:
        """Return the contents. Cells are shared until one side must write to their storage."""
        observed = None if self.observer is None else self.observer.queries()
        states = self.recurrent_states
        segments = tuple(segment.share() for segment in self.segments)
        local_segments = () if self.local_cache is None else self.local_cache.state().segments
        return CacheState(
            segments, self.window, self.time, self.serial, observed, local_segments, states
        )

    def trim(self, budget: int) -> None:
        """Free storage that dropped cells have left; see `storage.trim`."""
        trim(self.segments, budget)
        if self.local_cache is not None:
            trim(self.local_cache.segments, self.local_cache.window.capacity or budget)

    def reassign_anchors(self, is_anchor: Callable[[Tensor, Tensor], Tensor]) -> None:
        """Decide anew which cells are anchors; see `cell_runs.reassign_anchors`."""
        self.segments = reassign_anchors(self.segments, is_anchor, self.layout_for)

"""The KV cache: segments, the clock, and one step at a time."""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby, islice

import torch
from torch import Tensor

from kvkeep.cache.attention import AttentionConfig
from kvkeep.cache.block import Cells, UndoLog
from kvkeep.cache.checkpoint import Checkpoint
from kvkeep.cache.checks import require
from kvkeep.cache.layout import Layout
from kvkeep.cache.observer import Observer, Queries
from kvkeep.cache.rope import Rope
from kvkeep.cache.segment import Segment
from kvkeep.cache.shallow_copy import shallow_copy
from kvkeep.cache.state import CacheState
from kvkeep.cache.step import ChunkStep, DecodeStep, LayerPlacement, Step
from kvkeep.cache.storage import merge_small_segments, nbytes, trim
from kvkeep.cache.window import Window


class RowSteps:
    """The steps of a cache's next tokens in one forward (`KVCache.row_steps`), oldest first."""

    def __init__(self, cache: "KVCache"):
        self._cache = cache
        self.steps: list[DecodeStep] = []
        # Of the cache and of that of local layers, after each token.
        self._segments: list[list[list[Segment]]] = []

    def add(self, step: DecodeStep, revertible: bool) -> None:
        """Add the step of the next token, whose cells the cache has just counted."""
        self.steps.append(step)
        if revertible:
            segments = [[shallow_copy(s) for s in cache.segments] for cache in self._caches]
            self._segments.append(segments)

    def keep(self, count: int) -> None:
        """Take back all tokens but the first `count`, at least 1, in a revertible context.

        The cells that they have overwritten are restored. Called after the forward.
        """
        dropped_count = len(self.steps) - count
        for index, cache in enumerate(self._caches):
            for row in range(count, len(self.steps)):
                step = self.steps[row].local_step if index else self.steps[row]
                if isinstance(step, DecodeStep) and step.overwritten is not None:
                    slots = step.newest_segment.block.slots
                    slots.write(
                        slice(step.slot, step.slot + 1), step.overwritten.part(slice(row, row + 1))
                    )
            cache.segments = self._segments[count - 1][index]
            cache.time -= dropped_count
            cache.serial -= dropped_count
            for segment in cache.segments:  # without the copies of cells that are not evicted
                segment.length -= segment.arriving_count
                segment.arriving_count = 0
            cache.drop_empty_segments()  # one that was opened for such copies alone
        self.steps = self.steps[:count]

    @property
    def _caches(self) -> "list[KVCache]":
        local = self._cache.local_cache
        return [self._cache] if local is None else [self._cache, local]


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
        step = self._open_step(count, sampled)
        yield step
        self._take_cells(step)
        self._take_results(step)

    @contextmanager
    def row_steps(
        self, count: int, sampled: bool = False, revertible: bool = False
    ) -> Iterator["RowSteps"]:
        """Open steps of the next `count` tokens, one of each, for one forward (`GroupStep`).

        The result is that of as many calls of `step`, one after another: each token sees the cells
        of those before it. Only the compiled kernels compute such a forward. Cells count as
        committed when the context begins; after an exception the cache must not be used, as in
        `step`.

        count: at most `row_capacity`; the last segment is open for as many. revertible: whether
            `RowSteps.keep` may be called in the context, to keep only the first of the tokens.
        """
        overwritten = self.segments[-1].prepare_slots(count)
        local, local_overwritten = self.local_cache, None
        if local is not None:
            local_overwritten = local._open_local_window().prepare_slots(count)
        rows = RowSteps(self)
        for index in range(count):
            step = self._open_step(1, sampled)
            for each, cells in ((step, overwritten), (step.local_step, local_overwritten)):
                if isinstance(each, DecodeStep):
                    each.follows, each.overwritten = index > 0, cells
            assert isinstance(step, DecodeStep)
            step.keeps_states = revertible or index == count - 1
            self._take_cells(step)
            rows.add(step, revertible)
        yield rows
        for step in rows.steps:
            self._take_results(step)

    @property
    def row_capacity(self) -> int:
        """The most tokens that `row_steps` takes: as many as have slots of their own."""
        local_window = None if self.local_cache is None else self.local_cache.window.capacity
        limit = self.segments[-1].limit
        return limit if local_window is None else min(limit, local_window)

    def _open_step(self, count: int, sampled: bool) -> DecodeStep | ChunkStep:
        step = self._new_step(count)
        step.sampled, step.recurrent_states = sampled, self.recurrent_states
        step.placements = self.placements
        if self.observer is not None:
            layout = self.layout
            shape = (layout.layers, count, self.attention.heads, layout.head_dim)
            step.queries = torch.empty(shape, dtype=layout.dtype, device=layout.device)
        if (local := self.local_cache) is not None:
            local.time, local.serial = self.time, self.serial
            local._open_local_window()
            step.local_step = local._new_step(count)
        return step

    def _new_step(self, count: int) -> DecodeStep | ChunkStep:
        step_class = DecodeStep if count == 1 else ChunkStep
        times = range(self.time, self.time + count)
        return step_class(self.segments, self.window, times, self.attention)

    def _open_local_window(self) -> Segment:
        """Return the last segment of the cache of local layers, ready for the next cells."""
        assert self.window.capacity is not None
        newest = self.open_window(self.window.capacity)
        newest.grows_lazily = len(self.segments) > 1
        return newest

    def _take_cells(self, step: Step) -> None:
        """Count the cells of a step, of local layers too, and evict what they exceed."""
        step.commit(self.serial)
        self.time += step.count
        self.serial += step.count
        for segment in self.segments:  # cells arrive as their originals are evicted
            arriving = segment.arriving_count - step.evicted_counts[-1]
            segment.arriving_count = max(0, arriving)
        self.drop_empty_segments()
        if self.local_cache is not None and step.local_step is not None:
            self.local_cache._take_cells(step.local_step)

    def _take_results(self, step: Step) -> None:
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
        return self.append_segment(size)

    def unseal(self) -> None:
        """Allow the newest segments to take new cells; see `Segment.unseal`."""
        for cache in (self, self.local_cache):
            if cache is not None and cache.segments:
                cache.segments[-1].unseal()

    def append_segment(self, limit: int, is_anchor: bool = False) -> Segment:
        """Append an empty segment for up to `limit` cells; return it."""
        self.segments.append(Segment(self.layout_for(is_anchor), limit, is_anchor=is_anchor))
        return self.segments[-1]

    def observe(self, earlier: Queries | None = None) -> None:
        """Record the newest queries from now on. earlier: the queries of earlier tokens."""
        self.observer = Observer(earlier)

    def read(self, first: int, count: int) -> list[tuple[Segment, Cells]]:
        """Return copies of `count` cells from index `first` on, 0 the oldest; by segment."""
        return _read_cells(self.segments, first, count)

    def read_window(self, count: int) -> list[tuple[Segment, Cells]]:
        """Return copies of the `count` oldest cells that are not anchors, by segment."""
        return _read_cells([s for s in self.segments if not s.is_anchor], 0, count)

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

    def restore(self, state: CacheState) -> "KVCache":
        """Return a cache for the same kind of cells that has another one's contents.

        Raises ValueError if no cache of this kind can have them.
        """
        local_layout = None if self.local_cache is None else self.local_cache.layout
        state.check(self.layout, self.far_layout, self.attention.heads, local_layout)
        cache, device = self.new_empty(), self.layout.device
        cache.segments = [s.share().normalise().to(device) for s in state.segments]
        if (local_cache := cache.local_cache) is not None:
            local_cache._require_capacity(state.local_segments)
            local_cache.segments = [s.share().normalise().to(device) for s in state.local_segments]
        cache.window, cache.time, cache.serial = state.window, state.time, state.serial
        states = state.recurrent_states
        cache.recurrent_states = {name: value.to(device) for name, value in states.items()}
        if state.observed_queries is not None:
            queries = state.observed_queries.vectors.to(device)
            cache.observe(Queries(queries, state.observed_queries.times))
        return cache

    def restore_checkpoint(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return a checkpoint of another cache of this kind for this one.

        Raises ValueError if its local windows are not those of this kind.
        """
        device, local_cache = self.layout.device, self.local_cache
        segments = [s.share().normalise().to(device) for s in checkpoint.local_segments]
        if local_cache is not None:
            local_cache._require_capacity(segments)
            size, cell_count = local_cache.window.size or 0, sum(s.length for s in segments)
            is_whole = cell_count >= min(size - 1, checkpoint.num_tokens)
            require(is_whole, "a checkpoint with a part of a local window")
        states = {name: state.to(device) for name, state in checkpoint.recurrent_states.items()}
        return replace(checkpoint, local_segments=tuple(segments), recurrent_states=states)

    def _require_capacity(self, segments: Sequence[Segment]) -> None:
        """Raise ValueError if a local cache cannot hold all of these segments."""
        capacity = self.window.capacity or 0
        cell_count = sum(segment.length for segment in segments)
        limit = max((segment.limit for segment in segments), default=0)
        fits = max(cell_count, limit) <= capacity
        require(fits, f"{cell_count} cells of local layers, which have room for {capacity}")

    def trim(self, budget: int) -> None:
        """Free storage that dropped cells have left; see `storage.trim`."""
        trim(self.segments, budget)
        if self.local_cache is not None:
            trim(self.local_cache.segments, self.local_cache.window.capacity or budget)

    def reassign_anchors(self, is_anchor: Callable[[Tensor, Tensor], Tensor]) -> None:
        """Decide anew which cells are anchors; all keep their distances from the next token.

        Segments are cut between anchors and other cells. A cell is copied only if its layout
        changes.

        is_anchor: a function of ranks and serials, as in `split_by`.
        """
        segments: list[Segment] = []
        for segment, is_anchor_run, first, count in self.split_by(is_anchor):
            layout = self.layout_for(is_anchor_run)
            if layout != segment.layout:
                cells = segment.read(first, count)
                parts = [Segment.from_cells(layout, cells, segment.position_map, is_anchor_run)]
            elif is_anchor_run is segment.is_anchor and first + count == segment.length:
                parts = segment.tail(first)
            else:
                parts = segment.part(first, count)
            for part in parts:
                part.is_anchor = is_anchor_run
            segments += parts
        self.segments = merge_small_segments(segments)

    def split_by(
        self, matches: Callable[[Tensor, Tensor], Tensor]
    ) -> list[tuple[Segment, bool, int, int]]:
        """Return runs of a segment's cells, each as (segment, whether they match, first, count).

        matches: called with the rank of each cell among all cells, and with its serial, `[n]` int64
        in the host's memory; returns `[n]` bool.
        """
        empty = torch.empty(0, dtype=torch.int64, device="cpu")
        parts = [segment.live_serials().cpu() for segment in self.segments]
        serials, runs = torch.cat([empty, *parts]), list[tuple[Segment, bool, int, int]]()
        ranks = torch.arange(len(serials), dtype=torch.int64, device="cpu")
        matched = iter(matches(ranks, serials).tolist())
        for segment, part in zip(self.segments, parts, strict=True):
            first = 0
            for is_match, run in groupby(islice(matched, len(part))):
                count = len(list(run))
                runs.append((segment, is_match, first, count))
                first += count
        return runs


def are_in(serials: Tensor, chosen: Set[int]) -> Tensor:
    """Return which serials, `[n]` int64, are in a set: `[n]` bool."""
    if not chosen:
        return torch.zeros(serials.shape, dtype=torch.bool, device="cpu")
    ordered = torch.tensor(sorted(chosen), dtype=torch.int64, device="cpu")
    places = torch.searchsorted(ordered, serials).clamp_(max=len(ordered) - 1)
    return ordered[places] == serials


def _read_cells(segments: Sequence[Segment], first: int, count: int) -> list[tuple[Segment, Cells]]:
    """Return copies of `count` cells from index `first` on; indices run through all segments."""
    parts = []
    for segment in segments:
        count_here = min(segment.length - first, count)
        if count_here > 0:
            parts.append((segment, segment.read(first, count_here)))
            count -= count_here
        first = max(0, first - segment.length)
    return parts

"""The KV cache: segments, the clock, and one step at a time."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from kvkeep.cache.attending import AttentionConfig
from kvkeep.cache.block import Cells, Layout
from kvkeep.cache.checks import require
from kvkeep.cache.joining import merge_small_segments
from kvkeep.cache.layers import LayerPlacement
from kvkeep.cache.observer import Observer, Queries
from kvkeep.cache.rope import Rope
from kvkeep.cache.segment import Segment
from kvkeep.cache.shallow_copy import shallow_copy
from kvkeep.cache.state import CacheState
from kvkeep.cache.step import ChunkStep, DecodeStep, Step
from kvkeep.cache.storage import nbytes, trim
from kvkeep.cache.undo_log import Overwritten
from kvkeep.cache.window import Window


class KVCache:
    """What a decoder remembers, as segments of cells.

    segments: oldest first; new cells go to the last one. Which segments there are is a policy's
        choice.
    window: the bound on cells that are not anchors.
    time: of the next token. The newest segment sees it at that position; every token adds 1.
    serial: the number that the next token gets; never given twice.
    observer: keeps the newest queries, where somebody asked for them.
    layout: of the cells of windows, far_layout: of anchors; they differ in bits alone.
    local: the cache of layers that see nothing but a window (local attention, arXiv:2004.05150),
        where the decoder has such. It has segments and a window of its own, follows this one's
        clock, and holds no more than its window, whatever a policy does here.
    placements: where each of the decoder's layers has its cells.
    recurrent: states of layers that have such in the place of cells (linear attention,
        convolution), by name, where the decoder has any. They are of all tokens so far, and none
        can be taken out of them.
    """

    def __init__(
        self,
        layout: Layout,
        attention: AttentionConfig,
        far_layout: Layout | None = None,
        local: "KVCache | None" = None,
        placements: Sequence[LayerPlacement] = (),
    ):
        self.layout = layout
        self.far_layout = far_layout or layout
        self.attention = attention
        self.local = local
        self.placements = placements
        self.observer: Observer | None = None
        self.segments: list[Segment] = []
        self.window = Window()
        self.time = 0
        self.serial = 0
        self.recurrent: Mapping[str, Tensor] = {}
        self._overwritten: list[Overwritten] = []

    def __repr__(self) -> str:
        return (
            f"<KVCache: {self.cells:,} cells in {len(self.segments)} segments, "
            f"{self.nbytes / 1e6:,.1f} MB>"
        )

    @property
    def heads(self) -> int:
        """Of the queries."""
        return self.attention.heads

    @property
    def rope(self) -> Rope:
        return self.attention.rope

    @property
    def scale(self) -> float:
        return self.attention.scale

    @property
    def cells(self) -> int:
        """Live cells of each KV head in each layer; in local layers there are `local.cells`."""
        return sum(segment.length for segment in self.segments)

    @property
    def reach(self) -> int:
        """How far back the next token looks: the distance to the oldest cell."""
        if not self.segments or not self.segments[0].length:
            return 0
        oldest = self.segments[0]
        first = oldest.positions()
        if not oldest.compressed:  # of which each head has another oldest one
            first = first[:1]
        return oldest.map(self.time) - int(first.min())

    @property
    def nbytes(self) -> int:
        """Bytes that keys and values take in memory, storage not yet filled included."""
        states = sum(state.nbytes for state in self.recurrent.values())
        return nbytes(self.all_segments) + states

    @property
    def all_segments(self) -> list[Segment]:
        """Those of local layers, too."""
        return [*self.segments, *(self.local.segments if self.local else ())]

    def serials(self) -> list[int]:
        """Which tokens the live cells are of, oldest first."""
        return [serial for segment in self.segments for serial in segment.serials()]

    @contextmanager
    def step(self, count: int, sampled: bool = False) -> Iterator[DecodeStep | ChunkStep]:
        """A forward of `count` tokens into the last segment.

        sampled: of one token that the model itself has chosen; see `Step`.

        Inside, each layer calls the step's `attend` once. On leaving, the new cells are kept. After
        an exception the cache is of no use: who needs it as it was steps a `successor` of it.
        """
        step = self._begin(count)
        step.sampled, step.recurrent = sampled, self.recurrent
        if self.observer is not None:
            step.queries = self._room_for_queries(count)
        if self.local is not None:
            step.local, step.placements = self.local._beside(self, count), self.placements
        yield step
        self._finish_step(step, count)
        if self.local is not None and step.local is not None:
            self.local._finish_step(step.local, count)

    def _begin(self, count: int) -> DecodeStep | ChunkStep:
        if count == 1:
            return DecodeStep(self.segments, self.window, self.time, self.attention)
        return ChunkStep(self.segments, self.window, self.time, count, self.attention)

    def _beside(self, whole: "KVCache", count: int) -> DecodeStep | ChunkStep:
        """Of a local cache: the step that goes with one of the cache that it belongs to."""
        assert self.window.held is not None
        self.time, self.serial = whole.time, whole.serial
        newest = self.open_window(self.window.held)
        newest.lazy_growth = len(self.segments) > 1
        return self._begin(count)

    def _finish_step(self, step: Step, count: int) -> None:
        step.commit(self.serial)
        if self.observer is not None and step.queries is not None:
            self.observer.take(self.time, step.queries)
        self.recurrent = step.recurrent
        self.time += count
        self.serial += count
        for segment in self.segments:
            segment.leaving = 0
        self.segments = [s for s in self.segments if s.length]

    def open_window(self, size: int) -> Segment:
        """Makes the last segment the one for the next cells of a window that holds up to `size`."""
        newest = self.segments[-1] if self.segments else None
        if newest is not None and not newest.anchor:
            if newest.reopen(size):
                return newest
            if not newest.frozen:  # a ring of another size: its placements would have to change
                self.segments[-1:] = newest.part(0, newest.length)
        newest = Segment(self.layout, size)
        self.segments.append(newest)
        return newest

    def observe(self, before: Queries | None = None) -> None:
        """Keeps the newest queries from now on; see `observer`. before: those of earlier tokens."""
        self.observer = Observer(before)

    def _room_for_queries(self, count: int) -> Tensor:
        layout = self.layout
        shape = (layout.layers, count, self.heads, layout.head_dim)
        return torch.empty(shape, dtype=layout.dtype, device=layout.device)

    def read(self, first: int, count: int) -> list[tuple[Segment, Cells]]:
        """The `count` cells from the `first`-oldest on, copied, by the segments they lie in."""
        found = []
        for segment in self.segments:
            inside = min(segment.length - first, count)
            if inside > 0:
                found.append((segment, segment.read(first, inside)))
                count -= inside
            first = max(0, first - segment.length)
        return found

    def drop_newest(self, count: int) -> None:
        """Takes the newest `count` cells and their time back.

        Local layers have forgotten what these pushed out: they see less, until they are full again.
        """
        self.time -= count
        taken_back = count
        if self.observer is not None:
            self.observer.forget_from(self.time)
        while count:
            segment = self.segments[-1]
            taken = min(count, segment.length)
            segment.drop_newest(taken)
            count -= taken
            if not segment.length:
                self.segments.pop()
        if self.local is not None:
            self.local.drop_newest(min(taken_back, self.local.cells))

    def keep_newest(self, count: int) -> None:
        """Of a local cache: forgets all cells but so many."""
        Window().forget(self.segments, max(0, self.cells - count))
        self.segments = [s for s in self.segments if s.length]

    def successor(self) -> "KVCache":
        """This cache, to be changed; storage stays where it is, and only one of the two goes on.

        Either the successor is taken in the place of this one and `confirm`ed, or it is told to
        `rollback` what it overwrote, and this one is as it was.
        """
        successor = shallow_copy(self)
        successor._overwritten = overwritten = list[Overwritten]()
        successor.segments = [segment.successor(overwritten) for segment in self.segments]
        successor.observer = None if self.observer is None else self.observer.fork()
        successor.local = None if self.local is None else self.local.successor()
        return successor

    def commit(self) -> None:
        """Lets go of what the cache before this one would need to go on."""
        self._overwritten.clear()
        for segment in self.segments:
            segment.guarded = None
        if self.local is not None:
            self.local.commit()

    @torch.inference_mode()
    def rollback(self) -> None:
        """Puts every cell back where the cache before this one has it. Can be repeated."""
        for overwritten in reversed(self._overwritten):
            overwritten.rollback()
        if self.local is not None:
            self.local.rollback()

    def empty(self) -> "KVCache":
        """A cache for the same kind of cells that holds none."""
        local = None if self.local is None else self.local.empty()
        empty = KVCache(self.layout, self.attention, self.far_layout, local, self.placements)
        if local is not None and self.local is not None:
            local.window = self.local.window
        return empty

    def layout_for(self, anchor: bool) -> Layout:
        """How a segment keeps its cells."""
        return self.far_layout if anchor else self.layout

    def state(self) -> CacheState:
        """All that it holds. Cells are shared until one side must write to their storage."""
        observed = None if self.observer is None else self.observer.queries()
        segments = tuple(segment.twin() for segment in self.segments)
        local = () if self.local is None else self.local.state().segments
        return CacheState(
            segments, self.window, self.time, self.serial, observed, local, self.recurrent
        )

    def restore(self, state: CacheState) -> "KVCache":
        """A cache for the same kind of cells that holds what another did.

        Raises ValueError, saying what is wrong, where none of this kind can hold it.
        """
        local = None if self.local is None else self.local.layout
        state.check(self.layout, self.far_layout, self.heads, local)
        cache, device = self.empty(), self.layout.device
        cache.segments = [segment.twin().settled().to(device) for segment in state.segments]
        if cache.local is not None:
            cache.local._require_fits(state.local)
            cache.local.segments = [each.twin().settled().to(device) for each in state.local]
        cache.window, cache.time, cache.serial = state.window, state.time, state.serial
        cache.recurrent = {name: each.to(device) for name, each in state.recurrent.items()}
        if state.observed is not None:
            queries = state.observed.values.to(device)
            cache.observe(Queries(queries, state.observed.times))
        return cache

    def twin(self) -> "KVCache":
        """A cache with the same cells in the same segments, as if it were restored from a file.

        Memory is shared until one side must write to it. A fork shares it for longer, and its cells
        are cut where it began: sums over them are made in another order.
        """
        return self.restore(self.state())

    def _require_fits(self, segments: Sequence[Segment]) -> None:
        """Raises ValueError where a local cache cannot hold all of these."""
        most = self.window.held or 0
        held, room = (
            sum(each.length for each in segments),
            max((s.limit for s in segments), default=0),
        )
        require(max(held, room) <= most, f"{held} cells of local layers, which hold {most}")

    def fork(self) -> "KVCache":
        """A cache with the same cells that goes its own way; memory is shared."""
        fork = self.empty()
        fork.observer = None if self.observer is None else self.observer.fork()
        fork.segments = [s.branch() for s in self.segments]
        fork.window, fork.time, fork.serial = self.window, self.time, self.serial
        fork.recurrent = self.recurrent
        fork.local = None if self.local is None else self.local.fork()
        return fork

    def trim(self, budget: int) -> None:
        """Gives back storage that forgotten cells have left; see `storage.trim`."""
        trim(self.segments, budget)
        if self.local is not None:
            trim(self.local.segments, self.local.window.held or budget)

    def regroup(self, anchored: Callable[[int, int], bool]) -> None:
        """Decides anew which cells are anchors, by their rank among all cells and their serial.

        Segments are cut where the kind changes. Cells stay where they lie, but where those of the
        other kind are kept in other bits. None is seen from elsewhere than before.
        """
        segments: list[Segment] = []
        for segment, kind, first, count in self.runs(anchored):
            layout = self.layout_for(kind)
            if layout != segment.layout:
                cells = segment.read(first, count)
                parts = [Segment.from_cells(layout, cells, segment.map, kind)]
            elif kind is segment.anchor and first + count == segment.length:
                parts = segment.rest(first)
            else:
                parts = segment.part(first, count)
            for part in parts:
                part.anchor = kind
            segments += parts
        self.segments = merge_small_segments(segments)

    def runs(self, anchored: Callable[[int, int], bool]) -> list[tuple[Segment, bool, int, int]]:
        """Runs of cells of one kind within one segment: (segment, kind, first, count).

        anchored: the kind of a cell, by its rank among all cells and its serial.
        """
        runs: list[tuple[Segment, bool, int, int]] = []
        rank = 0
        for segment in self.segments:
            for index, serial in enumerate(segment.serials()):
                kind = anchored(rank, serial)
                rank += 1
                if runs and runs[-1][0] is segment and runs[-1][1] is kind:
                    runs[-1] = (*runs[-1][:3], runs[-1][3] + 1)
                else:
                    runs.append((segment, kind, index, 1))
        return runs

"""Compressing what a session holds, once."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TypeAlias

import torch
from torch import Tensor

from kvkeep.cache import NO_TOKEN, Cells, Queries, Segment, merge_segments
from kvkeep.cache.observer import MAX_QUERIES
from kvkeep.compression.methods import (
    BEST,
    Budget,
    Candidates,
    Compression,
    Eviction,
    Method,
    Statistics,
    check_shares,
    compress,
    compress_by_heads,
)
from kvkeep.compression.methods.kvzap import KVzap
from kvkeep.compression.methods.kvzip import KVzip
from kvkeep.compression.methods.repeats import compress_repeats, find_repeats
from kvkeep.compression.reconstruction import held_tokens, reconstruction
from kvkeep.errors import InvalidArgument
from kvkeep.models.text.codec import TextCodec
from kvkeep.session.memory import Memory

SINKS = 4
RECENT = 64  # newest tokens that stay as they are where all heads keep as many cells
FEWEST_RECENT = 32  # where heads compete
MOST_RECENT = 256  # where only repeats go
FEWEST_REPEATS = 1 / 8  # of what is left of the others, where only repeats go


@dataclass(frozen=True)
class CompressionReport:
    """What compressing a session did.

    cells_before, cells_after: of each KV head. bytes_before, bytes_after: of their storage.
    budget: whether heads competed for them. chunks: what was compressed together, up to 512 cells
    each; where heads compete, a run of cells between those that stay.
    """

    method: str
    budget: Budget
    ratio: float
    cells_before: int
    cells_after: int
    bytes_before: int
    bytes_after: int
    chunks: tuple[Compression, ...]


@dataclass(frozen=True)
class CompressionPlan:
    """How a memory is to be compressed, once.

    budget: None for what is best for the method and the text. text: of the model. recent: of the
    newest cells, how many stay as they are; None for what suits the budget and the ratio. seed: of
    what is drawn. statistics: of the model. progress: told of cells as they are through.
    """

    method: Method
    ratio: float
    budget: Budget | None
    text: TextCodec
    recent: int | None = None
    seed: int = 0
    statistics: Statistics | None = None
    progress: Callable[[int], None] | None = None

    @property
    def shared(self) -> Budget:
        """How heads share cells where it is the method that decides."""
        return self.method.budget if self.budget is None else self.budget

    def newest(self, cells: int, pinned: int) -> int:
        """How many of the newest cells stay as they are, of so many.

        Where heads compete, half of what is left: what comes next goes on from there, in all
        heads. Less at a ratio above 4, where the older text needs the cells more.
        """
        if self.recent is not None:
            return self.recent
        if self.shared == "uniform":
            return RECENT
        left = cells / self.ratio - pinned
        return max(FEWEST_RECENT, int(left * min(1 / 2, 2 / self.ratio)))

    def check(self) -> None:
        """Raises InvalidArgument for what cannot be."""
        check_shares(self.method, self.shared)
        if not self.ratio > 1:
            raise InvalidArgument(f"compressing takes a ratio above 1; found {self.ratio:g}")
        if self.recent is not None and self.recent < 1:
            raise InvalidArgument(
                f"compressing leaves 1 or more recent cells as they are; found {self.recent}"
            )
        self.method.require_statistics(self.statistics)


def best_at_once(memory: Memory, statistics: Statistics | None) -> str:
    """The method that compresses a memory unless another is asked for."""
    if statistics is not None and statistics.surrogate is not None:
        return KVzap.name
    again = any(segment.compressed for segment in memory.cache.segments)
    return BEST if again else KVzip.name


@torch.inference_mode()
def compress_held(memory: Memory, how: CompressionPlan) -> tuple[Memory, CompressionReport]:
    """The memory with all cells compressed but those of the first four, newest and pinned tokens.

    The given one stays as it is. Raises InvalidArgument before anything is evaluated.
    """
    how.check()
    memory.require_no_states("compressed")
    if memory.policy.name != "full":
        raise InvalidArgument(
            f'policy "{memory.policy.name}" cannot be compressed at once: policy="archive" '
            'compresses as it goes, policy="full" when it is asked to'
        )
    cache, before, nbytes = memory.cache, memory.cache.cells, memory.cache.nbytes
    budget, runs, found = _only_repeats(memory, how) or _by_method(memory, how)
    chunks, segments = list[Compression](), list[Segment]()
    for segment, kept, first, count in runs:
        if kept:
            parts = [segment.read(first, count)]
        else:
            parts, told = next(found)
            chunks += told
        segments += [
            Segment.from_cells(cache.layout, cells, segment.map, segment.anchor)
            for cells in parts
            if len(cells)
        ]
    after = memory.successor()
    after.cache.segments = merge_segments(segments)
    return after, CompressionReport(
        how.method.name,
        budget,
        how.ratio,
        before,
        after.cache.cells,
        nbytes,
        after.cache.nbytes,
        tuple(chunks),
    )


_Run: TypeAlias = tuple[Segment, bool, int, int]  # see `KVCache.runs`
_Done: TypeAlias = tuple[list[Cells], list[Compression]]  # of a run
_Plan: TypeAlias = tuple[Budget, list[_Run], Iterator[_Done]]


def _by_method(memory: Memory, how: CompressionPlan) -> _Plan:
    """As the method has it."""
    runs, left = _runs(memory, how)
    share = _by_heads if how.shared == "heads" else _evenly
    return how.shared, runs, share(_candidates(memory, how, runs), left, how)


def _only_repeats(memory: Memory, how: CompressionPlan) -> _Plan | None:
    """Where it is enough to leave what the text says once more: nothing that it says once goes.

    Only for what asks what it takes to say the text again, and then without asking. None where
    hardly a repeat would be left of them, or cells are of no one token.
    """
    if not how.method.uses_reconstruction or how.budget is not None:
        return None
    tokens = held_tokens(memory)
    if tokens is None:
        return None
    runs, left = _runs(memory, how, MOST_RECENT)
    again, found, begun = find_repeats(tokens), list[Tensor](), 0
    for _, kept, _, count in runs:
        if not kept:
            found.append(again[begun : begun + count])
        begun += count
    room = left - sum(int((~each).sum()) for each in found)
    if room < left * FEWEST_REPEATS:
        return None
    return "uniform", runs, _repeats_left(memory, how, runs, found, room)


def _runs(
    memory: Memory, how: CompressionPlan, at_most: int | None = None
) -> tuple[list[_Run], int]:
    """Cells that stay as they are, those between them, and what these become for each KV head.

    What was compressed before has no order that all heads share, of which some could be newest.
    at_most: so many of the newest stay, unless it was said how many.
    Raises InvalidArgument if none would be left to decide on.
    """
    cells, pins = memory.cache.cells, memory.pins
    newest = how.newest(cells, len(pins))
    if at_most is not None and how.recent is None:
        newest = min(newest, at_most)
    runs = memory.cache.runs(
        lambda rank, serial: (
            serial != NO_TOKEN and (rank < SINKS or rank >= cells - newest or serial in pins)
        )
    )
    left = math.ceil(cells / how.ratio) - sum(count for _, kept, _, count in runs if kept)
    if left < len(runs):
        raise InvalidArgument(
            f"{cells} cells cannot become {how.ratio:g} times fewer with the first {SINKS}, the "
            f"newest {newest} and {len(pins)} pinned ones kept as they are: take a smaller ratio, "
            "or keep fewer"
        )
    return runs, left


def _candidates(memory: Memory, how: CompressionPlan, runs: Sequence[_Run]) -> list[Candidates]:
    """Of each run that is to be compressed, its cells and what is known of them."""
    cache, method = memory.cache, how.method
    queries = _newest_queries(memory) if method.needs_queries(how.statistics) else None
    needed, begun = None, 0
    if method.uses_reconstruction:
        newest = takewhile(lambda run: run[1], reversed(runs))  # they stay whatever they are worth
        oldest = cache.cells - sum(count for _, _, _, count in newest)
        needed = reconstruction(memory, how.text, how.progress, oldest, method.uses_reconstruction)
    found = []
    for run in runs:
        segment, kept, _, count = run
        if not kept:
            own = None if needed is None else needed[..., begun : begun + count]
            near = queries.seen_from(segment.map) if queries else None
            found.append(replace(_known(memory, how, run), queries=near, reconstruction=own))
        begun += count
    return found


def _known(memory: Memory, how: CompressionPlan, run: _Run) -> Candidates:
    """The cells of a run, and what is known of the model."""
    cache, (segment, _, first, count) = memory.cache, run
    plain = segment.view(first, count).dequantised(cache.layout.dtype)
    return Candidates(plain, cache.rope, cache.scale, statistics=how.statistics, seed=how.seed)


def _repeats_left(
    memory: Memory, how: CompressionPlan, runs: Sequence[_Run], again: list[Tensor], room: int
) -> Iterator[_Done]:
    """again: of each run that is to be compressed. room: how many repeats stay, of all runs."""
    total, seen = sum(int(each.sum()) for each in again), 0
    changed = (run for run in runs if not run[1])
    for run, each in zip(changed, again, strict=True):
        count = int(each.sum())
        quota = room * (seen + count) // total - room * seen // total
        seen += count
        cells, chunks = compress_repeats(_known(memory, how, run), each, quota)
        if how.progress:
            how.progress(len(each))
        yield [cells], chunks


def _evenly(runs: list[Candidates], left: int, how: CompressionPlan) -> Iterator[_Done]:
    """Each run becomes as many times fewer, in each KV head."""
    total, seen = sum(map(len, runs)), 0
    for candidates in runs:
        count = len(candidates)
        quota = left * (seen + count) // total - left * seen // total
        seen += count
        parts, told = list[Cells](), list[Compression]()
        for cells, compression in compress(how.method, candidates, min(quota, count)):
            parts.append(cells)
            told.append(compression)
            _tell(how, compression.cells_before)
        yield parts, told


def _by_heads(runs: list[Candidates], left: int, how: CompressionPlan) -> Iterator[_Done]:
    """Those cells stay that are worth most, whichever runs, layers and KV heads they are in."""
    assert isinstance(how.method, Eviction)
    for cells, compression in compress_by_heads(how.method, runs, left):
        _tell(how, compression.cells_before)
        yield [cells], [compression]


def _tell(how: CompressionPlan, cells: int) -> None:
    if how.progress and not how.method.uses_reconstruction:  # which has told of them
        how.progress(cells)


def _newest_queries(memory: Memory) -> Queries | None:
    """Those of the last tokens: they are evaluated once more, beside the session."""
    count = min(MAX_QUERIES, memory.rewindable - 1)
    if count < 1:
        raise InvalidArgument("a method that decides by queries needs recent tokens that are held")
    again, beside = memory.tokens[-count:], memory.fork()
    beside.take_back(count)
    beside.cache.observe()
    for _ in beside.evaluate(again, count):
        pass
    assert beside.cache.observer is not None
    return beside.cache.observer.queries()

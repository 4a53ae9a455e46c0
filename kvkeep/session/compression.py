"""Planning and running one compression of a whole session."""

import math
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TypeAlias

import torch
from torch import Tensor

from kvkeep.cache import NO_TOKEN, Cells, Queries, Segment, are_in, merge_segments
from kvkeep.cache.cell_runs import split_by
from kvkeep.cache.observer import MAX_QUERIES
from kvkeep.compression.methods import BEST_UNCALIBRATED, make_method
from kvkeep.compression.methods.apply import (
    Compression,
    check_budget,
    compress,
    compress_across_heads,
    split_quota,
)
from kvkeep.compression.methods.base import Budget, Candidates, Eviction, Method
from kvkeep.compression.methods.kvzip import KVzap, KVzip
from kvkeep.compression.methods.repeats import compress_repeats, find_repeats
from kvkeep.compression.methods.residual import FitContext
from kvkeep.compression.methods.statistics import Statistics
from kvkeep.errors import InvalidArgument
from kvkeep.models.text.codec import TextCodec
from kvkeep.session.checkpoints import drop_unusable_checkpoints, num_rewindable
from kvkeep.session.evaluation import evaluate_all, reevaluate_last
from kvkeep.session.memory import Memory
from kvkeep.session.reconstruction import QuerySample, cell_tokens, reconstruction_scores

SINK_CELLS = 4  # first cells, which always stay: attention sinks
RECENT_CELLS = 64  # newest cells that stay unchanged with budget "uniform"
MIN_RECENT_CELLS = 32  # the same with budget "heads": at least
MAX_RECENT_CELLS = 256  # the same where only repeats are compressed: at most
HIGHEST_RATIO = 16.0  # that `highest_ratio` tries
MIN_REPEAT_SHARE = 1 / 8  # of the remaining cells: if repeats are so many, only they are compressed


@dataclass(frozen=True)
class CompressionReport:
    """The result of compressing a session.

    Attributes:
        cells_before, cells_after: cells of each KV head; a mean if heads compete.
        bytes_before, bytes_after: bytes of their storage.
        budget: whether heads competed for cells.
        chunks: what was compressed together, up to 512 cells each; where heads compete, a run of
            cells between those that stay.
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
    """The settings of one compression: see `Session.compress`.

    unchanged: serials of tokens whose cells stay unchanged, as those of pinned tokens do.
    keeps_scores: whether compressed cells keep their scores, by which they compete with others in
        the next such compression. For methods by reconstruction scores and "heads".
    """

    method: Method
    ratio: float
    budget: Budget | None
    codec: TextCodec
    recent: int | None = None
    seed: int = 0
    statistics: Statistics | None = None
    progress: Callable[[int], None] | None = None
    unchanged: frozenset[int] = frozenset()
    keeps_scores: bool = False

    @property
    def effective_budget(self) -> Budget:
        return self.method.budget if self.budget is None else self.budget

    def num_recent(self, num_cells: int, num_pinned: int) -> int:
        """Return how many of the newest of `num_cells` cells stay unchanged.

        By default, where heads compete, half of what remains: the following text continues from
        them, in all heads. Less at a ratio above 4, where the older text needs the cells more.
        """
        if self.recent is not None:
            return self.recent
        return _default_recent(self.effective_budget, self.ratio, num_cells, num_pinned)

    def check(self) -> None:
        """Raise InvalidArgument if the plan is impossible for any memory."""
        check_budget(self.method, self.effective_budget)
        if not self.ratio > 1:
            raise InvalidArgument(f"ratio must be above 1; found {self.ratio:g}")
        if self.recent is not None and self.recent < 1:
            raise InvalidArgument(f"recent must be 1 or more; found {self.recent}")
        self.method.require_statistics(self.statistics)


def _default_recent(budget: Budget, ratio: float, num_cells: int, num_pinned: int) -> int:
    if budget == "uniform":
        return RECENT_CELLS
    remaining = num_cells / ratio - num_pinned
    return max(MIN_RECENT_CELLS, int(remaining * min(1 / 2, 2 / ratio)))


def highest_ratio(memory: Memory) -> float | None:
    """Return the highest ratio that `Session.compress` takes by default, of 16, 15.5 and so on.

    None if it takes none of them above 1, as with other policies than "full".
    """
    cells, num_pinned = memory.cache.cells, len(memory.pins)
    if memory.policy.name != "full" or not cells:
        return None
    budget = make_method(default_method_name(memory, None)).budget
    ratio = min(HIGHEST_RATIO, math.floor(2 * cells / max(1, num_pinned)) / 2)  # pins stay
    while ratio > 1:
        try:
            recent = _default_recent(budget, ratio, cells, num_pinned)
            _split_into_runs(memory, memory.pins, recent, ratio)
        except InvalidArgument:
            ratio -= 0.5
        else:
            return ratio
    return None


def default_method_name(memory: Memory, statistics: Statistics | None) -> str:
    """Return the best method that the memory and the calibration's statistics allow."""
    if statistics is not None and statistics.surrogate is not None:
        return KVzap.name
    compressed_before = any(segment.compressed for segment in memory.cache.segments)
    return BEST_UNCALIBRATED if compressed_before else KVzip.name


@torch.inference_mode()
def compress_memory(memory: Memory, plan: CompressionPlan) -> tuple[Memory, CompressionReport]:
    """Return a copy of the memory with all cells but sinks, newest and pinned ones compressed.

    States stay as they are: they summarise all tokens, those of evicted cells too.

    Raises InvalidArgument before anything is evaluated.
    """
    plan.check()
    if memory.policy.name != "full":
        raise InvalidArgument(
            f'policy "{memory.policy.name}" does not support compress(): policy="archive" '
            'compresses continuously, policy="full" on request'
        )
    cache, cells_before, bytes_before = memory.cache, memory.cache.cells, memory.cache.nbytes
    budget, runs, results = _plan_repeats(memory, plan) or _plan_by_method(memory, plan)
    chunks, segments = list[Compression](), list[Segment]()
    for segment, unchanged, first, count in runs:
        if unchanged:
            run_cells = [segment.read(first, count)]
        else:
            run_cells, run_chunks = next(results)
            chunks += run_chunks
        segments += [
            Segment.from_cells(cache.layout, cells, segment.position_map, segment.is_anchor)
            for cells in run_cells
            if len(cells)
        ]
    compressed_memory = memory.successor()
    new_cache = compressed_memory.cache
    new_cache.segments = merge_segments(segments)
    drop_unusable_checkpoints(compressed_memory)
    sizes = (cells_before, new_cache.cells, bytes_before, new_cache.nbytes)
    report = CompressionReport(plan.method.name, budget, plan.ratio, *sizes, tuple(chunks))
    return compressed_memory, report


# Segment, whether its cells stay unchanged, first cell, count: see `split_by`.
_Run: TypeAlias = tuple[Segment, bool, int, int]
_RunResult: TypeAlias = tuple[list[Cells], list[Compression]]
# All runs, and the results of those to compress, computed as the iterator is consumed.
_PlannedRuns: TypeAlias = tuple[Budget, list[_Run], Iterator[_RunResult]]


def _plan_by_method(memory: Memory, plan: CompressionPlan) -> _PlannedRuns:
    """Plan to compress each run by the plan's method and budget."""
    runs, remaining_cells = _planned_runs(memory, plan)
    budget = plan.effective_budget
    sample = None
    if plan.method.residual and budget == "heads":
        sample = QuerySample()
    candidates = _candidates(memory, plan, runs, sample)
    if budget == "uniform":
        return budget, runs, _compress_evenly(candidates, remaining_cells, plan)
    context, queries = None, sample.queries(memory.cache.time) if sample else None
    if queries is not None:  # they see all cells, and residual cells are fitted to them
        changed, unchanged = ([run for run in runs if run[1] is flag] for flag in (False, True))
        candidates = _with_queries(candidates, changed, queries)
        others = [_unscored_candidates(memory, plan, run) for run in unchanged]
        context = FitContext(memory.cache.attention, _with_queries(others, unchanged, queries))
    return budget, runs, _compress_across_heads(candidates, remaining_cells, plan, context)


def _with_queries(
    candidates: Sequence[Candidates], runs: Sequence[_Run], queries: Queries
) -> list[Candidates]:
    """Return the candidates of runs with queries as they are seen from there."""
    return [
        replace(each, queries=queries.seen_from(segment.position_map))
        for each, (segment, *_) in zip(candidates, runs, strict=True)
    ]


def _plan_repeats(memory: Memory, plan: CompressionPlan) -> _PlannedRuns | None:
    """Plan to compress verbatim repeats only, so that nothing is evicted that occurs once.

    Used instead of reconstruction scores, unless a budget was requested. None if too few repeats
    would remain, or if some cells were compressed before.
    """
    if not plan.method.reconstruction_kind or plan.budget is not None:
        return None
    if (tokens := cell_tokens(memory)) is None:
        return None
    runs, remaining_cells = _planned_runs(memory, plan, MAX_RECENT_CELLS)
    is_repeat, masks, start = find_repeats(tokens), list[Tensor](), 0  # masks: of each run
    for _, unchanged, _, count in runs:
        if not unchanged:
            masks.append(is_repeat[start : start + count])
        start += count
    remaining_repeats = remaining_cells - sum(int((~mask).sum()) for mask in masks)
    if remaining_repeats < remaining_cells * MIN_REPEAT_SHARE:
        return None
    quotas = split_quota([int(mask.sum()) for mask in masks], remaining_repeats)
    to_compress = [run for run in runs if not run[1]]
    results = (
        _compress_repeats(memory, plan, run, mask, quota)
        for run, mask, quota in zip(to_compress, masks, quotas, strict=True)
    )
    return "uniform", runs, results


def _planned_runs(
    memory: Memory, plan: CompressionPlan, max_recent: int | None = None
) -> tuple[list[_Run], int]:
    """Return the runs of a plan, as `_split_into_runs`.

    max_recent: bounds the default number of newest cells.
    """
    pins = memory.pins | plan.unchanged
    recent = plan.num_recent(memory.cache.cells, len(pins))
    if max_recent is not None and plan.recent is None:
        recent = min(recent, max_recent)
    return _split_into_runs(memory, pins, recent, plan.ratio)


def _split_into_runs(
    memory: Memory, pins: Set[int], recent: int, ratio: float
) -> tuple[list[_Run], int]:
    """Return runs of cells that stay or are to be compressed, and how many of the latter remain.

    The count is for each KV head. Compressed cells have no common order over heads, so none of them
    counts as one of the newest.

    Raises InvalidArgument if no cell of a run would remain.
    """
    cells = memory.cache.cells
    runs = split_by(
        memory.cache.segments,
        lambda ranks, serials: (
            (serials != NO_TOKEN)
            & ((ranks < SINK_CELLS) | (ranks >= cells - recent) | are_in(serials, pins))
        ),
    )
    unchanged_cells = sum(count for _, unchanged, _, count in runs if unchanged)
    remaining_cells = math.ceil(cells / ratio) - unchanged_cells
    if remaining_cells < len(runs):
        raise InvalidArgument(
            f"{cells} cells cannot be compressed by a factor of {ratio:g}: the first {SINK_CELLS}, "
            f"the newest {recent} and {len(pins)} pinned ones are never compressed. Use a lower "
            "ratio or a smaller recent, or unpin tokens"
        )
    return runs, remaining_cells


def _candidates(
    memory: Memory, plan: CompressionPlan, runs: Sequence[_Run], sample: QuerySample | None
) -> list[Candidates]:
    """Return the cells of each run to compress, with queries and scores that the method uses.

    sample: records queries of the repeated text.
    """
    method = plan.method
    queries = reevaluate_newest_queries(memory) if method.needs_queries(plan.statistics) else None
    scores, start = None, 0
    if method.reconstruction_kind:
        scored = _without_compressed(memory) if plan.keeps_scores else memory
        newest_runs = takewhile(lambda run: run[1], reversed(runs))  # unchanged, so not scored
        num_scored = scored.cache.cells - sum(count for _, _, _, count in newest_runs)
        if num_scored or not memory.cache.cells:  # else all cells to compress have their scores
            scores = reconstruction_scores(
                scored, plan.codec, plan.progress, num_scored, method.reconstruction_kind, sample
            )
    candidates = []
    for run in runs:
        segment, unchanged, _, count = run
        if segment.compressed and plan.keeps_scores:  # it has its scores
            candidates.append(_unscored_candidates(memory, plan, run))
            continue
        if not unchanged:
            run_scores = None if scores is None else scores[..., start : start + count]
            seen_queries = queries.seen_from(segment.position_map) if queries else None
            unscored = _unscored_candidates(memory, plan, run)
            candidates.append(replace(unscored, queries=seen_queries, reconstruction=run_scores))
        start += count
    return candidates


def _without_compressed(memory: Memory) -> Memory:
    """Return a fork of the memory without its compressed cells."""
    fork = memory.fork()
    fork.cache.segments = [segment for segment in fork.cache.segments if not segment.compressed]
    return fork


def _unscored_candidates(memory: Memory, plan: CompressionPlan, run: _Run) -> Candidates:
    cache, (segment, _, first, count) = memory.cache, run
    cells = segment.view(first, count).dequantise(cache.layout.dtype)
    return Candidates(
        cells,
        cache.rope,
        cache.scale,
        statistics=plan.statistics,
        seed=plan.seed,
        softcap=cache.attention.softcap,
    )


def _compress_repeats(
    memory: Memory, plan: CompressionPlan, run: _Run, is_repeat: Tensor, quota: int
) -> _RunResult:
    """Compress the cells of a run that `is_repeat`, `[n]` bool, marks to `quota` cells."""
    cells, chunks = compress_repeats(_unscored_candidates(memory, plan, run), is_repeat, quota)
    if plan.progress:
        plan.progress(len(is_repeat))
    return [cells], chunks


def _compress_evenly(
    candidates_by_run: list[Candidates], remaining_cells: int, plan: CompressionPlan
) -> Iterator[_RunResult]:
    """Compress each run by the same ratio, in each KV head, to `remaining_cells` in all."""
    quotas = split_quota([len(run) for run in candidates_by_run], remaining_cells)
    for candidates, quota in zip(candidates_by_run, quotas, strict=True):
        run_cells, chunks = list[Cells](), list[Compression]()
        for cells, chunk in compress(plan.method, candidates, min(quota, len(candidates))):
            run_cells.append(cells)
            chunks.append(chunk)
            _report_progress(plan, chunk.cells_before)
        yield run_cells, chunks


def _compress_across_heads(
    candidates_by_run: list[Candidates],
    remaining_cells: int,
    plan: CompressionPlan,
    context: FitContext | None,
) -> Iterator[_RunResult]:
    """Keep the cells with the highest scores over all runs, layers and KV heads."""
    assert isinstance(plan.method, Eviction)
    runs = candidates_by_run
    for cells, chunk in compress_across_heads(
        plan.method, runs, remaining_cells, plan.keeps_scores, context
    ):
        _report_progress(plan, chunk.cells_before)
        yield [cells], [chunk]


def _report_progress(plan: CompressionPlan, cells: int) -> None:
    if plan.progress and not plan.method.reconstruction_kind:  # which has reported these cells
        plan.progress(cells)


def reevaluate_newest_queries(memory: Memory) -> Queries | None:
    """Return queries of the newest tokens, evaluated again in a fork. Raises InvalidArgument."""
    count = min(MAX_QUERIES, num_rewindable(memory) - 1)
    if count < 1:
        raise InvalidArgument(
            "this method scores cells by the queries of recent uncompressed tokens, and the "
            'session has too few: feed text first, or use a method without queries, such as "knorm"'
        )
    fork = memory.fork()
    tokens, last_ids, pinned = fork.rewind(count)
    reevaluate_last(fork, last_ids, pinned)
    fork.cache.observe()
    evaluate_all(fork, tokens, count)
    assert fork.cache.observer is not None
    return fork.cache.observer.queries()

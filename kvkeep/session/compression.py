"""Compression of a whole session: of all cells that a plan does not leave unchanged."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TypeAlias

import torch
from torch import Tensor

from kvkeep.cache import Cells, Queries, Segment, merge_segments
from kvkeep.cache.cell_runs import CellRun
from kvkeep.cache.observer import MAX_QUERIES
from kvkeep.compression.methods.apply import (
    Compression,
    compress,
    compress_across_heads,
    split_quota,
)
from kvkeep.compression.methods.base import Budget, Candidates, Eviction
from kvkeep.compression.methods.repeats import compress_repeats, find_repeats
from kvkeep.compression.methods.residual import FitContext
from kvkeep.errors import InvalidArgument
from kvkeep.session.checkpoints import drop_unusable_checkpoints, num_rewindable
from kvkeep.session.compression_plan import CompressionPlan, planned_runs
from kvkeep.session.evaluation import evaluate_all
from kvkeep.session.memory import Memory
from kvkeep.session.reconstruction import QuerySample, cell_tokens, reconstruction_scores
from kvkeep.session.reevaluation import reevaluate_last

MAX_RECENT_CELLS = 256  # newest cells that stay where only repeats are compressed
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


_RunResult: TypeAlias = tuple[list[Cells], list[Compression]]
# All runs, and the results of those to compress, computed as the iterator is consumed.
_PlannedRuns: TypeAlias = tuple[Budget, list[CellRun], Iterator[_RunResult]]


def _plan_by_method(memory: Memory, plan: CompressionPlan) -> _PlannedRuns:
    """Plan to compress each run by the plan's method and budget."""
    runs, remaining_cells = planned_runs(memory, plan)
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
    candidates: Sequence[Candidates], runs: Sequence[CellRun], queries: Queries
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
    runs, remaining_cells = planned_runs(memory, plan, MAX_RECENT_CELLS)
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


def _candidates(
    memory: Memory, plan: CompressionPlan, runs: Sequence[CellRun], sample: QuerySample | None
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


def _unscored_candidates(memory: Memory, plan: CompressionPlan, run: CellRun) -> Candidates:
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
    memory: Memory, plan: CompressionPlan, run: CellRun, is_repeat: Tensor, quota: int
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

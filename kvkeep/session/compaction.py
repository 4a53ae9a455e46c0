"""Compaction: brings a session below a number of cells by deleting and compressing what is old.

A plan has up to three steps, and ends as soon as the target is reached:

1. "results": the oldest tool results are replaced by a short placeholder, in place.
2. "reasoning": the oldest reasoning is deleted, in place.
3. "compress": what is older than the newest turns is compressed, by `compress_memory`.

Pinned tokens, the system prompt and the newest turns stay as they are. What lies where is known by
names: see `kvkeep.session.message_spans`.
"""

import time
from collections.abc import Callable, Set
from dataclasses import dataclass, replace
from typing import Literal, get_args

from kvkeep import validation
from kvkeep.cache import NO_TOKEN, Cells, RaggedCells
from kvkeep.cache.shallow_copy import shallow_copy
from kvkeep.compression.calibration.calibration import Calibration
from kvkeep.compression.methods import BEST_UNCALIBRATED, make_method
from kvkeep.compression.methods.base import Budget
from kvkeep.compression.methods.kvzip import KVzip
from kvkeep.errors import ContextFull, InvalidArgument
from kvkeep.policies.archive_cells import halve_distances
from kvkeep.policies.full import Full
from kvkeep.session.compression import CompressionReport, compress_memory
from kvkeep.session.compression_plan import SINK_CELLS, CompressionPlan, default_method_name
from kvkeep.session.core import SessionCore, StateGuard, session_transaction
from kvkeep.session.editing import Recompute, edit_tokens
from kvkeep.session.in_place_edit import InPlaceEdit
from kvkeep.session.memory import Memory
from kvkeep.session.message_spans import SpanKind, newest_turn_start, spans_of_kind, system_end
from kvkeep.session.reevaluation import evaluate_placed

CompactionStep = Literal["results", "reasoning", "compress"]
COMPACTION_STEPS: tuple[CompactionStep, ...] = get_args(CompactionStep)
PLACEHOLDER = "[result removed]"
_MIN_RECENT = 32  # newest tokens that stay exact whatever the target is
# Exact cells take room from those that compression would choose, and lose more than they keep if
# they are many: with half instead of a quarter each, `benchmarks.compaction` finds a quarter less.
_RECENT_SHARE = 1 / 4  # of the target, for the newest turns
_USER_SHARE = 1 / 4  # of the rest, for what users said before them
_MIN_COMPRESSED = 16  # cells into which the older part can be compressed
_ROUNDING_CELLS = 8  # by which the target is lowered: see `_compression_plan`


@dataclass(frozen=True)
class CompactionReport:
    """The result of compacting a session.

    Attributes:
        target: the number of cells to come below.
        removed_results, removed_reasoning: names of the spans that were deleted.
        compression: of the third step; None if it was not needed, or not possible.
        tokens_evaluated: those of placeholders, and those evaluated again; the text's last token
            counts once for each span, although one evaluation may serve several.
        notes: why a step was left out, or the target not reached; in words.
    """

    target: int
    cells_before: int
    cells_after: int
    removed_results: tuple[str, ...] = ()
    removed_reasoning: tuple[str, ...] = ()
    compression: CompressionReport | None = None
    tokens_evaluated: int = 0
    seconds: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def changed(self) -> bool:
        """Whether the session was changed at all."""
        removed = self.removed_results or self.removed_reasoning
        return bool(removed) or self.compression is not None

    def summary(self) -> str:
        """Return what was done as one line, such as "3 tool results removed, 900 cells -> 410"."""
        parts = []
        for names, noun in ((self.removed_results, "tool result"), (self.removed_reasoning, "")):
            if names and noun:
                parts.append(f"{len(names)} {noun}{'s' * (len(names) > 1)} removed")
            elif names:
                parts.append(f"reasoning of {len(names)} answer{'s' * (len(names) > 1)} removed")
        if (report := self.compression) is not None:
            parts.append(f"older part compressed {report.ratio:.1f} times ({report.method})")
        parts.append(f"{self.cells_before:,} cells → {self.cells_after:,}")
        return ", ".join([*parts, *self.notes])


@dataclass(frozen=True)
class CompactionPlan:
    """The settings of one compaction: see `Session.compact`."""

    target: int
    keep_recent: int = 2
    keep_results: int = 3
    placeholder: str = PLACEHOLDER
    steps: tuple[CompactionStep, ...] = COMPACTION_STEPS
    recompute: Recompute = "none"
    calibration: Calibration | None = None
    progress: Callable[[int], None] | None = None

    @classmethod
    def checked(cls, target: float, max_kv_size: int, **settings: object) -> "CompactionPlan":
        """Return the plan with validated settings. target: as of `Session.compact`.

        Raises InvalidArgument.
        """
        if isinstance(target, float) and 0 < target < 1:
            target = max(1, int(target * max_kv_size))
        plan = cls(validation.integer("target", target, 1), **settings)  # type: ignore[arg-type]
        validation.integer("keep_recent", plan.keep_recent, 0)
        validation.integer("keep_results", plan.keep_results, 0)
        validation.text("placeholder", plan.placeholder)
        if unknown := [step for step in plan.steps if step not in COMPACTION_STEPS]:
            names = ", ".join(COMPACTION_STEPS)
            raise InvalidArgument(f"steps must be of {names}; found {unknown[0]!r:.100}")
        if plan.recompute not in get_args(Recompute):
            raise InvalidArgument(f'recompute must be "none" or "suffix"; found {plan.recompute!r}')
        return plan


def target_before(core: SessionCore, new_tokens: int, threshold: float) -> int | None:
    """Return the cells to compact a session to before `new_tokens` more; None if there is room.

    There is room up to `threshold`, a part of `max_kv_size`. The target is half of `max_kv_size`,
    or less for a long text. Policies other than "full" keep to their budget by themselves. Of more
    tokens than `max_kv_size` the session could not hold all, compacted or not: None.
    """
    policy = core.memory.policy
    limit = int(validation.finite_number("threshold", threshold) * policy.max_kv_size)
    has_room = core.memory.cache.cells + new_tokens <= limit
    if not isinstance(policy, Full) or has_room or new_tokens > policy.max_kv_size:
        return None
    return max(1, min(policy.max_kv_size // 2, limit - new_tokens))


def compact_session(core: SessionCore, plan: CompactionPlan) -> CompactionReport:
    """Compact a session by a plan, in one transaction. See `Session.compact`."""
    started, guard, draft = time.perf_counter(), StateGuard(core), _draft_of(core)
    report = CompactionReport(plan.target, core.memory.cache.cells, core.memory.cache.cells)
    for step in plan.steps:
        if draft.memory.cache.cells <= plan.target:
            break
        try:
            report = _run_step(draft, plan, step, report)
        except (InvalidArgument, ContextFull) as error:  # this step is impossible here
            report = replace(report, notes=(*report.notes, f"{step} left out: {error}"))
    cells = draft.memory.cache.cells
    if cells > plan.target:
        note = f"the target of {plan.target:,} was not reached"
        report = replace(report, notes=(*report.notes, note))
    if report.changed:
        guard.require_unchanged()
        core.state = draft.state
    return replace(report, cells_after=cells, seconds=time.perf_counter() - started)


def _run_step(
    core: SessionCore, plan: CompactionPlan, step: CompactionStep, report: CompactionReport
) -> CompactionReport:
    if step == "compress":
        return replace(report, compression=_compress_older(core, plan))
    kind: SpanKind = "result" if step == "results" else "reasoning"
    names, num_evaluated = _remove_spans(core, plan, kind)
    report = replace(report, tokens_evaluated=report.tokens_evaluated + num_evaluated)
    if kind == "result":
        return replace(report, removed_results=names)
    return replace(report, removed_reasoning=names)


# Deleting results and reasoning


def _remove_spans(
    core: SessionCore, plan: CompactionPlan, kind: SpanKind
) -> tuple[tuple[str, ...], int]:
    """Delete the oldest spans of a kind until the target is reached.

    Returns their names, and how many tokens were evaluated. Raises as `edit_tokens`.
    """
    ids = core.encode(plan.placeholder, special=False) if kind == "result" else []
    names = _removable_spans(core, plan, kind, len(ids))
    draft = _draft_of(core)
    removed, num_evaluated = [], 0
    for name in names:
        if draft.memory.cache.cells <= plan.target:
            break
        if not _is_removable(draft, name, len(ids)):
            continue  # a span that overlaps it was removed before
        start, end = draft.state.spans[name]
        span_name = name if ids else None
        edited = edit_tokens(
            *(draft, start, end, ids, plan.recompute, span_name, plan.progress),
            complete=InPlaceEdit.apply_deferred,
        )
        num_evaluated += edited.tokens_evaluated
        removed.append(name)
        if plan.progress:
            plan.progress(1)  # the text's last token
    if removed and draft.memory.hidden is None:
        with session_transaction([draft]) as (state,):
            evaluate_placed(state.memory)
    core.state = draft.state
    return tuple(removed), num_evaluated


def _removable_spans(
    core: SessionCore, plan: CompactionPlan, kind: SpanKind, replaced_by: int
) -> list[str]:
    """Return the names of spans that may be deleted, the oldest first.

    replaced_by: the tokens that take their place: shorter spans stay, and so do results that were
    removed before.
    """
    names, recent = spans_of_kind(core.state.spans, kind), _recent_start(core, plan)
    if kind == "result":
        names = names[: max(0, len(names) - plan.keep_results)]
    older = [name for name in names if core.state.spans[name][1] <= recent]
    return [name for name in older if _is_removable(core, name, replaced_by)]


def _is_removable(core: SessionCore, name: str, replaced_by: int) -> bool:
    """Whether a span is there, longer than `replaced_by`, held in cells, and not pinned."""
    memory, (start, end) = core.memory, core.state.spans.get(name, (0, 0))
    if end - start <= replaced_by or not memory.pins.isdisjoint(memory.serials[start:end]):
        return False
    return memory.count_exact(start, end) == end - start


def _draft_of(core: SessionCore) -> SessionCore:
    """Return a fork of the session, whose state can replace the session's as a whole."""
    draft = shallow_copy(core)
    draft.state = core.state.fork()
    return draft


# Compressing


def _compress_older(core: SessionCore, plan: CompactionPlan) -> CompressionReport:
    """Compress what is older than the recent part, so that the target is reached.

    What users said stays exact as far as it takes no more than a quarter of what is left of the
    target for the older part; the newest first. Raises InvalidArgument if the system prompt, pins
    and the newest tokens leave no room.
    """
    memory = core.memory
    if not isinstance(memory.policy, Full):
        raise InvalidArgument(
            f'step "compress" needs policy "full"; this session has policy "{memory.policy.name}": '
            'leave "compress" out of steps'
        )
    total = len(memory.tokens)
    fixed = frozenset(memory.serials[: system_end(core.state.spans)])
    recent = total - _recent_start(core, plan)
    while (room := plan.target - _unchanged_count(memory, fixed, recent)) < _MIN_COMPRESSED:
        if recent <= _MIN_RECENT:
            raise InvalidArgument(
                f"the system prompt, pinned tokens and the newest {recent} take "
                f"{plan.target - room:,} cells, which leaves too little room below the target of "
                f"{plan.target:,}: raise target, or unpin tokens"
            )
        recent = max(_MIN_RECENT, recent // 2)
    users, num_messages = _user_serials(core, int(room * _USER_SHARE), total - recent)
    try:
        compression = _compression_plan(core, plan, recent, num_messages)
        compacted, report = compress_memory(memory, replace(compression, unchanged=fixed | users))
    except InvalidArgument:  # too many short messages for the room that is left
        compression = _compression_plan(core, plan, recent)
        compacted, report = compress_memory(memory, replace(compression, unchanged=fixed))
    _limit_distances(compacted, recent)
    core.state = replace(core.state, memory=compacted)
    return report


def _compression_plan(
    core: SessionCore, plan: CompactionPlan, recent: int, num_messages: int = 0
) -> CompressionPlan:
    """Return a plan that compresses the older part, around so many messages that stay exact.

    The cells of earlier compactions have their reconstruction scores, and compete with the others
    by them. So what is needed to know the text stays, however old it is.
    """
    memory, statistics = core.memory, plan.calibration.statistics if plan.calibration else None
    method, compressed = default_method_name(memory, statistics), _compressed_cells(memory)
    keeps_scores = all(isinstance(x, RaggedCells) and x.scores is not None for x in compressed)
    if method == BEST_UNCALIBRATED and keeps_scores:
        method = KVzip.name
    # Each of several compressed runs is rounded up by one cell.
    target = max(1, plan.target - num_messages - _ROUNDING_CELLS)
    ratio = memory.cache.cells / target
    budget: Budget | None = "heads" if method == KVzip.name else None
    return CompressionPlan(
        *(make_method(method), ratio, budget, core.model.text, recent),
        statistics=statistics,
        progress=plan.progress,
        keeps_scores=method == KVzip.name,
    )


def _compressed_cells(memory: Memory) -> list[Cells]:
    return [segment.block.slots for segment in memory.cache.segments if segment.compressed]


def _unchanged_count(memory: Memory, fixed: Set[int], recent: int) -> int:
    """Return how many cells stay unchanged if `recent` newest tokens do."""
    serials = memory.cache.serials()
    unchanged = fixed | memory.pins | set(serials[:SINK_CELLS]) | set(memory.serials[-recent:])
    return sum(serial != NO_TOKEN and serial in unchanged for serial in serials)


def _user_serials(core: SessionCore, limit: int, recent_start: int) -> tuple[frozenset[int], int]:
    """Return the serials of the newest of the older messages of users, and of how many these are.

    limit: the most serials.
    """
    memory, spans, num_messages = core.memory, core.state.spans, 0
    held, result = set(memory.cache.serials()), set[int]()
    for name in reversed(spans_of_kind(spans, "user")):
        start, end = spans[name]
        serials = held.intersection(memory.serials[start : min(end, recent_start)])
        if len(result) + len(serials) > limit:
            break
        result |= serials
        num_messages += bool(serials)
    return frozenset(result), num_messages


def _recent_start(core: SessionCore, plan: CompactionPlan) -> int:
    """Return the first token of the part that stays exact: the newest turns.

    They count as far as they take no more than a quarter of the target.
    """
    total = len(core.memory.tokens)
    start = newest_turn_start(core.state.spans, plan.keep_recent)
    limit = max(_MIN_RECENT, int(plan.target * _RECENT_SHARE))
    return max(0, total - limit, min(start, total - _MIN_RECENT))


def _limit_distances(memory: Memory, recent: int) -> None:
    """Move older cells closer where the policy could otherwise not be filled to its budget.

    Compression leaves fewer cells at the same distances, and a model was trained for so many.
    """
    policy, cache = memory.policy, memory.cache
    assert isinstance(policy, Full)
    limit = max(policy.trained, policy.max_kv_size) - (policy.max_kv_size - cache.cells)
    if cache.reach > limit:
        halve_distances(cache, limit, recent)

"""Compaction: brings a session below a number of cells by deleting and compressing what is old.

A plan has up to three steps, and ends as soon as the target is reached:

1. "results": the oldest tool results are replaced by a short placeholder, in place.
2. "reasoning": the oldest reasoning is deleted, in place.
3. "compress": what is older than the newest turns is compressed, by `compress_older`.

Pinned tokens, the system prompt and the newest turns stay as they are. What lies where is known by
names: see `kvkeep.session.message_spans`.
"""

import time
from dataclasses import dataclass, replace

from kvkeep.cache.shallow_copy import shallow_copy
from kvkeep.errors import ContextFull, InvalidArgument
from kvkeep.session.compaction_plan import CompactionPlan, CompactionStep
from kvkeep.session.compression import CompressionReport
from kvkeep.session.core import SessionCore, StateGuard, session_transaction
from kvkeep.session.editing import edit_tokens
from kvkeep.session.in_place_edit import InPlaceEdit
from kvkeep.session.message_spans import SpanKind, spans_of_kind
from kvkeep.session.older_part import compress_older
from kvkeep.session.reevaluation import evaluate_placed


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
        return replace(report, compression=compress_older(core, plan))
    kind: SpanKind = "result" if step == "results" else "reasoning"
    names, num_evaluated = _remove_spans(core, plan, kind)
    report = replace(report, tokens_evaluated=report.tokens_evaluated + num_evaluated)
    if kind == "result":
        return replace(report, removed_results=names)
    return replace(report, removed_reasoning=names)


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
    names, recent = spans_of_kind(core.state.spans, kind), plan.recent_start(core)
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

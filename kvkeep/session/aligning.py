"""Applying an alignment to a session: all at once, or step by step."""

import time
from collections.abc import Callable, Generator, Iterator, Sequence

from kvkeep.errors import ContextFull, InvalidArgument
from kvkeep.runtime.worker import computes_in_worker
from kvkeep.session.alignment import (
    AlignmentOptions,
    AlignmentPlan,
    AlignmentReport,
    changed_ranges,
    plan_alignment,
)
from kvkeep.session.core import SessionCore, SessionState, StateGuard, session_transaction
from kvkeep.session.edit_scope import EditScope
from kvkeep.session.editing import prepare_edit
from kvkeep.session.evaluation import evaluate_all, refill_overwritten
from kvkeep.session.feeding import Feeding, FeedStep
from kvkeep.session.in_place_edit import LOCAL_WINDOWS, InPlaceEdit
from kvkeep.session.memory import Memory
from kvkeep.session.token_diff import common_length

_ALTERNATIVE = 'use mode="exact", or a new session'


def plan_for(memory: Memory, target: Sequence[int], options: AlignmentOptions) -> AlignmentPlan:
    """Plan how a memory's text becomes `target` in place.

    All of its tokens must be held, each in a cell of its own. Raises InvalidArgument if that, or
    the model, makes it impossible, and ContextFull for a text that is too long.
    """
    _require_alignable(memory, len(target))
    local_cache = memory.cache.local_cache
    window = None if local_cache is None else local_cache.window.size
    plan = plan_alignment(memory.tokens.array(), target, options, LOCAL_WINDOWS * (window or 0))
    _require_room(memory, plan.peak_tokens)
    return plan


def _require_alignable(memory: Memory, num_tokens: int) -> None:
    memory.require_no_states(
        "aligned in place", 'use mode="exact", which evaluates all after the last checkpoint'
    )
    cache, alternative = memory.cache, _ALTERNATIVE
    if any(segment.compressed for segment in cache.segments):
        raise InvalidArgument(f"compressed cells cannot be aligned in place: {alternative}")
    if any(segment.position_map.group > 1 for segment in cache.segments):
        raise InvalidArgument(f"grouped cells cannot be aligned in place: {alternative}")
    if cache.cells < len(memory.tokens):
        raise InvalidArgument(
            f"{len(memory.tokens) - cache.cells} of {len(memory.tokens)} tokens were evicted: what "
            f"is left cannot be aligned in place; {alternative}"
        )
    _require_room(memory, num_tokens)


def _require_room(memory: Memory, num_tokens: int) -> None:
    """Raise ContextFull if the policy would evict or change some of so many tokens."""
    exact_tokens = memory.policy.exact_tokens
    if num_tokens > exact_tokens:
        raise ContextFull(
            f'policy "{memory.policy.name}" holds {exact_tokens} tokens before any is evicted, '
            f"compressed or grouped, and alignment in place needs {num_tokens}: {_ALTERNATIVE}"
        )


def align(
    core: SessionCore,
    target: list[int],
    options: AlignmentOptions,
    progress: Callable[[int], None] | None = None,
) -> AlignmentReport:
    """Make `target` the session's text: see `Session.align`."""
    started, reason = time.perf_counter(), "exact alignment was asked for"
    if options.mode == "in_place":
        plan = plan_for(core.memory, target, options)
        if plan.seams and plan.saved >= options.min_saved:
            return _align_in_place(core, plan, started, progress)
        reason = f"it would save {plan.saved} tokens; expected {max(1, options.min_saved)} or more"
    return _align_exactly(core, target, reason, started, progress)


def _align_in_place(
    core: SessionCore,
    plan: AlignmentPlan,
    started: float,
    progress: Callable[[int], None] | None,
) -> AlignmentReport:
    guard, memory = StateGuard(core), core.memory.fork()
    for count in _steps(memory, plan, core.prefill_step):
        if progress:
            progress(count)
    evaluate_all(memory, plan.tail.ids, core.prefill_step, progress=progress)
    with session_transaction([core]) as (state,):
        guard.require_unchanged()
        _replace_memory(state, memory, plan)
    counts = (plan.seams, plan.kept, plan.moved, plan.evaluated)
    return AlignmentReport("in_place", "", *counts, time.perf_counter() - started)


def _align_exactly(
    core: SessionCore,
    target: list[int],
    reason: str,
    started: float,
    progress: Callable[[int], None] | None,
) -> AlignmentReport:
    guard, memory, tokens = StateGuard(core), core.memory, core.memory.tokens
    kept, end = common_length(tokens.array(), target[:-1]), len(tokens)
    core.state.check_first_prompt(len(target))
    if end - kept > memory.max_rewind:  # the beginning was evicted: evaluate all on its own
        memory = memory.fork()
        memory.clear()
        kept = end = 0
    finish, num_evaluated = prepare_edit(
        *(memory, kept, end, target[kept:], "suffix", core.prefill_step, progress)
    )
    with session_transaction([core]) as (state,):
        guard.require_unchanged()
        state.memory, _ = finish(state.memory)
        state.keep_first_prompt(len(target))
        state.move_spans(kept, len(tokens), len(target) - kept)
    kept = max(0, len(target) - num_evaluated)
    seconds = time.perf_counter() - started
    return AlignmentReport("exact", reason, 0, kept, 0, num_evaluated, seconds)


def _steps(memory: Memory, plan: AlignmentPlan, prefill_step: int) -> Generator[int, None, None]:
    """Apply a plan to a fork of a memory up to its tail; yield the tokens of each step.

    Earlier edits come first, so that the new tokens of later ones attend to the new text. The
    memory has no logits before its tail is evaluated. It must be discarded if this raises.
    """
    memory.drop_newest(len(memory.tokens) - plan.tail.start)
    growth = 0
    for edit in plan.edits:
        scope = EditScope.from_range(memory, edit.start + growth, edit.end + growth, edit.ids)
        in_place_edit = yield from InPlaceEdit.preparation(memory, scope, prefill_step)
        in_place_edit.splice(memory)
        growth += edit.growth
    refill_overwritten(memory, LOCAL_WINDOWS)


def _replace_memory(state: SessionState, memory: Memory, plan: AlignmentPlan) -> None:
    """Put an aligned memory into a session's next state, and move its spans."""
    state.memory = memory
    for start, end, added_count in changed_ranges(plan):
        state.move_spans(start, end, added_count)


class AlignedFeeding(Iterator[FeedStep]):
    """A prompt on its way into a session by an alignment in place, as `Feeding` by its evaluation.

    The session changes once all edits are evaluated; then the tail is fed, step by step. Until it
    is done, no other caller may change the session.

    source: the state that the plan aligns, which takes the place of the session's; by default it is
    the session's own. total: tokens to evaluate. done: how many of them are.
    """

    def __init__(self, core: SessionCore, plan: AlignmentPlan, source: SessionState | None = None):
        self.total, self.done = plan.evaluated, 0
        self._core, self._plan = core, plan
        self._source = None if source is None else (dict(source.spans), source.rounded)
        self._memory = (source or core.state).memory.fork()
        self._steps: Iterator[int] = _steps(self._memory, plan, core.prefill_step)
        self._tail: Feeding | None = None
        self._failed = False

    def __next__(self) -> FeedStep:
        return self.step()

    @computes_in_worker
    def step(self, end: int | None = None) -> FeedStep:
        """Evaluate the next step, of at most `prefill_step` tokens. end: not used."""
        if self._tail is None and (count := self._edit()):
            return self._advance(count)
        if self._tail is None:
            with session_transaction([self._core]) as (state,):
                if self._source is not None:
                    state.spans, state.rounded = self._source
                _replace_memory(state, self._memory, self._plan)
            self._tail = Feeding(self._core, list(self._plan.tail.ids))
        return self._advance(self._tail.step().tokens)

    def _edit(self) -> int:
        """Evaluate a step of the edits; return its tokens, 0 if all are done."""
        if self._failed:
            raise InvalidArgument("the alignment has failed: plan it anew")
        self._failed = True  # unless it comes to the last line
        count = next(self._steps, 0)
        self._failed = False
        return count

    def _advance(self, count: int) -> FeedStep:
        self.done += count
        return FeedStep(count, self.done, self.total)

"""Applying an alignment to a session: all at once, or step by step."""

import time
from collections.abc import Callable, Generator, Iterator, Sequence

from kvkeep.errors import ContextFull, InvalidArgument
from kvkeep.runtime.worker import computes_in_caller, computes_in_worker
from kvkeep.session.alignment import (
    AlignmentOptions,
    AlignmentPlan,
    AlignmentReport,
    changed_ranges,
    plan_alignment,
)
from kvkeep.session.checkpoints import max_rewind, take_checkpoint
from kvkeep.session.core import SessionCore, SessionState, StateGuard, session_transaction
from kvkeep.session.edit_scope import EditScope
from kvkeep.session.editing import evaluate_suffix
from kvkeep.session.evaluation import evaluate_all
from kvkeep.session.feeding import Feeding, FeedStep
from kvkeep.session.in_place_edit import LOCAL_WINDOWS, InPlaceEdit
from kvkeep.session.memory import Memory
from kvkeep.session.reevaluation import refill_overwritten
from kvkeep.session.retained import Retained, keep_after
from kvkeep.session.token_diff import common_length
from kvkeep.types import AlignmentMode

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
    Retained.after(memory, plan.changes, memory.policy.keep)  # its pins fit
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


@computes_in_caller
def align(
    core: SessionCore,
    target: list[int],
    options: AlignmentOptions,
    progress: Callable[[int], None] | None = None,
    min_keep: int = 0,
) -> AlignmentReport:
    """Make `target` the session's text: see `Session.align`.

    min_keep: how many of its first tokens are kept, at least, by policies that evict others.
    """
    started, memory = time.perf_counter(), core.memory
    plan, reason = None, 'mode "exact" was requested'
    if options.mode == "in_place":
        plan = plan_for(memory, target, options)
        needed = max(1, options.min_saved)
        reason = f"it would save {plan.saved} tokens; {needed} or more must be saved"
    changes = plan.changes if plan else changed_ranges(memory.tokens.array(), target)
    retained = Retained.after(memory, changes, keep_after(memory, changes, min_keep))
    del memory  # its cells could not be freed
    guard = StateGuard(core)
    if plan and plan.seams and plan.saved >= options.min_saved:
        memory = _aligned_in_place(core, plan, retained, progress)
        counts, reason = (plan.seams, plan.kept, plan.moved, plan.evaluated), ""
    else:
        plan = None
        memory, num_evaluated = _aligned_exactly(core, target, retained, progress)
        counts = (0, max(0, len(target) - num_evaluated), 0, num_evaluated)
    with session_transaction([core]) as (state,):
        guard.require_unchanged()
        state.memory = memory
        state.keep_first_prompt(len(target))
        for change in changes:
            state.move_spans(*change)
    mode: AlignmentMode = "in_place" if plan else "exact"
    return AlignmentReport(mode, reason, *counts, time.perf_counter() - started)


def _aligned_in_place(
    core: SessionCore,
    plan: AlignmentPlan,
    retained: Retained,
    progress: Callable[[int], None] | None,
) -> Memory:
    """Return the memory of the text that a plan makes in place."""
    memory = core.memory.fork()
    for count in _steps(memory, plan, retained, core.prefill_step):
        if progress:
            progress(count)
    take_checkpoint(memory)
    evaluate_all(memory, plan.tail.ids, core.prefill_step, progress=progress)
    retained.apply(memory)
    return memory


def _aligned_exactly(
    core: SessionCore,
    target: list[int],
    retained: Retained,
    progress: Callable[[int], None] | None,
) -> tuple[Memory, int]:
    """Return the memory of a text of which all after the common beginning is evaluated.

    Also returns how many tokens were evaluated.
    """
    memory, total = core.memory.fork(), len(core.memory.tokens)
    kept = common_length(memory.tokens.array(), target[:-1])
    core.state.check_first_prompt(len(target))
    if total - kept > max_rewind(memory):  # the beginning was evicted: evaluate all on its own
        memory.clear()
        kept = total = 0
    memory.require_room(len(target) - total)
    ids, pins = target[kept:], retained.pinned[kept:]
    return evaluate_suffix(memory, kept, ids, pins, retained.keep, core.prefill_step, progress)


def _steps(
    memory: Memory, plan: AlignmentPlan, retained: Retained, prefill_step: int
) -> Generator[int, None, None]:
    """Apply a plan to a fork of a memory up to its tail; yield the tokens of each step.

    Earlier edits come first, so that the new tokens of later ones attend to the new text. The
    memory has no logits before its tail is evaluated. It must be discarded if this raises.
    """
    memory.drop_newest(len(memory.tokens) - plan.tail.start)
    memory.set_pins(())  # an edit would pin tokens that are only evaluated again, or none of them
    growth = 0
    for edit in plan.edits:
        scope = EditScope.from_range(memory, edit.start + growth, edit.end + growth, edit.ids)
        in_place_edit = yield from InPlaceEdit.preparation(memory, scope, prefill_step)
        in_place_edit.splice(memory)
        growth += edit.growth
    refill_overwritten(memory, LOCAL_WINDOWS)
    retained.apply(memory)


class AlignedFeeding(Iterator[FeedStep]):
    """An iterator that prefills a prompt by alignment in place, with the interface of `Feeding`.

    The session changes once all edits are evaluated; then the tail is fed, step by step. Until it
    is done, no other caller may change the session.

    source: the state that the plan aligns, which takes the place of the session's; by default it is
    the session's own. total: tokens to evaluate. done: how many of them are.
    """

    def __init__(self, core: SessionCore, plan: AlignmentPlan, source: SessionState | None = None):
        self.total, self.done = plan.evaluated, 0
        self._core, self._plan = core, plan
        self._source = None if source is None else (dict(source.spans), source.rounded)
        self._memory = memory = (source or core.state).memory.fork()
        # `keep` counts the first tokens of any prompt: it stays as it was set.
        self._retained = Retained.after(memory, plan.changes, memory.policy.keep)
        self._steps: Iterator[int] = _steps(memory, plan, self._retained, core.prefill_step)
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
                state.memory = self._memory
                for change in self._plan.changes:
                    state.move_spans(*change)
            self._tail = Feeding(self._core, list(self._plan.tail.ids))
        count = self._tail.step().tokens
        if self._tail.done == self._tail.total:
            with session_transaction([self._core]) as (state,):
                self._retained.apply(state.memory)
        return self._advance(count)

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

"""Editing a session: tokens removed, inserted or replaced anywhere in it."""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Literal, get_args

from kvkeep.cache import merge_small_segments
from kvkeep.errors import InvalidArgument
from kvkeep.session.checkpoints import num_rewindable, require_rewind, take_checkpoint
from kvkeep.session.core import SessionCore, StateGuard, session_transaction
from kvkeep.session.edit_scope import EditScope
from kvkeep.session.evaluation import evaluate_all
from kvkeep.session.in_place_edit import InPlaceEdit
from kvkeep.session.memory import Memory
from kvkeep.session.reevaluation import (
    REFILL_STEP_TOKENS,
    evaluate_popped,
    reevaluate_last,
    refilled_before,
)

Recompute = Literal["none", "suffix"]
# Applies a prepared edit to a successor of the memory, as an `EditCompletion`.
InPlaceCompletion = Callable[[InPlaceEdit, Memory], tuple[Memory, int]]


@dataclass(frozen=True)
class EditReport:
    """The result of an edit.

    cells_moved: cells that are now seen from another distance; none of them was rewritten.
    tokens_evaluated: inserted and re-evaluated ones, the last one for its logits included, and with
        "suffix" those for local windows and states.
    """

    cells_moved: int
    tokens_evaluated: int
    seconds: float
    recompute: Recompute


def edit_tokens(
    core: SessionCore,
    start: int,
    end: int,
    ids: list[int],
    recompute: Recompute,
    span_name: str | None = None,
    progress: Callable[[int], None] | None = None,
    complete: InPlaceCompletion = InPlaceEdit.apply,
) -> EditReport:
    """Put `ids` in place of tokens `start ... end - 1`, and return the report; see `SessionEdits`.

    span_name: of the span that is replaced. progress, complete: see `prepare_edit`.
    Raises InvalidArgument if `progress` changed the session.
    """
    started = time.perf_counter()  # no local holds core.memory, or its cells could not be freed
    guard = StateGuard(core)
    core.state.check_first_prompt(len(ids))
    finish, num_evaluated = prepare_edit(
        *(core.memory, start, end, ids, recompute, core.prefill_step, progress, complete)
    )
    with session_transaction([core]) as (state,):
        guard.require_unchanged()
        state.memory, cells_moved = finish(state.memory)
        state.keep_first_prompt(len(ids))
        state.move_spans(start, end, len(ids))
        if span_name is not None and ids:
            state.spans = {**state.spans, span_name: (start, start + len(ids))}
    return EditReport(cells_moved, num_evaluated, time.perf_counter() - started, recompute)


def rewind(
    core: SessionCore, count: int, progress: Callable[[int], None] | None = None
) -> list[int]:
    """Remove and return the last `count` tokens; see `SessionEdits.rewind`.

    Raises InvalidArgument if `progress` changed the session.
    """
    if not count:
        return []  # without a new state
    guard, refilled = StateGuard(core), None
    is_clear = count == len(core.memory.tokens) > num_rewindable(core.memory)
    if not is_clear:
        require_rewind(core.memory, count)
        step_size = min(core.prefill_step, REFILL_STEP_TOKENS)
        refilled = refilled_before(core.memory, count, step_size, progress)
    with session_transaction([core]) as (state,):
        guard.require_unchanged()
        memory = state.memory
        if is_clear:
            removed = memory.clear()
        else:
            removed, last_ids, pinned = memory.rewind(count)
            if refilled is not None:
                memory.cache.take_overwritten(refilled)
            evaluate_popped(memory, last_ids, pinned)
        state.truncate_spans(len(memory.tokens))
    return removed


def remove_forgotten(core: SessionCore, start: int, end: int) -> EditReport:
    """Remove tokens that have no cells."""
    _require_cells_only(core.memory)
    if any(segment.compressed for segment in core.memory.cache.segments):
        raise InvalidArgument(
            f"tokens {start} to {end} are not in the cache, but compressed cells may still contain "
            "them: compressed tokens cannot be removed"
        )
    with session_transaction([core]) as (state,):
        state.memory.replace_tokens(start, end, ())
        state.move_spans(start, end, 0)
    return EditReport(0, 0, 0.0, "none")


# Completes an edit of which all but the last token is evaluated, in one step. It takes a successor
# of the memory, and returns the edited memory and how many cells it sees from another distance.
EditCompletion = Callable[[Memory], tuple[Memory, int]]


def prepare_edit(
    memory: Memory,
    start: int,
    end: int,
    ids: Sequence[int],
    recompute: Recompute,
    prefill_step: int,
    progress: Callable[[int], None] | None = None,
    complete: InPlaceCompletion = InPlaceEdit.apply,
) -> tuple[EditCompletion, int]:
    """Evaluate all but the last token of an edit: `ids` in place of tokens `start ... end - 1`.

    The memory does not change. Also returns how many tokens the whole edit evaluates. progress:
    called after each step with the number of tokens in it. complete: applies an edit in place;
    `InPlaceEdit.apply_deferred` where others follow.
    Raises InvalidArgument for a range that is out of bounds or no longer remembered, and
    ContextFull if the result would not fit.
    """
    if recompute not in get_args(Recompute):
        raise InvalidArgument(f'recompute must be "none" or "suffix"; found {recompute!r}')
    scope, total = EditScope.from_range(memory, start, end, ids), len(memory.tokens)
    if end < total and recompute == "none":
        _require_cells_only(memory)
        edit = InPlaceEdit.prepare(memory, scope, prefill_step, progress)
        return partial(complete, edit), len(ids) + 1
    memory.require_room(scope.growth)
    pins = [scope.pinned] * len(ids) + [serial in memory.pins for serial in memory.serials[end:]]
    edited_memory, num_evaluated = evaluate_suffix(
        *(memory, start, [*ids, *memory.tokens[end:]], pins, scope.keep, prefill_step, progress)
    )
    return lambda successor: (edited_memory, 0), num_evaluated


def evaluate_suffix(
    memory: Memory,
    start: int,
    ids: Sequence[int],
    pins: Sequence[bool],
    keep: int | None,
    prefill_step: int,
    progress: Callable[[int], None] | None = None,
) -> tuple[Memory, int]:
    """Return a fork of a memory with `ids` in place of all from token `start` on.

    Also returns how many tokens were evaluated. pins: whether each of `ids` is pinned. keep: the
    policy's setting; None if it evicts none. progress: as of `prepare_edit`. Raises InvalidArgument
    if tokens from `start` on are not held.
    """
    count, edited_memory = len(memory.tokens) - start, memory.fork()
    require_rewind(memory, count)
    _, last_ids, pinned = edited_memory.rewind(count)
    step_size = min(prefill_step, REFILL_STEP_TOKENS)
    num_refilled = reevaluate_last(edited_memory, last_ids, pinned, None, step_size, progress)
    if keep is not None:
        edited_memory.change_policy(keep=keep)
    take_checkpoint(edited_memory)
    for pinned, run in itertools.groupby(zip(pins, ids, strict=True), itemgetter(0)):
        run_ids = [token for _, token in run]
        evaluate_run = _evaluate_and_pin if pinned else evaluate_all
        evaluate_run(edited_memory, run_ids, prefill_step, progress=progress)
    edited_memory.cache.segments = merge_small_segments(edited_memory.cache.segments)
    return edited_memory, num_refilled + len(last_ids) + len(ids)


def _evaluate_and_pin(
    memory: Memory,
    ids: Sequence[int],
    prefill_step: int,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Evaluate tokens and pin them, each time as many as a window surely holds of the newest."""
    while ids:
        count = max(1, memory.policy.lasting_count(memory.cache))
        evaluate_all(memory, ids[:count], prefill_step, True, progress)
        ids = ids[count:]


def _require_cells_only(memory: Memory) -> None:
    """Raise InvalidArgument if layers keep states, which an edit in place cannot change."""
    memory.require_no_states(
        "edited in place",
        'use recompute="suffix", which evaluates all that follows the last checkpoint before it',
    )

"""Editing a session: tokens removed, inserted or replaced anywhere in it."""

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from kvkeep import validation
from kvkeep.cache import merge_small_segments
from kvkeep.errors import InvalidArgument
from kvkeep.session.core import SessionCore, session_transaction
from kvkeep.session.evaluation import evaluate, rewind
from kvkeep.session.in_place_edit import EditScope, InPlaceEdit
from kvkeep.session.memory import Memory
from kvkeep.session.spans import after_edit

Recompute = Literal["none", "suffix"]


@dataclass(frozen=True)
class EditReport:
    """The result of an edit.

    cells_moved: cells that are now seen from another distance; none of them was rewritten.
    tokens_evaluated: inserted and re-evaluated ones, the last one for its logits included.
    """

    cells_moved: int
    tokens_evaluated: int
    seconds: float
    recompute: Recompute


def delete(
    core: SessionCore, start: int | str, end: int | None, recompute: Recompute
) -> EditReport:
    """Remove a range of tokens or a named span; see `Session.delete`."""
    first, last = core.token_range(start, end)
    if recompute == "none" and first == last:
        core.set_span(str(start), None)
        return EditReport(0, 0, 0.0, recompute)
    if recompute == "none" and core.is_forgotten((first, last)):
        return _remove_forgotten(core, first, last)
    return edit(core, first, last, [], recompute)


def insert(
    core: SessionCore, at: int, text: str | Sequence[int], recompute: Recompute, special: bool
) -> EditReport:
    """Insert text or token ids before token `at`; see `Session.insert`."""
    at = validation.integer("at", at)
    return edit(core, at, at, core.encode(text, special), recompute)


def replace(
    core: SessionCore,
    start: int | str,
    end: int | None,
    text: str | Sequence[int],
    recompute: Recompute,
    special: bool,
) -> EditReport:
    """Replace a range of tokens or a named span by others; see `Session.replace`."""
    (first, last), ids = core.token_range(start, end), core.encode(text, special)
    return edit(core, first, last, ids, recompute, start if isinstance(start, str) else None)


def make_room(core: SessionCore, count: int, bridge: str, first: int) -> EditReport:
    """Remove old tokens after the first ones so that `count` more fit; see `Session.make_room`.

    first: how many of the first tokens stay.
    """
    ids, memory = core.encode(bridge, special=False), core.memory
    free = len(memory.tokens) - first - len(ids) - 1
    if not 1 <= count <= free or first < 0:
        raise InvalidArgument(
            f"make_room takes 1 to {free} tokens here, with the first {first} kept and a "
            f"bridge of {len(ids)}; found {count}"
        )
    end = first + count + len(ids)
    if memory.pins & set(memory.serials[first:end]):
        raise InvalidArgument(
            f"make_room would remove tokens {first} to {end}, and some of them are pinned: "
            "unpin them, or keep more"
        )
    return edit(core, first, end, ids, "none")


def edit(
    core: SessionCore,
    start: int,
    end: int,
    ids: list[int],
    recompute: Recompute,
    name: str | None = None,
) -> EditReport:
    """Put `ids` in place of tokens `start ... end - 1` of a session.

    name: of the span that is replaced; it names `ids` afterwards.
    """
    core.memory.require_no_states("edited")
    core.state.check_prompt(len(ids))
    prepared = prepare_edit(core.memory, start, end, ids, recompute, core.prefill_step)
    with session_transaction([core]) as (state,):
        state.memory, report = prepared.apply(state.memory)
        state.keep_prompt(len(ids))
        state.move_spans(lambda span: after_edit(span, start, end, len(ids)))
        if name is not None and ids:
            state.spans = {**state.spans, name: (start, start + len(ids))}
    return report


def _remove_forgotten(core: SessionCore, start: int, end: int) -> EditReport:
    """Remove tokens that are forgotten altogether from the history."""
    core.memory.require_no_states("edited")
    if any(segment.compressed for segment in core.memory.cache.segments):
        raise InvalidArgument(
            f"tokens {start} to {end} are not remembered, but may live on in compressed "
            "cells, which they share with others: compressed tokens cannot be removed"
        )
    with session_transaction([core]) as (state,):
        state.memory.remove_from_history(start, end)
        state.move_spans(lambda span: after_edit(span, start, end, 0))
    return EditReport(0, 0, 0.0, "none")


@dataclass(frozen=True)
class PreparedEdit:
    """An edit of which all but the last token is evaluated, so that one step completes it.

    result: the edited memory, or an edit in place that is still to be applied. evaluated: tokens in
    all. started: the time of `time.perf_counter` at which it began.
    """

    result: Memory | InPlaceEdit
    evaluated: int
    recompute: Recompute
    started: float

    def apply(self, successor: Memory) -> tuple[Memory, EditReport]:
        """Return the edited memory and the report.

        successor: of the memory that the edit was prepared for; an edit in place modifies it.
        """
        memory, moved = successor, 0
        if isinstance(self.result, InPlaceEdit):
            moved = self.result.apply(successor)
        else:
            memory = self.result
        seconds = time.perf_counter() - self.started
        return memory, EditReport(moved, self.evaluated, seconds, self.recompute)


def prepare_edit(
    memory: Memory,
    start: int,
    end: int,
    ids: Sequence[int],
    recompute: Recompute,
    prefill_step: int,
) -> PreparedEdit:
    """Evaluate what it takes to put `ids` in place of tokens `start ... end - 1`.

    The memory does not change. recompute: as for `Session.delete`; with "none", earlier cells are
    seen from other distances, and later ones stay as they were computed.

    Raises InvalidArgument for a range that is out of bounds or no longer remembered, and
    ContextFull if the result would not fit.
    """
    started, total = time.perf_counter(), len(memory.tokens)
    if recompute not in get_args(Recompute):
        raise InvalidArgument(f'recompute must be "none" or "suffix"; found {recompute!r}')
    if not 0 <= start <= end <= total:
        raise InvalidArgument(
            f"an edit needs 0 <= start <= end <= {total}, the number of tokens; "
            f"found {start} to {end}"
        )
    if start == end and not ids:
        raise InvalidArgument(f"nothing to do: no token between {start} and {end}, none to put in")
    result: Memory | InPlaceEdit
    if end == total or recompute == "suffix":
        result = _evaluate_suffix(memory, start, end, ids, prefill_step)
        evaluated = len(ids) + total - end + (1 if 0 < start < total else 0)
    else:
        result = InPlaceEdit.prepare(memory, start, end, ids, prefill_step)
        evaluated = len(ids) + 1
    return PreparedEdit(result, evaluated, recompute, started)


def _evaluate_suffix(
    memory: Memory, start: int, end: int, ids: Sequence[int], prefill_step: int
) -> Memory:
    """Return a memory that is rewound to `start` and has `ids` and the later tokens evaluated."""
    removed = len(memory.tokens) - start
    memory.require_room(len(ids) - (end - start))
    memory.require_rewind(removed)
    edited = memory.fork()
    exact_cells = sum(s.length for s in memory.cache.segments if not s.compressed)
    scope = EditScope.locate(memory, start, end, ids, exact_cells - removed)
    following = [*ids, *memory.tokens[end:]]
    are_pinned = [scope.pinned] * len(ids) + [s in memory.pins for s in memory.serials[end:]]
    rewind(edited, removed)
    if memory.is_bounded:
        edited.change_policy(keep=scope.keep)
    done = 0
    for pinned, run in itertools.groupby(are_pinned):
        count = len(list(run))
        for _ in evaluate(edited, following[done : done + count], prefill_step):
            pass
        if pinned:
            edited.pin(len(edited.tokens) - count, len(edited.tokens))
        done += count
    edited.cache.segments = merge_small_segments(edited.cache.segments)
    return edited

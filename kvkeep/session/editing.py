"""Editing a session: tokens removed, inserted or replaced anywhere in it."""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Literal, get_args

from kvkeep import validation
from kvkeep.cache import merge_small_segments
from kvkeep.errors import InvalidArgument
from kvkeep.runtime.worker import computes_in_caller
from kvkeep.session.core import SessionCore, session_transaction
from kvkeep.session.edit_scope import EditScope
from kvkeep.session.evaluation import evaluate_all, reevaluate_last
from kvkeep.session.in_place_edit import InPlaceEdit
from kvkeep.session.memory import Memory

Recompute = Literal["none", "suffix"]


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


class SessionEdits:
    """The methods of a `Session` that edit its text."""

    core: SessionCore

    @computes_in_caller
    def delete(
        self, start: int | str, end: int | None = None, recompute: Recompute = "none"
    ) -> EditReport:
        """Remove tokens `start ... end - 1`, or a named span.

        recompute: "none" leaves later cells as they were computed, so that the edit costs little;
            "suffix" evaluates everything after it again, which is exact.

        With "none", a range without any cell left is removed from `tokens`, and an empty span from
        `spans`, without evaluating anything. Raises InvalidArgument if there is no such range or
        span, or some of it is no longer remembered.
        """
        core, (first, last) = self.core, self.core.token_range(start, end)
        if recompute == "none" and first == last:
            core.set_span(str(start), None)
            return EditReport(0, 0, 0.0, recompute)
        if recompute == "none" and core.is_forgotten((first, last)):
            return _remove_forgotten(core, first, last)
        return edit_tokens(core, first, last, [], recompute)

    @computes_in_caller
    def insert(
        self,
        at: int,
        text: str | Sequence[int],
        recompute: Recompute = "none",
        special: bool = False,
    ) -> EditReport:
        """Insert text or token ids before token `at`; see `delete`, and `feed` for `special`.

        Raises ContextFull if it does not fit.
        """
        at = validation.integer("at", at)
        return edit_tokens(self.core, at, at, self.core.encode(text, special), recompute)

    @computes_in_caller
    def replace(
        self,
        start: int | str,
        end: int | None,
        text: str | Sequence[int],
        recompute: Recompute = "none",
        special: bool = False,
    ) -> EditReport:
        """Replace a range, or a named span (`end` None), by text or token ids; see `insert`.

        A pinned or kept range stays pinned or kept. A span that is replaced by its name becomes the
        range of the new tokens, even if it was empty.
        """
        (first, last), ids = self.core.token_range(start, end), self.core.encode(text, special)
        span_name = start if isinstance(start, str) else None
        return edit_tokens(self.core, first, last, ids, recompute, span_name)

    @computes_in_caller
    def make_room(self, count: int, bridge: str = " (...) ", keep: int | None = None) -> EditReport:
        """Remove old tokens so that `count` more fit, and insert `bridge` in their place.

        The first `keep` tokens stay: by default those that the policy keeps, or 4.
        """
        count, keep = validation.integer("count", count), validation.optional_integer("keep", keep)
        core, memory = self.core, self.core.memory
        if keep is None:
            keep = min(core.state.keep, 4) if memory.policy.name == "full" else core.state.keep
        ids = core.encode(bridge, special=False)
        max_count = len(memory.tokens) - keep - len(ids) - 1
        if not 1 <= count <= max_count or keep < 0:
            raise InvalidArgument(
                f"make_room takes 1 to {max_count} tokens, with {keep} kept tokens and a bridge of "
                f"{len(ids)}; found {count}"
            )
        end = keep + count + len(ids)
        if memory.pins & set(memory.serials[keep:end]):
            raise InvalidArgument(
                f"make_room would remove tokens {keep} to {end}, some of which are pinned: unpin "
                "them, or increase keep"
            )
        return edit_tokens(core, keep, end, ids, "none")


def edit_tokens(
    core: SessionCore,
    start: int,
    end: int,
    ids: list[int],
    recompute: Recompute,
    span_name: str | None = None,
) -> EditReport:
    """Put `ids` in place of tokens `start ... end - 1`, and return the report; see `SessionEdits`.

    span_name: of the span that is replaced.
    """
    started = time.perf_counter()  # no local holds core.memory, or its cells could not be freed
    core.state.check_first_prompt(len(ids))
    finish, num_evaluated = prepare_edit(core.memory, start, end, ids, recompute, core.prefill_step)
    with session_transaction([core]) as (state,):
        state.memory, cells_moved = finish(state.memory)
        state.keep_first_prompt(len(ids))
        state.move_spans(start, end, len(ids))
        if span_name is not None and ids:
            state.spans = {**state.spans, span_name: (start, start + len(ids))}
    return EditReport(cells_moved, num_evaluated, time.perf_counter() - started, recompute)


def _remove_forgotten(core: SessionCore, start: int, end: int) -> EditReport:
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
) -> tuple[EditCompletion, int]:
    """Evaluate all but the last token of an edit: `ids` in place of tokens `start ... end - 1`.

    The memory does not change. Also returns how many tokens the whole edit evaluates.
    Raises InvalidArgument for a range that is out of bounds or no longer remembered, and
    ContextFull if the result would not fit.
    """
    if recompute not in get_args(Recompute):
        raise InvalidArgument(f'recompute must be "none" or "suffix"; found {recompute!r}')
    scope, total = EditScope.from_range(memory, start, end, ids), len(memory.tokens)
    if end < total and recompute == "none":
        _require_cells_only(memory)
        return InPlaceEdit.prepare(memory, scope, prefill_step).apply, len(ids) + 1
    memory.require_room(scope.growth)
    memory.require_rewind(total - start)
    following_ids = [*ids, *memory.tokens[end:]]
    pins = [scope.pinned] * len(ids) + [serial in memory.pins for serial in memory.serials[end:]]
    edited_memory = memory.fork()
    _, last_ids, pinned = edited_memory.rewind(total - start)
    num_refilled = reevaluate_last(edited_memory, last_ids, pinned)
    if scope.keep is not None:
        edited_memory.change_policy(keep=scope.keep)
    for pinned, run in itertools.groupby(zip(pins, following_ids, strict=True), itemgetter(0)):
        evaluate_all(edited_memory, [token for _, token in run], prefill_step, pinned)
    edited_memory.cache.segments = merge_small_segments(edited_memory.cache.segments)
    num_evaluated = num_refilled + len(last_ids) + len(following_ids)
    return lambda successor: (edited_memory, 0), num_evaluated


def _require_cells_only(memory: Memory) -> None:
    """Raise InvalidArgument if layers keep states, which an edit in place cannot change."""
    memory.require_no_states(
        "edited in place",
        'use recompute="suffix", which evaluates all that follows the last checkpoint before it',
    )

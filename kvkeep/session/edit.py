"""Editing a live memory: tokens taken out, put in or replaced, anywhere in it."""

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from kvkeep.errors import InvalidArgument
from kvkeep.session.change import Change, bounded
from kvkeep.session.edit_in_place import put_in_place
from kvkeep.session.memory import Memory

Recompute = Literal["none", "suffix"]


@dataclass(frozen=True)
class EditReport:
    """What an edit did.

    cells_moved: cells that are now seen from another distance; none of them was rewritten.
    tokens_evaluated: those put in, those evaluated anew, and the last one for its logits.
    seconds: wall time. recompute: the mode.
    """

    cells_moved: int
    tokens_evaluated: int
    seconds: float
    recompute: Recompute


def edit(
    memory: Memory,
    start: int,
    end: int,
    ids: Sequence[int],
    recompute: Recompute,
    prefill_step: int,
) -> tuple[Memory, EditReport]:
    """The memory with `ids` in the place of tokens `start ... end - 1`; the given one stays.

    recompute: "none" leaves later cells as they were computed and changes only the distances at
        which earlier ones are seen; its cost is that of the edit. "suffix" evaluates everything
        after the edit anew, which is exact.

    Raises InvalidArgument for a range that is not one, or that is no longer remembered, and
    ContextFull where the result would not fit.
    """
    begun, total = time.perf_counter(), len(memory.tokens)
    if recompute not in get_args(Recompute):
        raise InvalidArgument(f'recompute must be "none" or "suffix"; found {recompute!r}')
    if not 0 <= start <= end <= total:
        raise InvalidArgument(
            f"an edit needs 0 <= start <= end <= {total}, the number of tokens; "
            f"found {start} to {end}"
        )
    if start == end and not ids:
        raise InvalidArgument(f"nothing to do: no token between {start} and {end}, none to put in")
    if end == total or recompute == "suffix":
        edited, moved = _evaluated_anew(memory, start, end, ids, prefill_step), 0
        evaluated = len(ids) + total - end + (1 if 0 < start < total else 0)
    else:
        edited, moved = put_in_place(memory, start, end, ids, prefill_step)
        evaluated = len(ids) + 1
    return edited, EditReport(moved, evaluated, time.perf_counter() - begun, recompute)


def _evaluated_anew(
    memory: Memory, start: int, end: int, ids: Sequence[int], prefill_step: int
) -> Memory:
    taken = len(memory.tokens) - start
    memory.require_room(len(ids) - (end - start))
    memory.require_rewind(taken)
    exact = sum(s.length for s in memory.cache.segments if not s.compressed)
    change = Change.of(memory, start, end, ids, exact - taken)
    following = [*ids, *memory.tokens[end:]]
    pinned = [change.pinned] * len(ids) + [s in memory.pins for s in memory.serials[end:]]
    work = memory.copy()
    work.take_back(taken)
    if bounded(memory):
        work.change(keep=change.keep)
    done = 0
    for pin, run in itertools.groupby(pinned):
        count = len(list(run))
        for _ in work.evaluate(following[done : done + count], prefill_step):
            pass
        if pin:
            work.pin(len(work.tokens) - count, len(work.tokens))
        done += count
    return work

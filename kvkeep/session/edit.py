"""Editing a live memory: tokens taken out, put in or replaced, anywhere in it."""

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from kvkeep.cache import merge_small_segments
from kvkeep.errors import InvalidArgument
from kvkeep.session.change import Change, bounded
from kvkeep.session.in_place_edit import InPlace
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


@dataclass(frozen=True)
class PreparedEdit:
    """An edit that lacks no more than a step: all but the last token is evaluated.

    how: the memory that was evaluated anew, or an edit in place. evaluated: tokens in all.
    """

    how: Memory | InPlace
    evaluated: int
    recompute: Recompute
    begun: float

    def made_in(self, successor: Memory) -> tuple[Memory, EditReport]:
        """The edited memory: another one, or that successor of the memory it was prepared for."""
        memory, moved = successor, 0
        if isinstance(self.how, InPlace):
            moved = self.how.make(successor)
        else:
            memory = self.how
        seconds = time.perf_counter() - self.begun
        return memory, EditReport(moved, self.evaluated, seconds, self.recompute)


def prepare_edit(
    memory: Memory,
    start: int,
    end: int,
    ids: Sequence[int],
    recompute: Recompute,
    prefill_step: int,
) -> PreparedEdit:
    """Evaluates what an edit needs that puts `ids` in the place of tokens `start ... end - 1`.

    The memory stays as it is.

    recompute: "none" leaves later cells as they were computed and changes only the distances at
        which earlier ones are seen; its cost is that of the edit. "suffix" evaluates everything
        after the edit anew, which is exact.

    Raises InvalidArgument for a range that is not one, or that is no longer remembered, and
    ContextFull where the result would not fit.
    """
    begun, total = time.perf_counter(), len(memory.tokens)
    memory.require_no_states("edited")
    if recompute not in get_args(Recompute):
        raise InvalidArgument(f'recompute must be "none" or "suffix"; found {recompute!r}')
    if not 0 <= start <= end <= total:
        raise InvalidArgument(
            f"an edit needs 0 <= start <= end <= {total}, the number of tokens; "
            f"found {start} to {end}"
        )
    if start == end and not ids:
        raise InvalidArgument(f"nothing to do: no token between {start} and {end}, none to put in")
    how: Memory | InPlace
    if end == total or recompute == "suffix":
        how = _evaluated_anew(memory, start, end, ids, prefill_step)
        evaluated = len(ids) + total - end + (1 if 0 < start < total else 0)
    else:
        how, evaluated = InPlace.of(memory, start, end, ids, prefill_step), len(ids) + 1
    return PreparedEdit(how, evaluated, recompute, begun)


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
    work = memory.fork()
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
    work.cache.segments = merge_small_segments(work.cache.segments)
    return work

"""Alignment: a session's text becomes another one, with most of its cells left as they are.

A prompt that differs from a session's text in some places is planned as edits of the tokens: spans
that are deleted, inserted or replaced in place, and a *tail* that is evaluated after all of them.
The place at which cells that were computed after another text begin is a *seam*.

    session:  S S S S  old  A A A A A A  reminder  B B B B  end
    target:   S S S S  new  A A A A A A            B B B B  next question
              kept     |seam: moved     |seam: moved        tail
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np
from numpy.typing import ArrayLike

from kvkeep import validation
from kvkeep.errors import InvalidArgument
from kvkeep.session.token_diff import EqualRun, equal_runs
from kvkeep.types import AlignmentMode

DEFAULT_REREAD = 16  # tokens that are evaluated again after a seam
DEFAULT_MIN_SAVED = 256  # tokens that alignment in place must save
_MIN_RUN = 32  # tokens that are worth a seam
_SINKS = 4  # first tokens, which all others attend to


@dataclass(frozen=True)
class TokenEdit:
    """Tokens `start ... end - 1` of a text, before any edit, and the ids that replace them.

    reread: how many of the newest of both are equal: tokens after the seam, evaluated again.
    """

    start: int
    end: int
    ids: tuple[int, ...]
    reread: int = 0

    @property
    def growth(self) -> int:
        return len(self.ids) - (self.end - self.start)


@dataclass(frozen=True)
class AlignmentPlan:
    """How a session's text becomes another one in place.

    edits: in the order of the text, one for each seam. tail: replaces the end of the text, and is
    evaluated after all edits. kept: tokens of the common beginning, whose cells stay as they are.
    moved: tokens whose cells stay, but were computed after another text. evaluated: all others of
    the new text. refilled: at most so many tokens are evaluated again for windows of local layers.
    """

    edits: tuple[TokenEdit, ...]
    tail: TokenEdit
    kept: int
    moved: int
    evaluated: int
    refilled: int = 0

    @property
    def seams(self) -> int:
        return len(self.edits)

    @property
    def saved(self) -> int:
        """How many tokens fewer are evaluated than if all behind the common beginning were."""
        return self.moved - self.refilled

    @property
    def peak_tokens(self) -> int:
        """The most tokens at any time: after each edit in turn, and before the tail."""
        growths = (edit.growth for edit in self.edits)
        return self.tail.start + max(itertools.accumulate(growths, initial=0))


@dataclass(frozen=True)
class AlignmentReport:
    """The result of `Session.align`.

    mode: "in_place", or "exact" if all after the common beginning was evaluated. reason: why it was
    not aligned in place; "" if it was. kept, moved, evaluated: see `AlignmentPlan`; with "exact",
    the last of the common beginning and tokens for local windows and states count as evaluated too.
    """

    mode: AlignmentMode
    reason: str
    seams: int
    kept: int
    moved: int
    evaluated: int
    seconds: float


@dataclass(frozen=True)
class AlignmentOptions:
    """The choices of an alignment.

    mode: "exact" reuses only the common beginning. min_saved: tokens that alignment in place must
    save, or all after the common beginning is evaluated. reread: tokens after each seam that are
    evaluated again.
    """

    mode: AlignmentMode = "exact"
    min_saved: int = DEFAULT_MIN_SAVED
    reread: int = DEFAULT_REREAD

    def __post_init__(self) -> None:
        if self.mode not in get_args(AlignmentMode):
            raise InvalidArgument(f'alignment is "exact" or "in_place"; found {self.mode!r}')
        validation.integer("min_saved", self.min_saved, 0)
        validation.integer("reread", self.reread, 0)


def plan_alignment(
    tokens: ArrayLike,
    target: Sequence[int],
    reread: int = DEFAULT_REREAD,
    refill: int = 0,
) -> AlignmentPlan:
    """Plan how a text becomes another one, which is not empty.

    Runs of equal tokens too short to be worth a seam are evaluated, as is the last token, for its
    logits. refill: tokens before each edit that are evaluated again for windows of local layers.
    """
    edits, position, kept, moved = list[TokenEdit](), EqualRun(0, 0, 0), 0, 0
    for run in equal_runs(tokens, target, _MIN_RUN):
        length = min(run.length, len(target) - 1 - run.new)
        if run.old == run.new == 0:
            kept, position = length, EqualRun(length, length, 0)
            continue
        # The first tokens are attention sinks, which only the beginning of a text can be.
        reread_here = reread if run.new else max(reread, _SINKS)
        if length - reread_here < _MIN_RUN:
            continue
        ids = tuple(target[position.new : run.new + reread_here])
        edits.append(TokenEdit(position.old, run.old + reread_here, ids, reread_here))
        position = EqualRun(run.old + length, run.new + length, 0)
        moved += length - reread_here
    tail = TokenEdit(position.old, np.size(tokens), tuple(target[position.new :]))
    evaluated = len(target) - kept - moved
    refilled = _count_refilled(edits, len(target) - len(tail.ids), refill) if refill else 0
    return AlignmentPlan(tuple(edits), tail, kept, moved, evaluated, refilled)


def _count_refilled(edits: Sequence[TokenEdit], tail_start: int, refill: int) -> int:
    """Return how many tokens are evaluated again, at most, before insertions and the tail."""
    growths = itertools.accumulate((edit.growth for edit in edits), initial=0)
    starts = [edit.start + growth for edit, growth in zip(edits, growths, strict=False) if edit.ids]
    return sum(min(start, refill) for start in [*starts, tail_start])


def changed_ranges(plan: AlignmentPlan) -> Iterator[tuple[int, int, int]]:
    """Yield each replaced range and how many tokens replace it, for edits one after the other.

    Without tokens that are only evaluated again.
    """
    growth = 0
    for edit in (*plan.edits, plan.tail):
        yield edit.start + growth, edit.end + growth - edit.reread, len(edit.ids) - edit.reread
        growth += edit.growth

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
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np
from numpy.typing import ArrayLike

from kvkeep import validation
from kvkeep.errors import InvalidArgument
from kvkeep.session.token_diff import EqualRun, equal_runs
from kvkeep.types import AlignmentMode

DEFAULT_REREAD = 16  # tokens that are evaluated again after a seam
DEFAULT_REREAD_SHARE = 0.05  # of a text: with so much of it evaluated, no more is evaluated again
DEFAULT_MIN_SAVED = 256  # tokens that alignment in place must save
SINKS = 4  # first tokens, which all others attend to
_MIN_RUN = 32  # tokens that are worth a seam
_MIN_EQUAL = 8  # equal tokens that names and pins stay with

Change = tuple[int, int, int]  # a replaced range, and how many tokens replace it


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
    """The edits that turn a session's text into another one in place.

    edits: in the order of the text, one for each seam. tail: replaces the end of the text, and is
    evaluated after all edits. kept: tokens of the common prefix whose cells are reused unchanged
    (not the policy's `keep`). moved: tokens whose cells stay, but were computed after another text.
    evaluated: all others of the new text. changes: see `changed_ranges`. refilled: at most so many
    tokens are evaluated again for windows of local layers.
    """

    edits: tuple[TokenEdit, ...]
    tail: TokenEdit
    kept: int
    moved: int
    evaluated: int
    changes: tuple[Change, ...]
    refilled: int = 0

    @property
    def seams(self) -> int:
        return len(self.edits)

    @property
    def saved(self) -> int:
        """The tokens saved compared with evaluating everything after the common prefix."""
        return self.moved - self.refilled

    @property
    def peak_tokens(self) -> int:
        """The most tokens at any time: after each edit in turn, and before the tail."""
        growths = (edit.growth for edit in self.edits)
        return self.tail.start + max(itertools.accumulate(growths, initial=0))


@dataclass(frozen=True)
class AlignmentReport:
    """The result of `Session.align`.

    mode: "in_place", or "exact" if all after the common prefix was evaluated. reason: why it was
    not aligned in place; "" if it was. kept: tokens of the common prefix whose cells are reused
    unchanged (not the policy's `keep`). moved, evaluated: see `AlignmentPlan`; with "exact", the
    last of the common prefix and tokens for local windows and states count as evaluated too.
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

    mode: "exact" reuses only the common prefix. min_saved: tokens that alignment in place must
    save, or all after the common prefix is evaluated. reread: the most tokens after each seam that
    are evaluated again. reread_share: re-evaluation stops once this share of the text is evaluated,
    new tokens included; `reread` tokens in total are always allowed. 1 for no limit.
    """

    mode: AlignmentMode = "exact"
    min_saved: int = DEFAULT_MIN_SAVED
    reread: int = DEFAULT_REREAD
    reread_share: float = DEFAULT_REREAD_SHARE

    def __post_init__(self) -> None:
        if self.mode not in get_args(AlignmentMode):
            raise InvalidArgument(f'alignment is "exact" or "in_place"; found {self.mode!r}')
        validation.integer("min_saved", self.min_saved, 0)
        validation.integer("reread", self.reread, 0)
        share = validation.finite_number("reread_share", self.reread_share)
        if not 0 <= share <= 1:
            raise InvalidArgument(f"reread_share is 0 to 1; found {share}")


def plan_alignment(
    tokens: ArrayLike,
    target: Sequence[int],
    options: AlignmentOptions,
    refill: int = 0,
) -> AlignmentPlan:
    """Plan how a text becomes another one, which is not empty.

    Runs of equal tokens too short to be worth a seam are evaluated, as is the last token, for its
    logits. refill: tokens before each edit that are evaluated again for windows of local layers.
    """
    all_runs = equal_runs(tokens, target, _MIN_EQUAL)
    kept, runs = _reusable_runs(all_runs, len(target))
    edits, position, moved = list[TokenEdit](), EqualRun(kept, kept, 0), 0
    for run, reread in zip(runs, _rereads(runs, kept, len(target), options), strict=True):
        if reread == run.length:
            continue
        ids = tuple(target[position.new : run.new + reread])
        edits.append(TokenEdit(position.old, run.old + reread, ids, reread))
        position = EqualRun(run.old + run.length, run.new + run.length, 0)
        moved += run.length - reread
    tail = TokenEdit(position.old, np.size(tokens), tuple(target[position.new :]))
    evaluated = len(target) - kept - moved
    refilled = _count_refilled(edits, len(target) - len(tail.ids), refill) if refill else 0
    changes = tuple(_changes_between(all_runs, np.size(tokens), len(target)))
    return AlignmentPlan(tuple(edits), tail, kept, moved, evaluated, changes, refilled)


def _reusable_runs(all_runs: Sequence[EqualRun], num_target: int) -> tuple[int, list[EqualRun]]:
    """Return the length of the common beginning, and the later runs that are worth a seam."""
    kept, runs = 0, list[EqualRun]()
    for run in all_runs:
        length = min(run.length, num_target - 1 - run.new)
        if run.old == run.new == 0:
            kept = length
        elif length >= _MIN_RUN + (0 if run.new else SINKS):
            runs.append(replace(run, length=length))
    return kept, runs


def _rereads(
    runs: Sequence[EqualRun], kept: int, num_target: int, options: AlignmentOptions
) -> list[int]:
    """Return how many first tokens of each run are evaluated again; all if few would be left.

    At most `options.reread` each. In all, as many as one seam may have, or as bring the evaluated
    tokens to `options.reread_share` of the text. If that is too few, seams get them in proportion
    to the tokens that were changed before them.
    """
    wanted = [_whole_or(run, options.reread) for run in runs]
    num_new = num_target - kept - sum(run.length for run in runs)
    budget = max(options.reread, int(options.reread_share * num_target) - num_new)
    shares = _divide(budget, wanted, _changes_before(runs, kept))
    return [
        wanted_here if share >= wanted_here else max(min(share, run.length - _MIN_RUN), sinks)
        for run, wanted_here, share in zip(runs, wanted, shares, strict=True)
        # The first tokens are attention sinks, which only the beginning of a text can be.
        for sinks in [0 if run.new else SINKS]
    ]


def _whole_or(run: EqualRun, reread: int) -> int:
    """Return how many tokens of a run would be evaluated again without a limit in all."""
    reread = reread if run.new else max(reread, SINKS)
    return run.length if run.length - reread < _MIN_RUN else reread


def _changes_before(runs: Sequence[EqualRun], kept: int) -> list[int]:
    """Return how many tokens were removed and inserted right before each run."""
    old_ends = [kept, *(run.old + run.length for run in runs)]
    new_ends = [kept, *(run.new + run.length for run in runs)]
    return [
        run.old - old_end + run.new - new_end
        for run, old_end, new_end in zip(runs, old_ends, new_ends, strict=False)
    ]


def _divide(total: int, limits: Sequence[int], weights: Sequence[int]) -> list[int]:
    """Divide a total in proportion to weights, none above its limit: all of it, if limits allow.

    For instance 100 by the weights 1, 1 and 2 with limits of 20 each but the last: 20, 20 and 60.
    """
    shares, weight_left = [0] * len(limits), sum(weights)
    for index in sorted(range(len(limits)), key=lambda each: limits[each] / weights[each]):
        shares[index] = min(limits[index], total * weights[index] // weight_left)
        total, weight_left = total - shares[index], weight_left - weights[index]
    return shares


def _count_refilled(edits: Sequence[TokenEdit], tail_start: int, refill: int) -> int:
    """Return how many tokens are evaluated again, at most, before insertions and the tail."""
    growths = itertools.accumulate((edit.growth for edit in edits), initial=0)
    starts = [edit.start + growth for edit, growth in zip(edits, growths, strict=False) if edit.ids]
    return sum(min(start, refill) for start in [*starts, tail_start])


def changed_ranges(tokens: ArrayLike, target: Sequence[int]) -> tuple[Change, ...]:
    """Return the ranges in which a text differs from another one, and how many tokens replace each.

    They are replaced one after the other, so that each counts from the new beginning of the text.
    """
    runs = equal_runs(tokens, target, _MIN_EQUAL)
    return tuple(_changes_between(runs, np.size(tokens), len(target)))


def _changes_between(
    runs: Sequence[EqualRun], num_tokens: int, num_target: int
) -> Iterator[Change]:
    """Yield what is replaced between equal runs; see `changed_ranges`."""
    old_end = new_end = 0
    for run in (*runs, EqualRun(num_tokens, num_target, 0)):
        removed_count, added_count = run.old - old_end, run.new - new_end
        if removed_count or added_count:
            yield new_end, new_end + removed_count, added_count
        old_end, new_end = run.old + run.length, run.new + run.length

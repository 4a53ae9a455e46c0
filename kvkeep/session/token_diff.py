"""The equal runs of two token sequences, found by anchors in bounded time.

A classical diff takes time in proportion to the product of the lengths; prompts have 20,000 tokens.
As in a patience diff, short pieces of the texts that are as frequent in one as in the other are
anchors. The longest chain of anchors that is in order in both texts is extended in both directions,
and what lies between two of them is compared by itself, with ever shorter pieces.

    old:  A  B  [ 1 2 3 4 5 6 7 8 ]  C  D
    new:  A  X  B  [ 1 2 3 4 5 6 7 8 ]  E      anchor: 1 2 3 4 5 6 7 8
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

_PIECE_LENGTHS = (32, 8)  # tokens of an anchor, the longest first
_MAX_VISITS = 32  # how often each token is looked at on average; then the rest counts as different
_HASH_FACTORS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_FIRST_COMPARED = 64  # tokens; then ever more at a time

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class EqualRun:
    """Equal tokens: `length` of them, from index `old` of the old text, and `new` of the new."""

    old: int
    new: int
    length: int


@dataclass(frozen=True)
class _Gap:
    """A part of both texts that is still to be compared, by pieces of the given level."""

    old: tuple[int, int]
    new: tuple[int, int]
    level: int = 0

    @property
    def shorter_length(self) -> int:
        return min(self.old[1] - self.old[0], self.new[1] - self.new[0])


def equal_runs(old: ArrayLike, new: ArrayLike, min_length: int) -> list[EqualRun]:
    """Return equal runs of two texts, in order and without overlap, maximal in both directions.

    All but those at the beginning and at the end have at least `min_length` tokens; shorter than
    an anchor (8) they may be missed.
    """
    old_ids, new_ids = np.asarray(old, dtype=np.int64), np.asarray(new, dtype=np.int64)
    prefix = common_length(old_ids, new_ids)
    rest = min(len(old_ids), len(new_ids)) - prefix
    suffix = common_length(old_ids[::-1][:rest], new_ids[::-1][:rest])
    old_end, new_end = len(old_ids) - suffix, len(new_ids) - suffix
    runs = [EqualRun(0, 0, prefix), EqualRun(old_end, new_end, suffix)]
    gaps, visits = [_Gap((prefix, old_end), (prefix, new_end))], 0
    while gaps and visits <= _MAX_VISITS * (len(old_ids) + len(new_ids)):
        gap = gaps.pop()
        if gap.shorter_length < max(1, min_length):
            continue
        visits += gap.old[1] - gap.old[0] + gap.new[1] - gap.new[0]
        found = _runs_in_gap(old_ids, new_ids, gap)
        runs += [run for run in found if run.length >= min_length]
        if found:
            gaps += _gaps_between(gap, found)
        elif gap.level + 1 < len(_PIECE_LENGTHS):
            gaps.append(_Gap(gap.old, gap.new, gap.level + 1))
    in_order = sorted((run for run in runs if run.length), key=lambda run: run.old)
    return _with_late_differences(in_order, old_ids, new_ids)


def _with_late_differences(runs: Sequence[EqualRun], old: Ids, new: Ids) -> list[EqualRun]:
    """Move a difference behind the run after it, if the run before goes on as far in either text.

    In repeated text a difference has several places. At the last one, fewer cells change places:
    what was appended to a text follows it, also if the text ends with the same tokens.
    """
    result = list[EqualRun]()
    for run, following in zip(runs, [*runs[1:], EqualRun(len(old), len(new), 0)], strict=False):
        old_end, new_end = run.old + run.length, run.new + run.length
        if result:
            last = result[-1]
            old_start, new_start = last.old + last.length, last.new + last.length
            length = common_length(old[old_start:old_end], new[new_start:new_end])
            if length == min(old_end - old_start, new_end - new_start):
                old_end, new_end = old_start + length, new_start + length
                length += common_length(old[old_end : following.old], new[new_end : following.new])
                result[-1] = EqualRun(last.old, last.new, last.length + length)
                continue
        result.append(run)
    return result


def _runs_in_gap(old: Ids, new: Ids, gap: _Gap) -> list[EqualRun]:
    """Return the runs around the anchors of a gap, in order and without overlap."""
    (old_start, old_end), (new_start, new_end) = gap.old, gap.new
    length = _PIECE_LENGTHS[gap.level]
    old_starts, new_starts = _anchors(old[old_start:old_end], new[new_start:new_end], length)
    chain = _longest_chain(new_starts)
    runs = list[EqualRun]()
    for old_at, new_at in zip(
        (old_starts[chain] + old_start).tolist(),
        (new_starts[chain] + new_start).tolist(),
        strict=True,
    ):
        if runs:  # it may lie in the last run, or begin in it
            last = runs[-1]
            if old_at < last.old + last.length or new_at < last.new + last.length:
                continue
            old_start, new_start = last.old + last.length, last.new + last.length
        before = common_length(old[old_start:old_at][::-1], new[new_start:new_at][::-1])
        after = common_length(old[old_at:old_end], new[new_at:new_end])
        if after >= length:  # no collision of hashes
            runs.append(EqualRun(old_at - before, new_at - before, before + after))
    return runs


def _gaps_between(gap: _Gap, runs: Sequence[EqualRun]) -> list[_Gap]:
    """Return what lies before, between and after the runs of a gap."""
    old_starts = [gap.old[0], *(run.old + run.length for run in runs)]
    new_starts = [gap.new[0], *(run.new + run.length for run in runs)]
    old_ends, new_ends = [run.old for run in runs], [run.new for run in runs]
    old_parts = zip(old_starts, [*old_ends, gap.old[1]], strict=True)
    new_parts = zip(new_starts, [*new_ends, gap.new[1]], strict=True)
    return [_Gap(*parts, gap.level) for parts in zip(old_parts, new_parts, strict=True)]


def _anchors(old: Ids, new: Ids, length: int) -> tuple[Ids, Ids]:
    """Return where pieces of `length` tokens begin that occur as often in one text as in the other.

    Of several, the first belongs to the first. In the order of the old text.
    """
    if min(len(old), len(new)) < length:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    old_hashes, new_hashes = piece_hashes(old, length), piece_hashes(new, length)
    old_order = np.argsort(old_hashes, kind="stable")
    new_order = np.argsort(new_hashes, kind="stable")
    old_values, old_firsts, old_counts = np.unique(
        old_hashes[old_order], return_index=True, return_counts=True
    )
    new_values, new_firsts, new_counts = np.unique(
        new_hashes[new_order], return_index=True, return_counts=True
    )
    _, in_old, in_new = np.intersect1d(old_values, new_values, True, return_indices=True)
    is_equal = old_counts[in_old] == new_counts[in_new]
    in_old, in_new = in_old[is_equal], in_new[is_equal]
    counts = old_counts[in_old]
    ranks = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    old_starts = old_order[np.repeat(old_firsts[in_old], counts) + ranks]
    new_starts = new_order[np.repeat(new_firsts[in_new], counts) + ranks]
    order = np.argsort(old_starts)
    return old_starts[order], new_starts[order]


def piece_hashes(ids: NDArray[np.signedinteger], length: int) -> NDArray[np.uint64]:
    """Return a hash of each piece of `length` tokens, a power of two, by its first token."""
    hashes, size = ids.astype(np.uint64) + np.uint64(1), 1
    while size < length:
        factor = np.uint64(_HASH_FACTORS[size.bit_length() % len(_HASH_FACTORS)])
        later = hashes[size:]
        hashes = hashes[:-size] * factor + (later ^ (later >> np.uint64(29)))
        size *= 2
    return hashes


def _longest_chain(values: Ids) -> list[int]:
    """Return the indices of a longest increasing subsequence."""
    tails, tail_indices, previous = list[int](), list[int](), list[int]()
    for index, value in enumerate(values.tolist()):
        place = bisect_left(tails, value)
        previous.append(tail_indices[place - 1] if place else -1)
        tails[place : place + 1] = [value]
        tail_indices[place : place + 1] = [index]
    chain, index = list[int](), tail_indices[-1] if tail_indices else -1
    while index >= 0:
        chain.append(index)
        index = previous[index]
    return chain[::-1]


def common_length(left: ArrayLike, right: ArrayLike) -> int:
    """Return how many of the first tokens are equal, without a look at many of those behind."""
    left, right = np.asarray(left), np.asarray(right)
    total, start, size = min(len(left), len(right)), 0, _FIRST_COMPARED
    while start < total:
        end = min(total, start + size)
        is_different = left[start:end] != right[start:end]
        if is_different.any():
            return start + int(is_different.argmax())
        start, size = end, 2 * size
    return total

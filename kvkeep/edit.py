"""Editing a live memory: tokens taken out, put in or replaced, anywhere in it."""

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from kvkeep.cache import Segment, joined
from kvkeep.errors import ContextFull, InvalidArgument
from kvkeep.memory import Memory, require_finite

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
    change = _change(memory, start, end, ids)
    if end == total or recompute == "suffix":
        edited, moved = _evaluated_anew(memory, change, prefill_step), 0
        evaluated = len(ids) + total - end + (1 if 0 < start < total else 0)
    else:
        edited, moved = _put_in_place(memory, change, prefill_step)
        evaluated = len(ids) + 1
    return edited, EditReport(moved, evaluated, time.perf_counter() - begun, recompute)


@dataclass(frozen=True)
class _Change:
    """An edit, and what it means for what is never forgotten.

    keep: the policy's from now on. pinned: whether what is put in is pinned.
    """

    start: int
    end: int
    ids: Sequence[int]
    keep: int
    pinned: bool

    @property
    def removed(self) -> int:
        return self.end - self.start

    @property
    def growth(self) -> int:
        return len(self.ids) - self.removed


def _change(memory: Memory, start: int, end: int, ids: Sequence[int]) -> _Change:
    """What is put in the place of kept or pinned tokens, or between two such, is so, too.

    `keep` never shrinks: without its first tokens, a window forgets how to attend.
    """
    around = range(start, end) if end > start else range(start - 1, start + 1)
    inside = bool(around) and around[0] >= 0 and around[-1] < len(memory.tokens)
    pinned = inside and all(memory.serials[index] in memory.pins for index in around)
    keep = memory.policy.keep
    if start < len(memory.tokens):
        held = set(memory.cache.serials())
        first = sum(serial in held for serial in memory.serials[:start])
        if first + max(1, end - start) <= keep:
            keep += max(0, len(ids) - (end - start))
    return _Change(start, end, ids, keep, pinned)


def _evaluated_anew(memory: Memory, change: _Change, prefill_step: int) -> Memory:
    start, end, ids = change.start, change.end, change.ids
    taken = len(memory.tokens) - start
    following = [*ids, *memory.tokens[end:]]
    memory.require_room(change.growth)
    memory.require_rewind(taken)
    pinned = [change.pinned] * len(ids) + [s in memory.pins for s in memory.serials[end:]]
    work = memory.copy()
    work.take_back(taken)
    if _bounded(memory):
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


def _put_in_place(memory: Memory, change: _Change, prefill_step: int) -> tuple[Memory, int]:
    """The memory with the change in it, and how many cells are seen from another distance."""
    if any(segment.map.group > 1 for segment in memory.cache.segments):
        raise InvalidArgument(
            "grouped cells cannot be edited in place: policy "
            f'"{memory.policy.name}" needs recompute="suffix"'
        )
    rank = _rank(memory, change.start, change.end)
    sooner = _overflow(memory, change, rank)
    work = memory.fork()
    cache = work.cache
    before = [
        Segment.of(segment.layout, cells, segment.map.closer(-change.growth), segment.anchor)
        for segment, cells in cache.read(0, rank)
    ]
    first = rank + change.removed
    after = [
        Segment.of(segment.layout, cells, segment.map, segment.anchor)
        for segment, cells in cache.read(first, cache.cells - first)
    ]
    cache.window.forget(before, sooner)
    # In the frame of the newest tokens, what is put in ends where the rest begins.
    where = int(after[0].block.slots.positions[0]) - after[0].map.offset
    inside = _evaluated_between(work, before, where, change.ids, prefill_step)
    cache.segments = [s for s in joined([*before, *inside, *after]) if s.length]
    work.replace(change.start, change.end, change.ids, change.pinned)
    if _bounded(work):
        work.change(keep=change.keep)
        # A policy that puts itself in order has forgotten what is too much already.
        cache.window.forget(cache.segments, max(0, cache.cells - work.policy.max_kv_size))
        cache.segments = [s for s in cache.segments if s.length]
    work.evaluate_last()
    return work, sum(segment.length for segment in before) if change.growth else 0


def _rank(memory: Memory, start: int, end: int) -> int:
    """How many cells lie before the edit. Raises where it touches what is not held."""
    held = {serial: rank for rank, serial in enumerate(memory.cache.serials())}
    touched = memory.serials[max(0, start - (start == end)) : end + 1]
    ranks = [held.get(serial, -1) for serial in touched]
    if ranks != list(range(ranks[0], ranks[0] + len(ranks))) or ranks[0] < 0:
        raise InvalidArgument(
            f"tokens {start} to {end} are not all remembered: edit what is held, or begin anew "
            "with the edited text"
        )
    return held[memory.serials[start]]


def _overflow(memory: Memory, change: _Change, rank: int) -> int:
    """How many of the oldest window cells before the edit must go; others may have to go after it.

    What is put in among window cells cannot outlive those after it, so that only those before it
    may go. Raises where that is not enough.
    """
    cache, policy, added = memory.cache, memory.policy, len(change.ids)
    excess = max(0, cache.cells + change.growth - policy.max_kv_size)
    sooner = later = 0
    if _bounded(memory):
        sooner = sum(len(cells) for segment, cells in cache.read(0, rank) if not segment.anchor)
        if change.pinned or rank + added <= change.keep:
            later = excess
    if excess > sooner + later:
        raise ContextFull(
            f"{added} tokens do not fit in the place of {change.removed}: {cache.cells} of "
            f"{policy.max_kv_size} cells are held, and {sooner} before the edit may be forgotten"
        )
    return min(sooner, excess)


def _bounded(memory: Memory) -> bool:
    """Whether a window forgets, so that kept and pinned cells are of another kind."""
    return memory.policy.room(memory.cache) is None


def _evaluated_between(
    work: Memory, before: list[Segment], where: int, ids: Sequence[int], prefill_step: int
) -> list[Segment]:
    """The segment of tokens that see what is before them and end at time `where`."""
    if not ids:
        return []
    cache = work.cache.empty()
    cache.segments = [s for s in before if s.length]
    cache.time, cache.serial = where - len(ids), work.cache.serial
    new = Segment(cache.layout, len(ids))
    with torch.inference_mode():
        for first in range(0, len(ids), prefill_step):
            some, device = ids[first : first + prefill_step], cache.layout.device
            chunk = torch.tensor(some, dtype=torch.int64, device=device)
            if not first:
                cache.segments.append(new)
            with cache.step(len(chunk)) as step:
                require_finite(work.decoder.hidden(chunk, step))
    new.frozen = True
    work.cache.serial = cache.serial
    return [new]

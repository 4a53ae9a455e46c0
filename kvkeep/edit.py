"""Editing a live memory: tokens taken out, put in or replaced, anywhere in it."""

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from kvkeep.cache import KVCache, Segment, joined
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
) -> EditReport:
    """Puts `ids` in the place of tokens `start ... end - 1`, whole or not at all.

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
        moved, evaluated = 0, _evaluate_anew(memory, start, end, ids, prefill_step)
    else:
        moved, evaluated = _put_in_place(memory, start, end, ids, prefill_step)
    return EditReport(moved, evaluated, time.perf_counter() - begun, recompute)


def _evaluate_anew(
    memory: Memory, start: int, end: int, ids: Sequence[int], prefill_step: int
) -> int:
    total = len(memory.tokens)
    following = [*ids, *memory.tokens[end:]]
    room = memory.policy.room(memory.cache)
    if room is not None and len(following) - (total - start) > room:
        raise ContextFull(
            f"the edit adds {len(following) - (total - start)} tokens where {room} fit; "
            'policy="sliding" goes on for ever on a fixed budget'
        )
    pinned = [False] * len(ids) + [serial in memory.pins for serial in memory.serials[end:]]
    work = memory.copy()
    work.take_back(total - start)
    done = 0
    for pin, run in itertools.groupby(pinned):
        count = len(list(run))
        for _ in work.evaluate(following[done : done + count], prefill_step):
            pass
        if pin:
            work.pin(len(work.tokens) - count, len(work.tokens))
        done += count
    memory.become(work)
    return len(following) + (1 if start else 0)


@dataclass(frozen=True)
class _Cut:
    """Where an edit falls among the cells held: `before` ranks, then `removed`, then the rest.

    anchored: whether what is put in belongs to anchors. kept, pinned: how these settings change.
    """

    before: int
    removed: int
    anchored: bool
    kept: int
    pinned: int


def _put_in_place(
    memory: Memory, start: int, end: int, ids: Sequence[int], prefill_step: int
) -> tuple[int, int]:
    if any(segment.map.group > 1 for segment in memory.cache.segments):
        raise InvalidArgument(
            "grouped cells cannot be edited in place: policy "
            f'"{memory.policy.name}" needs recompute="suffix"'
        )
    cut = _cut(memory, start, end, len(ids))
    gone = _overflow(memory, cut, len(ids))
    work = memory.fork()
    cache, layout = work.cache, work.cache.layout
    shift = cut.removed - len(ids)
    before = [
        Segment.of(layout, cells, segment.map.closer(shift), segment.anchor)
        for segment, cells in cache.read(0, cut.before)
    ]
    first = cut.before + cut.removed
    after = [
        Segment.of(layout, cells, segment.map, segment.anchor)
        for segment, cells in cache.read(first, cache.cells - first)
    ]
    cache.window.forget(before, gone)
    # In the frame of the newest tokens, what is put in ends where the rest begins.
    where = int(after[0].block.slots.positions[0]) - after[0].map.offset
    inside = _evaluated_between(work, before, where, ids, cut.anchored, prefill_step)
    cache.segments = [s for s in joined([*before, *inside, *after]) if s.length]
    work.splice(start, end, ids)
    work.policy.keep += cut.kept
    work.policy.pinned += cut.pinned
    if cut.pinned > 0:
        work.pins |= set(work.serials[start : start + len(ids)])
    work.evaluate_last()
    memory.become(work)
    moved = sum(segment.length for segment in before) if shift else 0
    return moved, len(ids) + 1


def _cut(memory: Memory, start: int, end: int, added: int) -> _Cut:
    held = {serial: rank for rank, serial in enumerate(memory.cache.serials())}
    anchors = [s.anchor for s in memory.cache.segments for _ in range(s.length)]
    touched = memory.serials[max(0, start - (start == end)) : end + 1]
    ranks = [held.get(serial, -1) for serial in touched]
    if ranks != list(range(ranks[0], ranks[0] + len(ranks))) or ranks[0] < 0:
        raise InvalidArgument(
            f"tokens {start} to {end} are not all remembered: edit what is held, or begin anew "
            "with the edited text"
        )
    first = held[memory.serials[start]]
    removed = anchors[first : first + end - start]
    beside = anchors[max(0, first - 1) : first + 1]
    anchored = all(removed) if removed else all(beside)
    keep = memory.policy.keep
    kept = sum(first + index < keep for index, anchor in enumerate(removed) if anchor)
    pinned = sum(removed) - kept
    new = added if anchored else 0
    inside_keep = first < keep
    return _Cut(
        before=first,
        removed=end - start,
        anchored=anchored,
        kept=(new if inside_keep else 0) - kept,
        pinned=(0 if inside_keep else new) - pinned,
    )


def _overflow(memory: Memory, cut: _Cut, added: int) -> int:
    """How many of the oldest window cells must go; raises where that is not enough."""
    cache, policy = memory.cache, memory.policy
    excess = cache.cells - cut.removed + added - policy.max_kv_size
    spare = 0
    if cache.window.size is not None:
        policy.check(keep=policy.keep + cut.kept, pinned=policy.pinned + cut.pinned)
        spare = sum(len(cells) for s, cells in cache.read(0, cut.before) if not s.anchor)
    if excess > spare:
        raise ContextFull(
            f"{added} tokens do not fit in the place of {cut.removed}: {cache.cells} of "
            f"{policy.max_kv_size} cells are held, and {spare} before the edit may be forgotten"
        )
    return max(0, excess)


def _evaluated_between(
    work: Memory,
    before: list[Segment],
    where: int,
    ids: Sequence[int],
    anchored: bool,
    prefill_step: int,
) -> list[Segment]:
    """The segment of tokens that see what is before them and end at time `where`."""
    if not ids:
        return []
    cache = KVCache(work.cache.layout, work.cache.rope, work.cache.scale)
    cache.segments = [s for s in before if s.length]
    cache.time, cache.serial = where - len(ids), work.cache.serial
    new = Segment(cache.layout, len(ids), anchor=anchored)
    with torch.inference_mode():
        for first in range(0, len(ids), prefill_step):
            chunk = torch.tensor(ids[first : first + prefill_step], device=cache.layout.device)
            if not first:
                cache.segments.append(new)
            with cache.step(len(chunk)):
                require_finite(work.decoder.hidden(chunk, cache))
    new.frozen = True
    work.cache.serial = cache.serial
    return [new]

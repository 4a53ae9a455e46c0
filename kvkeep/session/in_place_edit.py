"""An edit that leaves what follows as it was computed, and sees what is before from elsewhere."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvkeep.cache import KVCache, Segment, merge_small_segments
from kvkeep.cache.attention import HIDDEN
from kvkeep.errors import ContextFull, InvalidArgument
from kvkeep.models.layers.primitives import require_finite
from kvkeep.session.change import Change, bounded
from kvkeep.session.local_layers import REACH, local_cells, newest_together
from kvkeep.session.memory import Memory


@dataclass(frozen=True)
class InPlace:
    """An edit in place, whose new tokens are evaluated.

    where: the position at which it ends, as the newest tokens see it. sooner: how many of the
    oldest window cells before it must go. inside: the segment of what is put in, or nothing.
    """

    change: Change
    where: int
    sooner: int
    inside: Sequence[Segment]

    @classmethod
    def of(
        cls, memory: Memory, start: int, end: int, ids: Sequence[int], prefill_step: int
    ) -> "InPlace":
        """Evaluates what is put in. The memory stays as it is.

        Raises InvalidArgument or ContextFull where the edit cannot be.
        """
        if any(segment.map.group > 1 for segment in memory.cache.segments):
            raise InvalidArgument(
                "grouped cells cannot be edited in place: policy "
                f'"{memory.policy.name}" needs recompute="suffix"'
            )
        rank, where = _place(memory, start, end)
        change = Change.of(memory, start, end, ids, rank)
        sooner = _overflow(memory, change)
        before, after = _parted(memory.cache, change, where, sooner)
        # Bounded policies say what is an anchor; where all is remembered, cells leave the window
        # in their order, so that no other may lie among those that have left it.
        anchor = change.stays if bounded(memory) else after[0].anchor
        inside = _evaluated_between(memory, before, start, where, ids, anchor, prefill_step)
        return cls(change, where, sooner, inside)

    @torch.inference_mode()
    def make(self, memory: Memory) -> int:
        """Makes it in a successor of that memory.

        Returns how many cells are seen from another distance.
        """
        change, cache = self.change, memory.cache
        before, after = _parted(cache, change, self.where, self.sooner)
        following = len(memory.tokens) - change.end
        cache.segments = merge_small_segments([*before, *self.inside, *after])
        cache.serial += len(change.ids)
        memory.replace(change.start, change.end, change.ids, change.pinned)
        if bounded(memory):
            memory.change(keep=change.keep)
            # A policy that puts itself in order has forgotten what is too much already.
            excess = max(0, cache.cells - memory.policy.max_kv_size)
            cache.window.forget(cache.segments, excess)
            cache.segments = [s for s in cache.segments if s.length]
        if cache.local is not None:
            cache.local.keep_newest(following)
        memory.evaluate_last(_reach(cache))
        return sum(segment.length for segment in before) if change.growth else 0


def _place(memory: Memory, start: int, end: int) -> tuple[int, int]:
    """Where an edit is: how many held cells lie before it, and at which position it ends.

    Compressed cells are not counted. The position is as the newest tokens see it: that of the token
    after the edit, had none been forgotten. What is taken out must be held; what is put in needs a
    held token on one side, and goes right beside it. Raises InvalidArgument otherwise.

    Of tokens 0 ... 6, let 0, 1 and 4, 5, 6 be held (two kept, a window of three). The newest see
    the kept ones at positions 2 and 3. Taking out 0 and 1 has rank 0 and ends at 4; what is put in
    after 1 or before 4 has rank 2 and ends at 4, too.
    """
    held: dict[int, tuple[int, int]] = {}
    for segment in memory.cache.segments:
        if not segment.compressed:
            seen = _seen(segment).tolist()
            first = len(held)
            held.update(
                (serial, (first + index, position))
                for index, (serial, position) in enumerate(
                    zip(segment.serials(), seen, strict=True)
                )
            )
    if end > start:
        touched = [held.get(serial) for serial in memory.serials[start:end]]
        if touched[0] is not None and touched[-1] is not None and None not in touched:
            return touched[0][0], touched[-1][1] + 1
    else:
        following, previous = held.get(memory.serials[start]), None
        if following is not None:
            return following
        if start and (previous := held.get(memory.serials[start - 1])) is not None:
            return previous[0] + 1, previous[1] + 1
    raise InvalidArgument(
        f"tokens {start} to {end} are not all remembered: edit what is held, or begin anew "
        "with the edited text"
    )


def _overflow(memory: Memory, change: Change) -> int:
    """How many of the oldest window cells before the edit must go; others may have to go after it.

    What is put in among window cells cannot outlive those after it, so that only those before it
    may be forgotten. An archive forgets none: it compresses the oldest of the window once the edit
    is done. Raises ContextFull where that is not enough.
    """
    cache, policy, added = memory.cache, memory.policy, len(change.ids)
    excess = max(0, cache.cells + change.growth - policy.max_kv_size)
    window = [not s.anchor for s in cache.segments if not s.compressed for _ in range(s.length)]
    archives = bounded(memory) and cache.window.moves
    sooner = sum(window if archives else window[: change.rank]) if bounded(memory) else 0
    later = excess if bounded(memory) and change.stays else 0
    if excess > sooner + later:
        raise ContextFull(
            f"{added} tokens do not fit in the place of {change.removed}: {cache.cells} of "
            f"{policy.max_kv_size} cells are held, and {sooner} of them can make room for what is "
            "put in there"
        )
    return 0 if archives else min(sooner, excess)


def _parted(
    cache: KVCache, change: Change, where: int, sooner: int
) -> tuple[list[Segment], list[Segment]]:
    """What lies before the edit, seen from as much further as the edit makes it; and what after.

    sooner: how many of the oldest window cells before it go. No cell is copied, but of archives.
    """
    before: list[Segment] = []
    after: list[Segment] = []
    rank, end = 0, change.rank + change.removed
    for each in cache.segments:
        segment = copy.copy(each)
        if segment.compressed:
            older = int(_seen(segment).min()) < where
            moved = _moved_before(cache, segment, where, change.growth)
            (before if older else after).append(moved)
            continue
        left = min(max(change.rank - rank, 0), segment.length)
        right = min(max(end - rank, 0), segment.length)
        whole = left == segment.length
        before += [segment] if whole else segment.part(0, left)
        after += segment.rest(right) if right < segment.length else []
        rank += each.length
    cache.window.forget(before, sooner)
    for segment in before if change.growth else ():
        if not segment.compressed:
            segment.map, segment.frozen = segment.map.closer(-change.growth), True
    return [segment for segment in before if segment.length], after


def _seen(segment: Segment) -> Tensor:
    """Where the newest tokens see its cells: `[n]`, or of compressed ones for each KV head."""
    return segment.positions() - segment.map.offset


def _moved_before(cache: KVCache, segment: Segment, where: int, growth: int) -> Segment:
    """A compressed segment; its cells before a position are seen from `growth` further away.

    Each KV head has cells of its own. If some lie behind the position, the others are rotated.
    """
    seen = _seen(segment)
    if not growth or int(seen.min()) >= where:
        return segment
    if int(seen.max()) < where:
        segment.map, segment.frozen = segment.map.closer(-growth), True
        return segment
    cells = segment.read(0, segment.length)
    cells = cells.shifted(cache.rope, torch.where(seen < where, -growth, 0))
    return Segment.from_cells(segment.layout, cells, segment.map, segment.anchor)


def _as_seen_before(segment: Segment, where: int) -> Segment:
    """The segment without its compressed cells that lie behind a position."""
    if not segment.compressed or int(_seen(segment).max()) < where:
        return segment
    cells = segment.read(0, segment.length)
    assert cells.bias is not None
    later = (_seen(segment) >= where).to(cells.bias.device)
    shown = replace(cells, bias=cells.bias.masked_fill(later, HIDDEN))
    return Segment.from_cells(segment.layout, shown, segment.map, segment.anchor)


def _reach(cache: KVCache) -> int:
    """How many tokens are evaluated again for what local layers are to see."""
    local = cache.local
    return 0 if local is None else REACH * (local.window.size or 0)


def _evaluated_between(
    memory: Memory,
    before: list[Segment],
    start: int,
    where: int,
    ids: Sequence[int],
    anchor: bool,
    prefill_step: int,
) -> list[Segment]:
    """The segment of tokens that see what is before them and end at time `where`.

    start: that of the first of them.
    """
    if not ids:
        return []
    cache = memory.cache.empty()
    cache.segments = [_as_seen_before(s, where) for s in before]
    cache.time, cache.serial = where - len(ids), memory.cache.serial
    if cache.local is not None:
        together = newest_together(cache, memory.serials.first(start))
        first = start - min(together, _reach(cache))
        read = memory.tokens[first:start]
        cache.local.segments = local_cells(memory.decoder, cache, read)
    new = Segment(cache.layout_for(anchor), len(ids), anchor=anchor)
    with torch.inference_mode():
        for first in range(0, len(ids), prefill_step):
            some, device = ids[first : first + prefill_step], cache.layout.device
            chunk = torch.tensor(some, dtype=torch.int64, device=device)
            if not first:
                cache.segments.append(new)
            with cache.step(len(chunk)) as step:
                require_finite(memory.decoder.hidden(chunk, step))
    new.frozen = True
    return [new]

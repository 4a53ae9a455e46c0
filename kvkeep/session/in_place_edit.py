"""Edits in place: later cells stay as computed, and earlier ones are seen at another distance.

Deleting tokens 10 ... 14 of 100 moves no cell: the cells of tokens 0 ... 9 are seen from five
positions closer, by the offset of their segments, and only the last token is evaluated anew.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvkeep.cache import KVCache, Segment, merge_small_segments
from kvkeep.cache.attention import HIDDEN
from kvkeep.errors import ContextFull, InvalidArgument
from kvkeep.session.evaluation import fill_cache, local_segments, reevaluate_last
from kvkeep.session.memory import Memory, count_newest_held

_LOCAL_WINDOWS = 2  # windows that are re-evaluated: the first starts without earlier cells


@dataclass(frozen=True)
class EditScope:
    """The tokens that an edit replaces, and its effect on what is never evicted.

    rank: how many held cells lie before the edit, compressed ones not counted. keep: the policy's
    setting after the edit. pinned: whether the inserted tokens are pinned.
    """

    start: int
    end: int
    ids: Sequence[int]
    rank: int
    keep: int
    pinned: bool

    @classmethod
    def locate(
        cls, memory: Memory, start: int, end: int, ids: Sequence[int], rank: int
    ) -> "EditScope":
        """Return the scope of an edit that puts `ids` in place of tokens `start ... end - 1`.

        Tokens that replace kept or pinned ones, or are inserted between two of them, are kept or
        pinned, too. `keep` never shrinks: without its first tokens, a window cannot attend any
        more.
        """
        indices = range(start, end) if end > start else range(start - 1, start + 1)
        in_bounds = bool(indices) and indices[0] >= 0 and indices[-1] < len(memory.tokens)
        pinned = in_bounds and all(memory.serials[index] in memory.pins for index in indices)
        keep = memory.policy.keep
        if start < len(memory.tokens) and rank + max(1, end - start) <= keep:
            keep += max(0, len(ids) - (end - start))
        return cls(start, end, ids, rank, keep, pinned)

    @property
    def num_removed(self) -> int:
        return self.end - self.start

    @property
    def growth(self) -> int:
        return len(self.ids) - self.num_removed

    @property
    def permanent(self) -> bool:
        """Whether the inserted tokens are never evicted."""
        return self.pinned or self.rank + len(self.ids) <= self.keep


@dataclass(frozen=True)
class InPlaceEdit:
    """An edit in place whose new tokens are evaluated, to be applied to a successor of the memory.

    end_position: the position at which the edit ends, as the newest tokens see it. num_evicted: how
    many of the oldest window cells before it must go. inserted: the new tokens' segment, if any.
    """

    scope: EditScope
    end_position: int
    num_evicted: int
    inserted: Sequence[Segment]

    @classmethod
    def prepare(
        cls, memory: Memory, start: int, end: int, ids: Sequence[int], prefill_step: int
    ) -> "InPlaceEdit":
        """Evaluate the inserted tokens. Raises InvalidArgument, or ContextFull for too many."""
        if any(segment.map.group > 1 for segment in memory.cache.segments):
            raise InvalidArgument(
                "grouped cells cannot be edited in place: policy "
                f'"{memory.policy.name}" needs recompute="suffix"'
            )
        rank, end_position = _locate_edit(memory, start, end)
        scope = EditScope.locate(memory, start, end, ids, rank)
        num_evicted = _count_evictions(memory, scope)
        prefix, suffix = _split_segments(memory.cache, scope, end_position, num_evicted)
        # Bounded policies say what is an anchor. Otherwise cells leave the window in their order,
        # so that no window cell may lie among those that have left it.
        anchor = scope.permanent if memory.is_bounded else suffix[0].anchor
        inserted = []
        if ids:
            inserted = [_evaluate_ids(memory, prefix, scope, end_position, anchor, prefill_step)]
        return cls(scope, end_position, num_evicted, inserted)

    @torch.inference_mode()
    def apply(self, memory: Memory) -> tuple[Memory, int]:
        """Apply the edit to a successor of the memory; see `EditCompletion`."""
        scope, cache = self.scope, memory.cache
        prefix, suffix = _split_segments(cache, scope, self.end_position, self.num_evicted)
        num_following = len(memory.tokens) - scope.end
        cache.segments = merge_small_segments([*prefix, *self.inserted, *suffix])
        cache.serial += len(scope.ids)
        memory.replace_tokens(scope.start, scope.end, scope.ids, scope.pinned)
        if memory.is_bounded:
            memory.change_policy(keep=scope.keep)
            # A policy that follows the change may have evicted the excess already.
            excess_cells = max(0, cache.cells - memory.policy.max_kv_size)
            cache.window.evict(cache.segments, excess_cells)
            cache.drop_empty_segments()
        if cache.local is not None:
            cache.local.keep_newest(num_following)
        reevaluate_last(memory, _local_refill_tokens(cache))
        return memory, sum(segment.length for segment in prefix) if scope.growth else 0


def _locate_edit(memory: Memory, start: int, end: int) -> tuple[int, int]:
    """Return how many held cells lie before an edit, and the position at which it ends.

    Compressed cells are not counted. The position is as the newest tokens see it: that of the token
    after the edit, had none been evicted. Removed tokens must be held; inserted ones need a held
    neighbour. Raises InvalidArgument otherwise.

    Of tokens 0 ... 6, let 0, 1 and 4, 5, 6 be held (two kept, a window of three). The newest see
    the kept ones at positions 2 and 3. Deleting 0 and 1 has rank 0 and ends at 4; inserting after 1
    or before 4 has rank 2 and ends at 4, too.
    """
    exact_segments = [segment for segment in memory.cache.segments if not segment.compressed]
    serials = [serial for segment in exact_segments for serial in segment.serials()]
    positions = [x for segment in exact_segments for x in _seen_positions(segment).tolist()]
    cells = dict(zip(serials, enumerate(positions), strict=True))  # to (rank, position)
    if end > start:
        removed = [cells[serial] for serial in memory.serials[start:end] if serial in cells]
        if len(removed) == end - start:
            return removed[0][0], removed[-1][1] + 1
    elif following := cells.get(memory.serials[start]):
        return following
    elif start and (previous := cells.get(memory.serials[start - 1])):
        return previous[0] + 1, previous[1] + 1
    raise InvalidArgument(
        f"tokens {start} to {end} are not all in the cache: edit tokens that are, or start a new "
        "session with the edited text"
    )


def _count_evictions(memory: Memory, scope: EditScope) -> int:
    """Return how many of the oldest window cells before the edit must go.

    Tokens inserted among window cells cannot outlive those after them, so that only earlier cells
    may be evicted for them; for tokens that are never evicted, later cells may go as well. An
    archive evicts none: it compresses the oldest of the window once the edit is done. Raises
    ContextFull if that is not enough.
    """
    cache, policy = memory.cache, memory.policy
    excess_cells = max(0, cache.cells + scope.growth - policy.max_kv_size)
    exact_segments = [segment for segment in cache.segments if not segment.compressed]
    in_window = [not segment.anchor for segment in exact_segments for _ in range(segment.length)]
    archives = memory.is_bounded and cache.window.moves
    evictable = sum(in_window if archives else in_window[: scope.rank]) if memory.is_bounded else 0
    evictable_later = excess_cells if memory.is_bounded and scope.permanent else 0
    if excess_cells > evictable + evictable_later:
        raise ContextFull(
            f"{len(scope.ids)} tokens do not fit in place of {scope.num_removed}: {cache.cells} of "
            f"{policy.max_kv_size} cells are in use, and only {evictable} can be evicted for this "
            "edit"
        )
    return 0 if archives else min(evictable, excess_cells)


def _split_segments(
    cache: KVCache, scope: EditScope, end_position: int, num_evicted: int
) -> tuple[list[Segment], list[Segment]]:
    """Split the segments into those before the edit, moved by its growth, and those after it.

    num_evicted: how many of the oldest window cells before it go. No cell is copied, except of
    compressed segments that the edit cuts.
    """
    prefix: list[Segment] = []
    suffix: list[Segment] = []
    rank, end = 0, scope.rank + scope.num_removed
    for original in cache.segments:
        segment = copy.copy(original)
        if segment.compressed:
            is_before = int(_seen_positions(segment).min()) < end_position
            moved_segment = _move_compressed(cache, segment, end_position, scope.growth)
            (prefix if is_before else suffix).append(moved_segment)
            continue
        first_removed = min(max(scope.rank - rank, 0), segment.length)
        first_later = min(max(end - rank, 0), segment.length)
        prefix += [segment] if first_removed == segment.length else segment.part(0, first_removed)
        suffix += segment.tail(first_later) if first_later < segment.length else []
        rank += original.length
    cache.window.evict(prefix, num_evicted)
    for segment in prefix if scope.growth else ():
        if not segment.compressed:
            segment.map, segment.frozen = segment.map.closer(-scope.growth), True
    return [segment for segment in prefix if segment.length], suffix


def _seen_positions(segment: Segment) -> Tensor:
    """Return the positions at which the newest tokens see cells: `[n]`, or of each KV head."""
    return segment.positions() - segment.map.offset


def _move_compressed(cache: KVCache, segment: Segment, end_position: int, growth: int) -> Segment:
    """Return a compressed segment whose cells before `end_position` are seen `growth` further away.

    If cells of some KV heads lie behind it, the earlier ones are rotated.
    """
    seen_positions = _seen_positions(segment)
    if not growth or int(seen_positions.min()) >= end_position:
        return segment
    if int(seen_positions.max()) < end_position:
        segment.map, segment.frozen = segment.map.closer(-growth), True
        return segment
    cells = segment.read(0, segment.length)
    cells = cells.shift(cache.rope, torch.where(seen_positions < end_position, -growth, 0))
    return Segment.from_cells(segment.layout, cells, segment.map, segment.anchor)


def _hide_later_cells(segment: Segment, end_position: int) -> Segment:
    """Return the segment with compressed cells from `end_position` on hidden by a bias."""
    if not segment.compressed or int(_seen_positions(segment).max()) < end_position:
        return segment
    cells = segment.read(0, segment.length)
    assert cells.bias is not None
    is_later = (_seen_positions(segment) >= end_position).to(cells.bias.device)
    visible_cells = replace(cells, bias=cells.bias.masked_fill(is_later, HIDDEN))
    return Segment.from_cells(segment.layout, visible_cells, segment.map, segment.anchor)


def _local_refill_tokens(cache: KVCache) -> int:
    """Return how many tokens are evaluated again for the cells of local layers."""
    local = cache.local
    return 0 if local is None else _LOCAL_WINDOWS * (local.window.size or 0)


def _evaluate_ids(
    memory: Memory,
    prefix: list[Segment],
    scope: EditScope,
    end_position: int,
    anchor: bool,
    prefill_step: int,
) -> Segment:
    """Return the segment of the inserted tokens, evaluated over the segments before them."""
    cache, count = memory.cache.new_empty(), len(scope.ids)
    cache.segments = [_hide_later_cells(segment, end_position) for segment in prefix]
    cache.time, cache.serial = end_position - count, memory.cache.serial
    if cache.local is not None:
        num_held = count_newest_held(cache, memory.serials.first(scope.start))
        first = scope.start - min(num_held, _local_refill_tokens(cache))
        previous_ids = memory.tokens[first : scope.start]
        cache.local.segments = local_segments(memory.decoder, cache, previous_ids)
    segment = Segment(cache.layout_for(anchor), count, anchor=anchor)
    cache.segments.append(segment)
    fill_cache(memory.decoder, cache, scope.ids, prefill_step)
    segment.frozen = True
    return segment

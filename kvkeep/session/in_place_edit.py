"""Edits in place: later cells stay as computed, and earlier ones are seen at another distance.

Deleting tokens 10 ... 14 of 100 moves no cell: the cells of tokens 0 ... 9 are seen from five
positions closer, by the offset of their segments, and only the last token is evaluated anew.
"""

import copy
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvkeep.cache import KVCache, Segment, merge_small_segments
from kvkeep.cache.attention import MASK_BIAS
from kvkeep.errors import ContextFull, InvalidArgument
from kvkeep.session.edit_scope import EditScope
from kvkeep.session.evaluation import evaluate_into_segment
from kvkeep.session.held_tokens import exact_serials
from kvkeep.session.memory import Memory
from kvkeep.session.reevaluation import place_popped, reevaluate_last, refill_overwritten

LOCAL_WINDOWS = 2  # windows that are re-evaluated: the first starts without earlier cells


@dataclass(frozen=True)
class InPlaceEdit:
    """An edit in place whose new tokens are evaluated, to be applied to a successor of the memory.

    end_position: the position at which the edit ends, as the newest tokens see it. num_to_evict:
    how many of the oldest window cells before it. inserted: the new tokens' segment, if any.
    """

    scope: EditScope
    end_position: int
    num_to_evict: int
    inserted: Sequence[Segment] = ()

    @classmethod
    def prepare(
        cls,
        memory: Memory,
        scope: EditScope,
        prefill_step: int,
        progress: Callable[[int], None] | None = None,
    ) -> "InPlaceEdit":
        """Evaluate the inserted tokens. Raises InvalidArgument, or ContextFull for too many.

        progress: called after each step with the number of tokens in it.
        """
        preparation = cls.preparation(memory, scope, prefill_step)
        while True:
            try:
                count = next(preparation)
            except StopIteration as end:
                edit: InPlaceEdit = end.value
                return edit
            if progress:
                progress(count)

    @classmethod
    def preparation(
        cls, memory: Memory, scope: EditScope, prefill_step: int
    ) -> Generator[int, None, "InPlaceEdit"]:
        """Do as `prepare`, and yield the number of tokens of each step; return the edit.

        The memory must not change meanwhile.
        """
        if any(segment.position_map.group > 1 for segment in memory.cache.segments):
            raise InvalidArgument(
                "grouped cells cannot be edited in place: policy "
                f'"{memory.policy.name}" needs recompute="suffix"'
            )
        edit = cls(scope, _end_position(memory, scope), _count_evictions(memory, scope))
        if not scope.ids:
            return edit
        segment = yield from edit._evaluate_inserted(memory, prefill_step)
        return replace(edit, inserted=[segment])

    def _evaluate_inserted(
        self, memory: Memory, prefill_step: int
    ) -> Generator[int, None, Segment]:
        """Evaluate the inserted tokens over the segments before them; return their segment."""
        scope, prefix_memory = self.scope, copy.copy(memory)
        prefix_memory.tokens = memory.tokens.first(scope.start)
        prefix_memory.serials = memory.serials.first(scope.start)
        prefix_memory.cache = cache = memory.cache.new_empty()
        with torch.inference_mode():
            prefix, suffix = self._split_segments(memory.cache)
            cache.segments = [_hide_later_cells(segment, self.end_position) for segment in prefix]
            cache.time, cache.serial = self.end_position - len(scope.ids), memory.cache.serial
            refill_overwritten(prefix_memory, LOCAL_WINDOWS)
            # Bounded policies say what is an anchor. Otherwise cells leave the window in their
            # order, so that no window cell may lie among those that have left it.
            anchor = suffix[0].is_anchor if scope.keep is None else scope.permanent
            segment = cache.append_segment(len(scope.ids), anchor)
        yield from evaluate_into_segment(memory.decoder, cache, scope.ids, prefill_step)
        segment.frozen = True
        return segment

    def apply(self, memory: Memory) -> tuple[Memory, int]:
        """Apply the edit to a successor of the memory; see `EditCompletion`."""
        cells_moved = self.splice(memory)
        reevaluate_last(memory, *memory.pop_last(), LOCAL_WINDOWS)
        return memory, cells_moved

    def apply_deferred(self, memory: Memory) -> tuple[Memory, int]:
        """Do as `apply`, but leave the forward of the last token to `evaluate_placed`.

        For an edit that others follow. A pinned token is evaluated at once, since a policy may
        compress with its query when it is unpinned.
        """
        if not memory.pins.isdisjoint(memory.serials[-1:]):
            return self.apply(memory)
        cells_moved = self.splice(memory)
        last_ids, _ = memory.pop_last()
        refill_overwritten(memory, LOCAL_WINDOWS)
        place_popped(memory, last_ids)
        return memory, cells_moved

    @torch.inference_mode()
    def splice(self, memory: Memory) -> int:
        """Apply the edit without evaluating the last token anew, so that its logits are old.

        Returns how many cells are seen from another distance.
        """
        scope, cache = self.scope, memory.cache
        prefix, suffix = self._split_segments(cache)
        cache.segments = merge_small_segments([*prefix, *self.inserted, *suffix])
        cache.serial += len(scope.ids)
        memory.replace_tokens(scope.start, scope.end, scope.ids, scope.pinned)
        if scope.keep is not None:
            memory.change_policy(keep=scope.keep)
            cache.evict_to(memory.policy.max_kv_size)
        if cache.local_cache is not None:
            cache.local_cache.evict_to(len(memory.tokens) - scope.end - scope.growth)
        return sum(segment.length for segment in prefix) if scope.growth else 0

    def _split_segments(self, cache: KVCache) -> tuple[list[Segment], list[Segment]]:
        """Split the segments into those before the edit, moved by its growth, and those after it.

        No cell is copied, except of compressed segments that the edit cuts.
        """
        prefix: list[Segment] = []
        suffix: list[Segment] = []
        scope, first_index = self.scope, 0  # of the segment's first cell among uncompressed ones
        for original in cache.segments:
            segment = copy.copy(original)
            if segment.compressed:
                is_before = int(_seen_positions(segment).min()) < self.end_position
                moved_segment = _move_compressed(cache, segment, self.end_position, scope.growth)
                (prefix if is_before else suffix).append(moved_segment)
                continue
            first_removed = min(max(scope.cells_before - first_index, 0), segment.length)
            end_index = scope.cells_before + scope.end - scope.start
            first_later = min(max(end_index - first_index, 0), segment.length)
            uncut = first_removed == segment.length
            prefix += [segment] if uncut else segment.part(0, first_removed)
            suffix += segment.tail(first_later) if first_later < segment.length else []
            first_index += original.length
        cache.window.evict(prefix, self.num_to_evict)
        for segment in prefix if scope.growth else ():
            if not segment.compressed:
                segment.position_map = segment.position_map.closer_by(-scope.growth)
                segment.frozen = True
        return [segment for segment in prefix if segment.length], suffix


def _end_position(memory: Memory, scope: EditScope) -> int:
    """Return the position at which an edit ends, as the newest tokens see it.

    It is that of the token after the edit, had none been evicted. Removed tokens must be held;
    inserted ones need a held neighbour. Raises InvalidArgument otherwise.

    Of tokens 0 ... 6, let 0, 1 and 4, 5, 6 be held (two kept, a window of three). The newest see
    the kept ones at positions 2 and 3. Deleting 0 and 1 ends at 4, and so does inserting after 1.
    """
    start, end, first = scope.start, scope.end, scope.cells_before
    held, serials = exact_serials(memory.cache.segments), memory.serials
    if end > start:
        if held[first : first + end - start].tolist() == serials[start:end]:
            return _seen_position(memory.cache, first + end - start - 1) + 1
    elif held[first : first + 1].tolist() == serials[start : start + 1]:
        return _seen_position(memory.cache, first)
    elif first and held[first - 1] == serials[start - 1]:
        return _seen_position(memory.cache, first - 1) + 1
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
    cache, max_kv_size, evictable = memory.cache, memory.policy.max_kv_size, 0
    excess_cells = max(0, cache.cells + scope.growth - max_kv_size)
    if scope.keep is not None:
        remaining = cache.cells if cache.window.moves else scope.cells_before
        for segment in cache.segments:
            if not segment.compressed:
                count = min(segment.length, remaining)
                evictable += 0 if segment.is_anchor else count
                remaining -= count
    if excess_cells > evictable and not scope.permanent:
        raise ContextFull(
            f"{len(scope.ids)} tokens do not fit in place of {scope.end - scope.start}: "
            f"{cache.cells} of {max_kv_size} cells are in use, and only {evictable} can be evicted "
            "for this edit"
        )
    room = memory.policy.room(cache)
    if room is not None and scope.growth > max(0, room):  # the trained length, after compression
        raise ContextFull(
            f"{len(scope.ids)} tokens do not fit in place of {scope.end - scope.start}: the oldest "
            f"cell is {cache.reach} positions back, and the text can become {max(0, room)} tokens "
            "longer"
        )
    return 0 if cache.window.moves else min(evictable, excess_cells)


def _seen_position(cache: KVCache, rank: int) -> int:
    """Return the position at which the newest tokens see an uncompressed cell, by its rank."""
    for segment in cache.segments:
        if not segment.compressed:
            if rank < segment.length:
                return int(_seen_positions(segment)[rank])
            rank -= segment.length
    raise AssertionError("a rank beyond the last cell")


def _seen_positions(segment: Segment) -> Tensor:
    """Return the positions at which the newest tokens see cells: `[n]`, or of each KV head."""
    return segment.positions() - segment.position_map.offset


def _move_compressed(cache: KVCache, segment: Segment, end_position: int, growth: int) -> Segment:
    """Return a compressed segment whose cells before `end_position` are seen `growth` further away.

    If cells of some KV heads lie behind it, the earlier ones are rotated.
    """
    seen_positions = _seen_positions(segment)
    if not growth or int(seen_positions.min()) >= end_position:
        return segment
    if int(seen_positions.max()) < end_position:
        segment.position_map, segment.frozen = segment.position_map.closer_by(-growth), True
        return segment
    cells = segment.read(0, segment.length)
    cells = cells.shift(cache.rope, torch.where(seen_positions < end_position, -growth, 0))
    return Segment.from_cells(segment.layout, cells, segment.position_map, segment.is_anchor)


def _hide_later_cells(segment: Segment, end_position: int) -> Segment:
    """Return the segment with compressed cells from `end_position` on hidden by a bias."""
    if not segment.compressed or int(_seen_positions(segment).max()) < end_position:
        return segment
    cells = segment.read(0, segment.length)
    assert cells.bias is not None
    is_later = (_seen_positions(segment) >= end_position).to(cells.bias.device)
    masked = replace(cells, bias=cells.bias.masked_fill(is_later, MASK_BIAS))
    return Segment.from_cells(segment.layout, masked, segment.position_map, segment.is_anchor)

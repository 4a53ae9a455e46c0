"""Checkpoints: copies of the parts of a cache that later tokens overwrite.

Cells of global layers stay where they are until they are evicted, so tokens can be taken back by
dropping the newest cells. The windows of local layers move on, and recurrent states change with
each token: to go back to an earlier token, both must have been copied there.

A checkpoint is taken before each prompt, at the boundary of a message, before the text that an edit
evaluates again, and at the end of each whole prefill step. The newest three are kept. Further back,
a checkpoint is dropped if the two beside it are no further from each other than the younger one is
from the newest: of 4,000 tokens in steps of 128, those after 128, 1152, 2176, 2688, 3200, 3456,
3712, 3840 and 3968 tokens stay. So a prompt that continues differently after token n needs not much
more than the tokens after n to be evaluated again. A checkpoint at which several texts branch, such
as the end of a system prompt, stays. If all of them take too many bytes, the distances grow.

Models with states also have one before the tokens with which a sampled answer ends, such as an end
token (`kvkeep.session.answer_end`).
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvkeep.cache.block import Storage
from kvkeep.cache.checks import require, require_bool, require_instance, require_int
from kvkeep.cache.layout import Layout
from kvkeep.cache.rope import PositionMap
from kvkeep.cache.segment import MIN_GROWTH, Segment
from kvkeep.cache.shallow_copy import shallow_copy
from kvkeep.cache.state import MAX_EXACT_INT, CacheState
from kvkeep.cache.window import Window

DEFAULT_CHECKPOINT_BYTES = 256_000_000
MAX_CHECKPOINTS = 1024  # of one session, whatever their bytes
_DENSE = 3  # of the newest, kept whatever their distances
_MAX_SPARSITY = 2**10  # beyond it, the oldest are dropped
MAX_ANSWER_ENDS = 2  # where an answer may end: before white space, and before the token after it


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """The local windows and recurrent states of a cache after some of its tokens.

    num_tokens: how many tokens came before, evicted ones included. time: the cache's clock then;
    the same number of tokens at another time are not the same cells, because of an edit.
    local_segments: of the local layers' cache, in shared storage (copy-on-write).
    recurrent_states: of layers without cells, by name. branches: whether several texts begin with
    these tokens.
    """

    num_tokens: int
    time: int
    local_segments: tuple[Segment, ...]
    recurrent_states: Mapping[str, Tensor]
    branches: bool = False


@dataclass(frozen=True)
class Checkpoints:
    """An immutable list of checkpoints of one session, by increasing number of tokens.

    max_bytes: the most that they take. Storage shared with the session's own cells counts as
    theirs, since the next token makes it theirs. branch: after how many tokens another text differs
    from this one, as far as is known; 0 for unknown. answer_ends: those after which the newest
    answer may end, by their number of tokens: they make way for later ones of this kind.
    """

    max_bytes: int = DEFAULT_CHECKPOINT_BYTES
    entries: tuple[Checkpoint, ...] = ()
    branch: int = 0
    answer_ends: tuple[int, ...] = ()

    def added(self, checkpoint: Checkpoint) -> "Checkpoints":
        """Return the list with a newer checkpoint, thinned."""
        return self._added(checkpoint, ())

    def with_answer_end(self, checkpoint: Checkpoint) -> "Checkpoints":
        """Return the list with a checkpoint where an answer may end; at most two are kept."""
        number = checkpoint.num_tokens
        earlier = [each for each in self.answer_ends if each < number]
        return self._added(checkpoint, (*earlier[1 - MAX_ANSWER_ENDS :], number))

    def _added(self, checkpoint: Checkpoint, answer_ends: tuple[int, ...]) -> "Checkpoints":
        """Return the list with a newer checkpoint; of ends of answers with `answer_ends` alone."""
        dropped = set(self.answer_ends) - set(answer_ends)
        number, entries = checkpoint.num_tokens, self.entries
        older = [e for e in entries if e.num_tokens < number and e.num_tokens not in dropped]
        kept = _thinned(
            [*older, replace(checkpoint, branches=number == self.branch)], self.max_bytes
        )
        return replace(self, answer_ends=answer_ends)._with_entries(_sharing_storage(kept))

    @property
    def newest_end(self) -> int:
        """The token count at the newest checkpoint; 0 if there is none."""
        return self.entries[-1].num_tokens if self.entries else 0

    def limited(self, max_bytes: int) -> "Checkpoints":
        """Return the list with another limit, thinned to it."""
        kept = _thinned(self.entries, max_bytes)
        return replace(self, max_bytes=max_bytes)._with_entries(kept)

    def up_to(self, num_tokens: int) -> "Checkpoints":
        """Return the checkpoints taken at `num_tokens` tokens or earlier."""
        kept = [each for each in self.entries if each.num_tokens <= num_tokens]
        return self._with_entries(kept) if len(kept) < len(self.entries) else self

    def from_(self, num_tokens: int) -> "Checkpoints":
        """Return the checkpoints taken at `num_tokens` tokens or later."""
        kept = [each for each in self.entries if each.num_tokens >= num_tokens]
        return self._with_entries(kept) if len(kept) < len(self.entries) else self

    def _with_entries(self, entries: Sequence[Checkpoint]) -> "Checkpoints":
        """Return the list with these checkpoints, and with the ends of answers among them."""
        ends = {each.num_tokens for each in entries}.intersection(self.answer_ends)
        return replace(self, entries=tuple(entries), answer_ends=tuple(sorted(ends)))

    def newest(self, num_tokens: int) -> Checkpoint | None:
        """Return the newest one after at most `num_tokens` tokens."""
        entries = self.up_to(num_tokens).entries
        return entries[-1] if entries else None

    def branched(self, num_tokens: int) -> "Checkpoints":
        """Return the list for a text from which another differs after `num_tokens` tokens."""
        entries = [
            replace(each, branches=each.branches or each.num_tokens == num_tokens)
            for each in self.entries
        ]
        return replace(self, entries=tuple(entries), branch=num_tokens)

    def check(self, cache: CacheState, num_tokens: int, local_layout: Layout | None) -> None:
        """Raise ValueError if no session of `num_tokens` tokens in this cache has them.

        local_layout: of the cells of local layers; None if there are none.
        """
        require_int("the bytes of checkpoints", self.max_bytes, 0, MAX_EXACT_INT)
        require_int("the token at which another text differs", self.branch, 0, MAX_EXACT_INT)
        require(len(self.entries) <= MAX_CHECKPOINTS, "too many checkpoints")
        before = 0
        for checkpoint in self.entries:
            require_instance("it", checkpoint, Checkpoint)
            require_int("the tokens of a checkpoint", checkpoint.num_tokens, before + 1, num_tokens)
            before = checkpoint.num_tokens
            _check_checkpoint(checkpoint, cache, num_tokens, local_layout)
        self._check_answer_ends()
        require(checkpoint_nbytes(self.entries) <= self.max_bytes, "checkpoints beyond their bytes")

    def _check_answer_ends(self) -> None:
        """Raise ValueError unless the ends of answers are some checkpoints, in order."""
        require_instance("the ends of an answer", self.answer_ends, tuple)
        require(len(self.answer_ends) <= MAX_ANSWER_ENDS, "too many ends of an answer")
        ends, before = {each.num_tokens for each in self.entries}, 0
        for end in self.answer_ends:
            require_int("the end of an answer", end, before + 1, MAX_EXACT_INT)
            require(end in ends, "an end of an answer without a checkpoint")
            before = end


def _check_checkpoint(
    checkpoint: Checkpoint, cache: CacheState, num_tokens: int, local_layout: Layout | None
) -> None:
    """Raise ValueError if no session of `num_tokens` tokens in this cache has this checkpoint."""
    require_bool("whether texts branch at a checkpoint", checkpoint.branches)
    require_int("the clock of a checkpoint", checkpoint.time, -MAX_EXACT_INT, MAX_EXACT_INT)
    expected_time = cache.time - (num_tokens - checkpoint.num_tokens)
    require(checkpoint.time == expected_time, "a checkpoint of another time than its token's")
    segments, states = checkpoint.local_segments, checkpoint.recurrent_states
    require(bool(segments) == bool(cache.local_segments), "a checkpoint without its local windows")
    kinds, expected_kinds = (
        {name: (state.dtype, state.shape) for name, state in states.items()}
        for states in (states, cache.recurrent_states)
    )
    require(kinds == expected_kinds, "a checkpoint with other states than the session's")
    overwritten = replace(
        cache, time=checkpoint.time, local_segments=segments, recurrent_states=states
    )
    overwritten.check_overwritten(local_layout)
    if segments:
        seen = torch.cat([s.positions() - s.position_map.offset for s in segments])
        expected = torch.arange(-len(seen), 0, dtype=torch.int64, device="cpu") + checkpoint.time
        require(torch.equal(seen, expected), "a window of other tokens than the newest")


def _sharing_storage(checkpoints: Sequence[Checkpoint]) -> list[Checkpoint]:
    """Move windows that were filling into the newest one's storage, if it holds the same cells.

    Storage that grows is copied: older checkpoints would each keep what it was before.
    """
    if not checkpoints or not (newest := checkpoints[-1]).local_segments:
        return list(checkpoints)
    target, result = newest.local_segments[-1], [newest]
    moved = dict[Storage, bool]()  # whether cells of a storage are the target's
    for checkpoint in reversed(checkpoints[:-1]):
        *earlier, window = checkpoint.local_segments
        if _may_begin(window, target):
            storage = window.block.storage
            if storage not in moved:  # the longest window in it comes first
                cells = target.view(0, window.length)
                moved[storage] = cells.same_bits(window.view(0, window.length))
            if moved[storage]:
                window = shallow_copy(window)
                slots = slice(target.start, target.start + window.length)
                window.block, window.start = target.block.part(slots), 0
                checkpoint = replace(checkpoint, local_segments=(*earlier, window))
        result.insert(0, checkpoint)
    return result


def _may_begin(window: Segment, target: Segment) -> bool:
    """Whether a target in other storage may begin with the cells of a window, in their places."""
    is_filling = not any(s.frozen or s.places_wrap or s.wrapped for s in (window, target))
    fits = window.first_place == target.first_place and window.length <= target.length
    return is_filling and fits and window.block.storage is not target.block.storage


def checkpoint_nbytes(checkpoints: Iterable[Checkpoint]) -> int:
    """Return the bytes that checkpoints count for their limit: about the most that they take.

    The result depends on their cells alone, not on how these are stored, so that a session that was
    restored keeps the same checkpoints.
    """
    nbytes, windows = 0, dict[Hashable, int]()
    for checkpoint in checkpoints:
        nbytes += sum(state.nbytes for state in checkpoint.recurrent_states.values())
        for segment in checkpoint.local_segments:
            key, slot_count = _shared_slots(segment, checkpoint.num_tokens)
            windows[key] = max(windows.get(key, 0), slot_count * segment.layout.cell_bytes)
    return nbytes + sum(windows.values())


def _shared_slots(segment: Segment, num_tokens: int) -> tuple[Hashable, int]:
    """Return what identifies the storage of a checkpoint's segment, and the most slots of it."""
    serials, last = segment.block.slots.serials, segment.start + segment.length - 1
    if segment.frozen:  # a fork's, which begins to fill another one
        return (segment.limit, int(serials[last % segment.capacity])), segment.limit
    if segment.places_wrap:  # the next token has copied it
        return (segment.limit, num_tokens, "ring"), segment.limit
    first_serial = int(serials[segment.start])
    growth = max(MIN_GROWTH, segment.length // 8, segment.slack)
    slot_count = min(segment.limit, segment.first_place + segment.length + growth)
    return (segment.limit, first_serial - segment.first_place, "filling"), slot_count


def check_evaluated(checkpoint: Checkpoint, layout: Layout, window: Window | None) -> None:
    """Raise ValueError unless a prompt, evaluated from its beginning, can have left a checkpoint.

    layout: of the cells in its local windows. window: of the local layers, None without any.
    """
    count, segments = checkpoint.num_tokens, checkpoint.local_segments
    require(checkpoint.time == count, "a checkpoint of an edited text")
    states = checkpoint.recurrent_states
    contents = CacheState((), Window(), count, count, None, segments, states)
    contents.check(layout, layout, 1, layout)
    require(len(segments) == (window is not None), f"windows in {len(segments)} pieces")
    for segment in segments:
        require(window is not None and segment.limit == window.capacity, "another window's size")
        require(not (segment.frozen or segment.sealed), "a window that takes no more cells")
        require(segment.position_map == PositionMap(), "a window that was moved")
        require(segment.length == min(count, segment.limit), "an incomplete window")
        expected = torch.arange(count - segment.length, count, dtype=torch.int64, device="cpu")
        live_serials = segment.select_live(segment.block.slots.serials)
        is_in_order = torch.equal(segment.positions(), expected)
        require(is_in_order and torch.equal(live_serials, expected), "a window out of order")


def max_checkpoint_count(num_tokens: int, step: int) -> int:
    """Return the most checkpoints that are kept of so many tokens, without those at branches.

    With every second older checkpoint, the distance to the newest doubles.
    """
    return _DENSE + 2 * max(1, num_tokens // step).bit_length()


def _thinned(entries: Sequence[Checkpoint], max_bytes: int) -> list[Checkpoint]:
    """Return the checkpoints to keep: the older they are and the fewer bytes fit, the fewer."""
    sparsity = 1
    kept = _spaced(entries, sparsity)
    while kept and (len(kept) > MAX_CHECKPOINTS or checkpoint_nbytes(kept) > max_bytes):
        sparsity *= 2
        kept = _spaced(kept, sparsity) if sparsity <= _MAX_SPARSITY else kept[1:]
    return kept


def _spaced(entries: Sequence[Checkpoint], sparsity: int) -> list[Checkpoint]:
    """Drop checkpoints from between neighbours that are close enough to each other.

    Close enough are those that are at most `sparsity` times as far apart as the younger one is from
    the newest checkpoint. The oldest and the newest stay, and those at branches.
    """
    kept = list(entries)
    dense_count = max(1, _DENSE // sparsity)
    for index in range(len(kept) - 1 - dense_count, 0, -1):
        younger, older = kept[index + 1].num_tokens, kept[index - 1].num_tokens
        is_close = younger - older <= sparsity * (kept[-1].num_tokens - younger)
        if is_close and not kept[index].branches:
            del kept[index]
    return kept

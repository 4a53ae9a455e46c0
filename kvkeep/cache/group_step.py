"""A decode step of several caches in one forward: one token of each, or some tokens of one cache.

The rows of the forward are independent sequences, but for tokens of one cache (`row_steps`,
computed by the compiled kernels only). Each cache prepares what its own token sees.
Storage that several of them see, such as the prompt that forks share, is read once for all: their
queries are the rows of one attention call.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from kvkeep.cache.attention import MASK_BIAS
from kvkeep.cache.block import Cells
from kvkeep.cache.rope import Rotation
from kvkeep.cache.step import DecodeStep, LayerAttention, dispatch
from kvkeep.cache.view import View


class RowView(NamedTuple):
    """A query's view of a segment of its cache."""

    cache_index: int
    row: int  # of the query at one of its positions; see `shared_views`
    view: View


@dataclass(frozen=True)
class SharedView(View):
    """Stored cells that one or more queries see, each all or some of them.

    readers: the queries and their own views, whose `rotation_index` counts: that of this is unused.
    bias: `[readers, cells]` float32, or None where every reader sees every cell.
    """

    readers: Sequence[RowView]


def shared_views(steps: Sequence[DecodeStep]) -> list[SharedView]:
    """Return the views of all steps, one for each storage.

    A query has a row for each of its positions (`query_positions`). For example, of two caches the
    first has an anchor with another position map: rows 0 and 1 are the two queries at their own
    positions, and row 2 is the first query at its position towards the anchor.
    """
    readers: list[RowView] = []
    row_count = len(steps)
    for index, step in enumerate(steps):
        row_by_rotation = [index, *range(row_count, row_count + len(step.query_positions) - 1)]
        row_count += len(step.query_positions) - 1
        readers += [RowView(index, row_by_rotation[v.rotation_index], v) for v in step.views]
    return [_shared_view(group) for group in _group_by_storage(readers)]


@dataclass(frozen=True)
class GroupStep:
    """A step of several tokens at once: the i-th of the forward goes to the cache of the i-th step.

    steps: the caches' own, which they commit or discard. Those of one cache follow one another.
    """

    steps: Sequence[DecodeStep]

    @property
    def sampled(self) -> bool:
        """Whether all tokens were sampled; see `Step.sampled`."""
        return all(step.sampled for step in self.steps)

    @property
    def layer_attention(self) -> LayerAttention:
        """The attention of all decoder layers; see `Step.layer_attention`."""
        attention = GroupAttention(self.steps)
        local_steps = [s.local_step for s in self.steps if isinstance(s.local_step, DecodeStep)]
        local_attention = GroupAttention(local_steps) if local_steps else None
        return dispatch(self.steps[0].placements, attention, local_attention)


class GroupAttention:
    """The attention of a group's queries: rotations and views, prepared once for all layers."""

    def __init__(self, steps: Sequence[DecodeStep]):
        self._steps = steps
        self._config = steps[0].attention
        layout = steps[0].newest_segment.layout
        device, self._kv_heads = layout.device, layout.kv_heads
        self._heads_per_kv_head = self._config.heads // layout.kv_heads
        # For each row, the cache of its query, and its position.
        rows = [(index, step.query_positions[0][0]) for index, step in enumerate(steps)]
        for index, step in enumerate(steps):
            rows += [(index, positions[0]) for positions in step.query_positions[1:]]
        row_cache_indices, positions = zip(*rows, strict=True)
        self._row_cache_indices = torch.tensor(row_cache_indices, dtype=torch.int64, device=device)
        rotation, count = self._config.rope.rotation_at(list(positions)), len(steps)
        self._rotation = rotation
        self._key_rotation = Rotation(rotation.cosine[:count], rotation.sine[:count])
        views = shared_views(steps)
        # Each view, seen by one query of n times as many heads, and the rows of its n queries.
        self._views = []
        for view in views:
            bias, indices = view.bias, _indices([reader.row for reader in view.readers], device)
            if bias is not None:
                bias = bias.repeat_interleave(self._heads_per_kv_head, 0)
            self._views.append((view if bias is None else replace(view, bias=bias), indices))
        cache_indices = [reader.cache_index for view in views for reader in view.readers]
        self._part_indices, self._padding_bias = _parts_by_cache(cache_indices, len(steps), device)

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        """Attend as `Step.attend` does, with one row for each cache."""
        for step, row in zip(self._steps, torch.split(q, 1), strict=True):
            step.observe(layer, row)
        rope = self._config.rope
        if k is not None and v is not None:
            keys = torch.split(rope.rotate_layer(layer, k, self._key_rotation), 1)
            for step, key, value in zip(self._steps, keys, torch.split(v, 1), strict=True):
                step.write(layer, key, value)
        queries = rope.rotate_layer(layer, q[self._row_cache_indices], self._rotation)
        parts = [
            view.attend(layer, self._as_one_query(queries[rows]), self._config)
            for view, rows in self._views
        ]
        # All parts, in the order of the shared views: [kv_heads, parts, heads per KV head, ...].
        shape = (self._kv_heads, -1, self._heads_per_kv_head)
        outs = torch.cat([part.out[0].float() for part in parts], 1).view(*shape, q.shape[2])
        log_sums = torch.cat([part.log_sum[0] for part in parts], 1).view(shape)
        log_sums = log_sums[:, self._part_indices] + self._padding_bias
        if self._config.sinks is not None:  # one more part of each cache, without a value
            sinks = self._config.sinks[layer].view(self._kv_heads, 1, 1, self._heads_per_kv_head)
            sinks = sinks.expand(-1, len(self._steps), -1, -1)
            shares = torch.cat((log_sums, sinks), 2).softmax(2)[:, :, :-1]
        else:
            shares = log_sums.softmax(2)
        out = (outs[:, self._part_indices] * shares.unsqueeze(-1)).sum(2)
        return out.transpose(0, 1).flatten(1).to(q.dtype)

    def _as_one_query(self, queries: Tensor) -> Tensor:
        """Reshape `[n, heads, head_dim]` to `[1, kv_heads * n * heads_per_kv_head, head_dim]`.

        As one query of n times as many heads, they read each key once.
        """
        n, _, head_dim = queries.shape
        if n == 1:
            return queries
        queries_by_kv_head = queries.view(n, self._kv_heads, -1, head_dim).transpose(0, 1)
        return queries_by_kv_head.reshape(1, -1, head_dim)


def _group_by_storage(readers: list[RowView]) -> list[list[RowView]]:
    """Group views of the same memory, by the addresses and strides of keys and values."""
    groups: dict[tuple[int, ...], list[RowView]] = {}
    for reader in readers:
        groups.setdefault(reader.view.storage_key, []).append(reader)
    return list(groups.values())


def _shared_view(readers: list[RowView]) -> SharedView:
    """Return one view, from the first to the last cell that any reader sees."""
    if len(readers) == 1:
        view = readers[0].view
        return SharedView(view.slots, view.slot_range, 0, view.bias, view.place_offset, readers)
    views = [reader.view for reader in readers]
    ranges = [view.slot_range for view in views]
    slot_range = slice(min(s.start for s in ranges), max(s.stop for s in ranges))
    slots: Cells = max((view.slots for view in views), key=len)  # a fork's may end earlier
    bias = _bias_of_readers(views, slot_range, slots.stored_keys.device)
    return SharedView(slots, slot_range, 0, bias, views[0].place_offset, readers)


def _bias_of_readers(views: list[View], slot_range: slice, device: torch.device) -> Tensor | None:
    """Return `[views, slots of the range]` float32; None if every view is of the whole range."""
    if all(view.slot_range == slot_range and view.bias is None for view in views):
        return None
    shape = (len(views), slot_range.stop - slot_range.start)
    bias = torch.full(shape, MASK_BIAS, dtype=torch.float32, device=device)
    for row, view in zip(bias, views, strict=True):
        first = view.slot_range.start - slot_range.start
        end = view.slot_range.stop - slot_range.start
        row[first:end] = 0.0 if view.bias is None else view.bias[0]
    return bias


def _indices(rows: list[int], device: torch.device) -> slice | Tensor:
    """Return a slice, by which indexing copies nothing, for consecutive rows, else a tensor."""
    if rows == list(range(rows[0], rows[0] + len(rows))):
        return slice(rows[0], rows[0] + len(rows))
    return torch.tensor(rows, dtype=torch.int64, device=device)


def _parts_by_cache(
    cache_indices: list[int], cache_count: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the indices of each cache's parts, padded to one width, and a bias that hides padding.

    Returns `[caches, width]` int64, and `[caches, width, 1]` float32 to add to the parts' log-sums.
    If parts 0, 1 and 2 are of caches 0, 1 and 0, the indices are [[0, 2], [1, 0]], and the biases
    [[0, 0], [0, MASK_BIAS]].
    """
    parts_by_cache: list[list[int]] = [[] for _ in range(cache_count)]
    for part_index, cache_index in enumerate(cache_indices):
        parts_by_cache[cache_index].append(part_index)
    width = max(map(len, parts_by_cache))
    indices = [parts + [0] * (width - len(parts)) for parts in parts_by_cache]
    biases = [[0.0] * len(parts) + [MASK_BIAS] * (width - len(parts)) for parts in parts_by_cache]
    padding_bias = torch.tensor(biases, dtype=torch.float32, device=device).unsqueeze(-1)
    return torch.tensor(indices, dtype=torch.int64, device=device), padding_bias

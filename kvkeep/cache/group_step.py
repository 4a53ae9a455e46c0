"""One token of each of several caches, in one forward.

The rows of the forward are sequences that know nothing of each other. What each of them sees is
prepared by its own cache. Storage that several of them look at, the prompt that forks have in
common, is read once for all: their queries are the rows of one call.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from kvkeep.cache.attending import AttentionConfig
from kvkeep.cache.attention import HIDDEN, Part
from kvkeep.cache.block import Cells
from kvkeep.cache.layers import LayerAttention, LayerDispatch
from kvkeep.cache.quantised import tensors
from kvkeep.cache.rope import Rotation
from kvkeep.cache.step import DecodeStep, View


class RowView(NamedTuple):
    """One cache's view of stored cells. row: which of the group's queries takes it."""

    cache: int
    row: int
    view: View


@dataclass(frozen=True)
class SharedView:
    """A stretch of stored cells, and who looks at some of them.

    slots, span: the storage that they lie in, and where in it. origin: the place of its slot 0.
    bias: `[runs, cells]` float32, or None where each run is of every cell.
    """

    slots: Cells
    span: slice
    readers: Sequence[RowView]
    bias: Tensor | None
    origin: int


def shared_views(steps: Sequence[DecodeStep]) -> list[SharedView]:
    """All that the caches' new tokens see; what several look at is there once."""
    runs: list[RowView] = []
    rows = len(steps)  # the first ones stand where the new tokens do
    for index, step in enumerate(steps):
        own = [index, *range(rows, rows + len(step.query_positions) - 1)]
        rows += len(own) - 1
        runs += [RowView(index, own[view.rotation], view) for view in step.views]
    return [_sight(each) for each in _by_storage(runs)]


class GroupStep:
    """A step of several caches at once: the i-th token of the forward goes to the i-th of them.

    steps: one that each cache has opened, and will keep or take back. heads: of the queries.
    sampled: as `Step.sampled`, of all of them.
    """

    def __init__(self, steps: Sequence[DecodeStep], heads: int):
        self.steps = steps
        self.sampled = all(step.sampled for step in steps)
        self._heads = heads

    @cached_property
    def _plan(self) -> "Plan":
        return Plan(self.steps, self._heads)

    @property
    def layer_attention(self) -> LayerAttention:
        """As `Step.layer_attention`."""
        local = [step.local for step in self.steps if isinstance(step.local, DecodeStep)]
        if not local:
            return self
        return LayerDispatch(self.steps[0].placements, self, GroupStep(local, self._heads))

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        """As `Step.attend`, with one row for each cache."""
        return self._plan.attend(layer, q, k, v)


class Plan:
    """What each query of a group sees, prepared once and used by every layer."""

    def __init__(self, steps: Sequence[DecodeStep], heads: int):
        self.steps = steps
        self.attention = steps[0].attention
        layout = steps[0].newest.layout
        device, self.kv_heads = layout.device, layout.kv_heads
        self.groups = heads // layout.kv_heads
        sources, positions = list(range(len(steps))), [step.query_positions[0][0] for step in steps]
        for index, step in enumerate(steps):
            sources += [index] * (len(step.query_positions) - 1)
            positions += [where[0] for where in step.query_positions[1:]]
        self._sources = torch.tensor(sources, dtype=torch.int64, device=device)
        self._rotation = self.attention.rope.at(positions)
        self._key_rotation = Rotation(
            self._rotation.cosine[: len(steps)], self._rotation.sine[: len(steps)]
        )
        found = shared_views(steps)
        self._seen = [_Seen.of(sight, self.groups, device) for sight in found]
        order = [run.cache for sight in found for run in sight.readers]
        self._parts, self._absent = _parts_of(order, len(steps), device)

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        """LayerAttention to all that each query sees; its cell goes into its slot first."""
        for step, row in zip(self.steps, torch.split(q, 1), strict=True):
            step.observe(layer, row)
        if k is not None and v is not None:
            keys = self.attention.rope.rotate_layer(layer, k, self._key_rotation)
            for step, key, value in zip(self.steps, keys.unbind(0), v.unbind(0), strict=True):
                step.write(layer, key, value)
        queries = self.attention.rope.rotate_layer(layer, q[self._sources], self._rotation)
        found = [
            seen.attend(layer, _as_one(queries[seen.rows], self.kv_heads), self.attention)
            for seen in self._seen
        ]
        # All parts, in the order of their sights: [kv_heads, parts, groups, ...].
        shape = (self.kv_heads, -1, self.groups)
        outs = torch.cat([part.out[0].float() for part in found], 1).view(*shape, q.shape[2])
        log_sums = torch.cat([part.log_sum[0] for part in found], 1).view(shape)
        log_sums = log_sums[:, self._parts] + self._absent
        if (
            self.attention.sinks is not None
        ):  # one more part, of nothing: [kv_heads, caches, 1, groups]
            sinks = self.attention.sinks[layer].view(self.kv_heads, 1, 1, self.groups)
            shares = torch.cat((log_sums, sinks.expand(-1, len(self.steps), -1, -1)), 2)
            shares = shares.softmax(2)[:, :, :-1]
        else:
            shares = log_sums.softmax(2)
        out = (outs[:, self._parts] * shares.unsqueeze(-1)).sum(2)
        return out.transpose(0, 1).flatten(1).to(q.dtype)


@dataclass(frozen=True)
class _Seen:
    """A sight with a row for each query.

    view: of its cells, with a bias `[n * groups, cells]`, or none. rows: which of the group's
    queries, n of them.
    """

    view: View
    rows: slice | Tensor

    @classmethod
    def of(cls, sight: SharedView, groups: int, device: torch.device) -> "_Seen":
        bias = None if sight.bias is None else sight.bias.repeat_interleave(groups, 0)
        view = View(sight.slots, sight.span, 0, bias, sight.origin)
        return cls(view, _indices([run.row for run in sight.readers], device))

    def attend(self, layer: int, q: Tensor, attention: AttentionConfig) -> Part:
        """q: `[1, kv_heads * n * groups, head_dim]`."""
        return self.view.attend(layer, q, attention)


def _as_one(queries: Tensor, kv_heads: int) -> Tensor:
    """`[n, heads, head_dim]` as one query of n times as many heads: each key is read once.

    Returns `[1, kv_heads * n * groups, head_dim]`.
    """
    n, _, head_dim = queries.shape
    if n == 1:
        return queries
    return queries.view(n, kv_heads, -1, head_dim).transpose(0, 1).reshape(1, -1, head_dim)


def _by_storage(runs: list[RowView]) -> list[list[RowView]]:
    """Looks at the same storage together, whichever part of it each is at."""
    together: dict[tuple[int, ...], list[RowView]] = {}
    for run in runs:
        slots = run.view.slots
        lies_in = (*tensors(slots.stored_keys), *tensors(slots.stored_values))
        same = tuple(n for x in lies_in for n in (x.data_ptr(), *x.stride()))
        together.setdefault((run.view.origin, *same), []).append(run)
    return list(together.values())


def _sight(runs: list[RowView]) -> SharedView:
    """One sight of the stretch of storage from the first to the last cell that any looks at."""
    if len(runs) == 1:
        view = runs[0].view
        return SharedView(view.slots, view.span, runs, view.bias, view.origin)
    spans = [run.view.span for run in runs]
    start, stop = min(s.start for s in spans), max(s.stop for s in spans)
    slots: Cells = max((run.view.slots for run in runs), key=len)
    bias = _bias([run.view for run in runs], start, stop, slots.stored_keys.device)
    return SharedView(slots, slice(start, stop), runs, bias, runs[0].view.origin)


def _bias(views: list[View], start: int, stop: int, device: torch.device) -> Tensor | None:
    """`[views, stop - start]`; None where each view is of all these cells."""
    whole = slice(start, stop)
    if all(view.span == whole and view.bias is None for view in views):
        return None
    bias = torch.full((len(views), stop - start), HIDDEN, dtype=torch.float32, device=device)
    for row, view in zip(bias, views, strict=True):
        row[view.span.start - start : view.span.stop - start] = (
            0.0 if view.bias is None else view.bias[0]
        )
    return bias


def _indices(rows: list[int], device: torch.device) -> slice | Tensor:
    """A slice where rows follow one another: it copies nothing."""
    if rows == list(range(rows[0], rows[0] + len(rows))):
        return slice(rows[0], rows[0] + len(rows))
    return torch.tensor(rows, dtype=torch.int64, device=device)


def _parts_of(order: list[int], caches: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Which parts belong to each cache, where `order` says whose each is.

    Returns `[caches, most]` indices of parts, and `[caches, most, 1]`: `HIDDEN` where a cache has
    fewer parts than the one with most, and the index means nothing.
    """
    mine: list[list[int]] = [[] for _ in range(caches)]
    for part, cache in enumerate(order):
        mine[cache].append(part)
    most = max(map(len, mine))
    parts = [each + [0] * (most - len(each)) for each in mine]
    absent = [[0.0] * len(each) + [HIDDEN] * (most - len(each)) for each in mine]
    return (
        torch.tensor(parts, dtype=torch.int64, device=device),
        torch.tensor(absent, dtype=torch.float32, device=device).unsqueeze(-1),
    )

"""A decode step as the compiled kernels take it."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from kvkeep.cache import Ragged
from kvkeep.cache.group_step import SharedView, shared_views
from kvkeep.cache.step import DecodeStep
from kvkeep.compiled import binding as c
from kvkeep.compiled.operands import (
    address,
    cell_bias_address,
    ragged_cells,
    require,
    stored_cells,
)
from kvkeep.errors import KernelMismatch

# The shape of a layer group's cells: (layers, kv_heads, head_dim).
CellShape: TypeAlias = tuple[int, int, int]


def describe_step(
    tokens: Sequence[int],
    steps: Sequence[DecodeStep],
    cell_shapes: Sequence[CellShape],
    kernel_groups: Sequence[int],
    heads: int,
    hidden: Tensor,
    threads: int,
    seconds: Any = None,
) -> tuple[c.CDecodeStep, list[list[SharedView]]]:
    """Describe a step of one token for each cache; `hidden` takes the result.

    cell_shapes: of the model's layer groups. kernel_groups: for each of the kernels' groups, the
    index of the model's group whose cells it reads. heads: query heads. seconds: added to by phase.
    Also returns views whose biases the structure points to: they must live as long.
    Raises KernelMismatch for cells of another shape.
    """
    local = [step.local for step in steps if isinstance(step.local, DecodeStep)]
    by_group = [steps, *([local] if local else [])]
    expected = f"{len(cell_shapes)} groups of layers"
    require(len(by_group) == len(cell_shapes), expected, len(by_group))
    shared = [shared_views(group_steps) for group_steps in by_group]
    views = [
        _group_views(tokens, group_steps, group_shared, shape, heads)
        for group_steps, group_shared, shape in zip(by_group, shared, cell_shapes, strict=True)
    ]
    groups = (c.CGroupViews * len(kernel_groups))(*(views[index] for index in kernel_groups))
    # A structure keeps all arrays and structures alive that it points to, but no tensors.
    return c.CDecodeStep(len(steps), threads, groups, hidden.data_ptr(), seconds), shared


def _group_views(
    tokens: Sequence[int],
    steps: Sequence[DecodeStep],
    shared: Sequence[SharedView],
    shape: CellShape,
    heads: int,
) -> c.CGroupViews:
    """Describe what the steps attend to in one group."""
    # A cache's views keep the order of its own step, whichever other caches share them: results
    # are then added up in the same order as when the cache decodes alone.
    places = {
        id(reader.view): (index, row)
        for index, view in enumerate(shared)
        for row, reader in enumerate(view.readers)
    }
    views = [
        c.CSequenceView(step.query_positions[view.rotation][0], *places[id(view)])
        for step in steps
        for view in step.views
    ]
    sequences = (c.CSequence * len(steps))(
        *(_sequence(token, step, shape, heads) for token, step in zip(tokens, steps, strict=True))
    )
    shared_array = (c.CSharedView * len(shared))(*(_shared_view(view, shape) for view in shared))
    view_array = (c.CSequenceView * len(views))(*views)
    return c.CGroupViews(len(shared), len(views), sequences, shared_array, view_array)


def _sequence(token: int, step: DecodeStep, shape: CellShape, heads: int) -> c.CSequence:
    key, value = step.slot_tensors
    layers, _, head_dim = shape
    query_shape = (layers, 1, heads, head_dim)
    return c.CSequence(
        token,
        len(step.views),
        step.query_positions[0][0],
        stored_cells(key, shape),
        stored_cells(value, shape),
        None
        if step.queries is None
        else address(step.queries, "queries", torch.bfloat16, query_shape),
    )


def _shared_view(view: SharedView, shape: CellShape) -> c.CSharedView:
    layers, kv_heads, head_dim = shape
    cells, readers = view.slots, len(view.readers)
    if isinstance(cells, Ragged):
        keys, values, cell_biases, offsets = ragged_cells(cells, layers, kv_heads, head_dim)
        most = cells.max_count
        return c.CSharedView(keys, values, 0, most, readers, 0, None, cell_biases, 0, 0, offsets)
    bias, cell_bias, slots = view.bias, cells.bias, len(cells)
    first, end = view.slot_range.start, view.slot_range.stop
    if not 0 <= first < end <= slots:
        raise KernelMismatch(f"cells {first} to {end} were to be attended to, of {slots}")
    vectors = (layers, kv_heads, slots)
    return c.CSharedView(
        stored_cells(cells.stored_keys, (*vectors, head_dim)),
        stored_cells(cells.stored_values, (*vectors, head_dim)),
        first,
        end - first,
        readers,
        view.origin,
        None if bias is None else address(bias, "a bias", torch.float32, (readers, end - first)),
        None if cell_bias is None else cell_bias_address(cell_bias, vectors),
        *((0, 0) if cell_bias is None else cell_bias.stride()[:2]),
        None,
    )

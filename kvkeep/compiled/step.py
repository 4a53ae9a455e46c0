"""Describes decode steps to the compiled kernels, as structures that point to their tensors."""

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvkeep.cache import RaggedCells
from kvkeep.cache.group_step import SharedView, shared_views
from kvkeep.cache.step import DecodeStep
from kvkeep.compiled import structures as c
from kvkeep.compiled.operands import address, cell_bias_address, ragged_cells, require, stored_cells
from kvkeep.compiled.states import DecodedStates
from kvkeep.errors import KernelMismatch


class GroupShape(NamedTuple):
    """The shape of a layer group. layers: those with cells. heads: query heads."""

    layers: int
    kv_heads: int
    heads: int
    head_dim: int


def describe_step(
    tokens: Sequence[int],
    steps: Sequence[DecodeStep],
    shapes: Sequence[GroupShape],
    model_groups: Sequence[int],
    hidden: Tensor,
    states: DecodedStates | None = None,
    seconds: Any = None,
) -> tuple[c.CDecodeStep, list[list[SharedView]]]:
    """Describe a decode step of several tokens: of several sequences, or some tokens of one.

    steps: one for each token. shapes: one for each of the model's layer groups. model_groups: for
    each of the kernels' groups, the index of the model's group whose cells it reads. hidden:
    `[tokens, hidden]` bfloat16, for the result. states: of state layers. seconds: an array that
    each phase's seconds are added to.

    Also returns the views whose biases the structure points to: they must live as long as it.
    Raises KernelMismatch for cells of another shape.
    """
    local_steps = [step.local_step for step in steps if isinstance(step.local_step, DecodeStep)]
    steps_by_group = [steps, local_steps] if local_steps else [steps]
    expected = f"{len(shapes)} groups of layers"
    require(len(steps_by_group) == len(shapes), expected, len(steps_by_group))
    views_by_group = [shared_views(group_steps) for group_steps in steps_by_group]
    group_views = [
        _describe_group(tokens, group_steps, views, shape)
        for group_steps, views, shape in zip(steps_by_group, views_by_group, shapes, strict=True)
    ]
    groups = (c.CGroupViews * len(model_groups))(*(group_views[index] for index in model_groups))
    threads, hidden_address = torch.get_num_threads(), hidden.data_ptr()
    # A structure keeps all arrays and structures alive that it points to, but no tensors.
    state_array = None if states is None else states.described
    step = c.CDecodeStep(len(steps), threads, groups, state_array, hidden_address, seconds)
    return step, views_by_group


def _describe_group(
    tokens: Sequence[int],
    steps: Sequence[DecodeStep],
    views: Sequence[SharedView],
    shape: GroupShape,
) -> c.CGroupViews:
    """Describe the cells that sequences attend to, as views that several of them may share."""
    # A sequence's views keep the order of its own step, whichever others share them: results are
    # then added up in the same order as when the sequence decodes alone.
    index_and_row = {  # of each sequence's view: its shared view, and its row there
        (reader.cache_index, id(reader.view)): (index, row)  # steps of a cache may share a view
        for index, view in enumerate(views)
        for row, reader in enumerate(view.readers)
    }
    sequence_views = [
        c.CSequenceView(
            step.query_positions[view.rotation_index][0], *index_and_row[sequence, id(view)]
        )
        for sequence, step in enumerate(steps)
        for view in step.views
    ]
    sequences = [
        _describe_sequence(token, step, shape) for token, step in zip(tokens, steps, strict=True)
    ]
    return c.CGroupViews(
        len(views),
        len(sequence_views),
        (c.CSequence * len(steps))(*sequences),
        (c.CSharedView * len(views))(
            *(_describe_shared_view(view, steps, shape) for view in views)
        ),
        (c.CSequenceView * len(sequence_views))(*sequence_views),
    )


def _describe_sequence(token: int, step: DecodeStep, shape: GroupShape) -> c.CSequence:
    layers, kv_heads, heads, head_dim = shape
    # The slots in storage to which the kernel writes the token's key and value.
    key, value = (stored_cells(x, (layers, kv_heads, head_dim)) for x in step.slot_tensors)
    return c.CSequence(
        token,
        len(step.views),
        step.query_positions[0][0],
        key,
        value,
        None
        if step.queries is None
        else address(step.queries, "queries", torch.bfloat16, (layers, 1, heads, head_dim)),
        step.follows,
        0,
    )


def _describe_shared_view(
    view: SharedView, steps: Sequence[DecodeStep], shape: GroupShape
) -> c.CSharedView:
    overwritten, own_view = _describe_overwritten(view, steps, shape), view.readers[0].view
    if overwritten is not None or view.bias is not None or view.slots is not own_view.slots:
        return _describe_cells(view, shape, overwritten)
    # All readers see the same range of cells. They are described once for all steps that have the
    # same view of them, as of a frozen segment.
    key = (shape, len(view.readers))
    described: c.CSharedView | None = own_view.descriptions.get(key)
    if described is None:
        described = own_view.descriptions[key] = _describe_cells(view, shape, None)
    return described


def _describe_cells(view: SharedView, shape: GroupShape, overwritten: Any) -> c.CSharedView:
    """Describe the cells of a view. overwritten: a pointer to those that steps overwrite, or None.

    Raises KernelMismatch.
    """
    layers, kv_heads, _, head_dim = shape
    cells, readers = view.slots, len(view.readers)  # a reader is one sequence's use of the view
    if isinstance(cells, RaggedCells):
        keys, values, cell_biases, offsets = ragged_cells(cells, layers, kv_heads, head_dim)
        count = cells.max_count
        return c.CSharedView(
            keys, values, 0, count, readers, 0, None, cell_biases, 0, 0, offsets, None
        )
    bias, cell_bias, slots = view.bias, cells.bias, len(cells)
    first, end = view.slot_range.start, view.slot_range.stop
    if not 0 <= first < end <= slots:
        raise KernelMismatch(f"cell range {first} to {end} is outside of the {slots} slots")
    slots_shape = (layers, kv_heads, slots)
    return c.CSharedView(
        stored_cells(cells.stored_keys, (*slots_shape, head_dim)),
        stored_cells(cells.stored_values, (*slots_shape, head_dim)),
        first,
        end - first,
        readers,
        view.place_offset,
        None if bias is None else address(bias, "a bias", torch.float32, (readers, end - first)),
        None if cell_bias is None else cell_bias_address(cell_bias, slots_shape),
        *((0, 0) if cell_bias is None else cell_bias.stride()[:2]),
        None,
        overwritten,
    )


def _describe_overwritten(
    view: SharedView, steps: Sequence[DecodeStep], shape: GroupShape
) -> Any:  # a pointer, which ctypes cannot name
    """Describe the cells of a full ring that the steps of its cache overwrite; None if none are."""
    # Steps of one cache follow one another, so their rows in the view ascend.
    rows = []
    for row, reader in enumerate(view.readers):
        step = steps[reader.cache_index]
        if step.overwritten is not None and reader.view.slots is step.newest_segment.block.slots:
            rows.append(row)
    if not rows:
        return None
    own_steps = [steps[reader.cache_index] for reader in view.readers]
    layers, kv_heads, _, head_dim = shape
    cells, count = own_steps[rows[0]].overwritten, len(rows)
    assert cells is not None
    cells_shape, numbers = (layers, kv_heads, count, head_dim), ctypes.c_int32 * count
    return ctypes.pointer(
        c.COverwrittenCells(
            stored_cells(cells.stored_keys, cells_shape),
            stored_cells(cells.stored_values, cells_shape),
            numbers(*(own_steps[row].slot for row in rows)),
            numbers(*rows),
            count,
            0,
        )
    )

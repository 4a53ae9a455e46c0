"""What a decode step sees, as the compiled kernels take it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from kvkeep.cache import Ragged
from kvkeep.cache.group_step import SharedView, shared_views
from kvkeep.cache.step import DecodeStep
from kvkeep.compiled import binding as c
from kvkeep.compiled.operands import address, biases, kept, require, row
from kvkeep.errors import KernelMismatch

# The shape of cells: (layers, kv_heads, head_dim).
Vectors: TypeAlias = tuple[int, int, int]


@dataclass(frozen=True)
class Described:
    """structure: for the kernels. kept: whatever it points to, that must live as long."""

    structure: c.CStep
    kept: list[Any]


def describe(
    tokens: Sequence[int],
    steps: Sequence[DecodeStep],
    groups: Sequence[Vectors],
    of_kernels: Sequence[int],
    heads: int,
    hidden: Tensor,
    threads: int,
    seconds: Any = None,
) -> Described:
    """One token for each step; `hidden` takes the result.

    groups: the shape of cells in each of the model's groups of layers. of_kernels: for each of the
    kernels' groups, which of these it is. heads: of the queries.
    Raises KernelMismatch for cells of any other shape.
    """
    local = [step.local for step in steps if isinstance(step.local, DecodeStep)]
    of_groups = [steps, *([local] if local else [])]
    require(len(of_groups) == len(groups), f"{len(groups)} groups of layers", len(of_groups))
    seen = [
        _seen(tokens, each, vectors, heads) for each, vectors in zip(of_groups, groups, strict=True)
    ]
    array = (c.CSeen * len(of_kernels))(*(seen[index][0] for index in of_kernels))
    structure = c.CStep(len(steps), threads, array, hidden.data_ptr(), seconds)
    return Described(structure, [array, seen])


def _seen(
    tokens: Sequence[int], steps: Sequence[DecodeStep], vectors: Vectors, heads: int
) -> tuple[c.CSeen, list[Any]]:
    """What the steps of one group see, and whatever it points to."""
    seen = shared_views(steps)
    runs: list[list[c.CRun]] = [[] for _ in steps]
    # A cache's runs in the order of its own views, whoever else looks at the same cells: so what
    # they find is added up in the same order as when it is alone.
    places = {
        id(run.view): (s, index)
        for s, sight in enumerate(seen)
        for index, run in enumerate(sight.readers)
    }
    for own, step in zip(runs, steps, strict=True):
        for view in step.views:
            own.append(c.CRun(step.query_positions[view.rotation][0], *places[id(view)]))
    sequences = (c.CSequence * len(steps))(
        *(
            _sequence(token, step, len(own), vectors, heads)
            for token, step, own in zip(tokens, steps, runs, strict=True)
        )
    )
    sight_array = (c.CSight * len(seen))(*(_sight(sight, vectors) for sight in seen))
    every = [run for own in runs for run in own]
    run_array = (c.CRun * len(every))(*every)
    found = c.CSeen(len(seen), len(every), sequences, sight_array, run_array)
    return found, [seen, sequences, sight_array, run_array]


def _sequence(token: int, step: DecodeStep, runs: int, vectors: Vectors, heads: int) -> c.CSequence:
    key, value = step.slot_tensors
    layers, _, head_dim = vectors
    observed = (layers, 1, heads, head_dim)
    return c.CSequence(
        token,
        runs,
        step.query_positions[0][0],
        kept(key, vectors),
        kept(value, vectors),
        None
        if step.queries is None
        else address(step.queries, "queries", torch.bfloat16, observed),
    )


def _sight(sight: SharedView, vectors: Vectors) -> c.CSight:
    if isinstance(sight.slots, Ragged):
        return _ragged(sight.slots, len(sight.readers), vectors)
    bias, cell_bias, slots = sight.bias, sight.slots.bias, len(sight.slots)
    first, end, runs = sight.span.start, sight.span.stop, len(sight.readers)
    if not 0 <= first < end <= slots:
        raise KernelMismatch(f"cells {first} to {end} were to be looked at, of {slots}")
    layers, kv_heads, head_dim = vectors
    shape = (layers, kv_heads, slots)
    return c.CSight(
        kept(sight.slots.stored_keys, (*shape, head_dim)),
        kept(sight.slots.stored_values, (*shape, head_dim)),
        first,
        end - first,
        runs,
        sight.origin,
        None if bias is None else address(bias, "a bias", torch.float32, (runs, end - first)),
        None if cell_bias is None else biases(cell_bias, shape),
        *((0, 0) if cell_bias is None else cell_bias.stride()[:2]),
        None,
    )


def _ragged(cells: Ragged, runs: int, vectors: Vectors) -> c.CSight:
    layers, kv_heads, head_dim = vectors
    keys, values, bias, offsets = row(cells, layers, kv_heads, head_dim)
    return c.CSight(keys, values, 0, cells.max_count, runs, 0, None, bias, 0, 0, offsets)

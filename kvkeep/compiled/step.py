"""What a decode step sees, as the compiled kernels take it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvkeep.cache.group import sights
from kvkeep.cache.step import DecodeStep
from kvkeep.compiled import library as c
from kvkeep.compiled.cells import kept


@dataclass(frozen=True)
class Described:
    """structure: for the kernels. kept: whatever it points to, that must live as long."""

    structure: c.Step
    kept: list[Any]


def describe(
    tokens: Sequence[int],
    steps: Sequence[DecodeStep],
    hidden: Tensor,
    threads: int,
    seconds: Any = None,
) -> Described:
    """One token for each step; `hidden` takes the result."""
    seen = sights(steps)
    looks: list[list[c.Look]] = [[] for _ in steps]
    # A cache's looks in the order of its own views, whoever else looks at the same cells: so what
    # they find is added up in the same order as when it is alone.
    places = {
        id(look.view): (s, index)
        for s, sight in enumerate(seen)
        for index, look in enumerate(sight.looks)
    }
    for own, step in zip(looks, steps, strict=True):
        for view in step.views:
            own.append(c.Look(step.where[view.rotation][0], *places[id(view)]))
    sequences = (c.Sequence * len(steps))(
        *(
            _sequence(token, step, len(own))
            for token, step, own in zip(tokens, steps, looks, strict=True)
        )
    )
    sight_array = (c.Sight * len(seen))(*(_sight(sight) for sight in seen))
    every = [look for own in looks for look in own]
    look_array = (c.Look * len(every))(*every)
    structure = c.Step(
        len(steps),
        len(seen),
        len(every),
        threads,
        sequences,
        sight_array,
        look_array,
        hidden.data_ptr(),
        seconds,
    )
    return Described(structure, [seen, sequences, sight_array, look_array])


def _sequence(token: int, step: DecodeStep, looks: int) -> c.Sequence:
    key, value = step.cells
    return c.Sequence(
        token,
        looks,
        step.where[0][0],
        kept(key, "layer", "head"),
        kept(value, "layer", "head"),
        None if step.queries is None else step.queries.data_ptr(),  # [layers, 1, heads, head_dim]
    )


def _sight(sight: Any) -> c.Sight:
    bias, cell_bias = sight.bias, sight.slots.bias
    return c.Sight(
        kept(sight.slots.stored_keys, "layer", "head", "cell"),
        kept(sight.slots.stored_values, "layer", "head", "cell"),
        sight.span.start,
        sight.span.stop - sight.span.start,
        len(sight.looks),
        0,
        None if bias is None else bias.data_ptr(),
        *((None, 0, 0) if cell_bias is None else (cell_bias.data_ptr(), *cell_bias.stride()[:2])),
    )

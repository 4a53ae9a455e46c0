"""What a text says once more, word for word: of that less can be kept, and nothing is forgotten.

A text may say the same sentences again and again, as logs, forms and pasted files do. Where leaving
repeats is enough, no cell of what was said once has to go in any KV head, and it need not be asked
which are worth most.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvkeep.cache import Cells
from kvkeep.compression.methods.base import Candidates, as_compressed, rows
from kvkeep.compression.methods.compression import Compression, compress
from kvkeep.compression.methods.fitted import Fitted

RUN = 16  # tokens: in real text, what so many say again is boilerplate


def said_before(tokens: Sequence[int]) -> Tensor:
    """`[n]` bool: whether a token is in a run of 16 or more that came before, in the same order.

    Runs may overlap: of a b a b a b, with runs of two, all but the first a b were said before.
    """
    seen = set[tuple[int, ...]]()
    again, run_of_ones = bytearray(len(tokens)), bytes([1]) * RUN
    for first in range(len(tokens) - RUN + 1):
        run = tuple(tokens[first : first + RUN])
        if run in seen:
            again[first : first + RUN] = run_of_ones
        seen.add(run)
    return torch.tensor(list(again), dtype=torch.bool, device="cpu")


def fewer_repeats(
    candidates: Candidates, again: Tensor, count: int
) -> tuple[Cells, list[Compression]]:
    """All cells of what was said once, and `count` of the others, by method `fitted`.

    The mass of what goes is not kept: how often the same was said distracts from what was said
    once. candidates: n cells of one token each. again: `[n]` bool, which those are. In each layer
    and KV head the cells are in their order.
    """
    once, repeated = (~again).nonzero()[:, 0], again.nonzero()[:, 0]
    parts = [as_compressed(_some(candidates.cells, once))]
    told = [Compression(len(once), len(once), 0.0, 0.0)]
    some = replace(candidates, cells=_some(candidates.cells, repeated))
    for cells, compression in compress(Fitted(), some, count):
        parts.append(_without_mass(cells))
        told.append(compression)
    cells = Cells.concatenate(parts)
    return _in_order(cells) if len(cells) else cells, told


def _some(cells: Cells, which: Tensor) -> Cells:
    """The same cells in all layers and KV heads, copied. which: indices."""
    there = which.to(cells.keys.device)
    return Cells(
        cells.keys.index_select(2, there),
        cells.values.index_select(2, there),
        cells.positions[which],
        cells.serials[which],
    )


def _without_mass(cells: Cells) -> Cells:
    """The same cells, each of which counts once."""
    return as_compressed(Cells(cells.keys, cells.values, cells.positions, cells.serials))


def _in_order(cells: Cells) -> Cells:
    """The same compressed cells, those of each KV head by position."""
    assert cells.bias is not None
    order = cells.positions.argsort(stable=True, dim=-1)
    there = order.to(cells.keys.device)
    return Cells(
        rows(cells.keys, there),
        rows(cells.values, there),
        cells.positions.gather(2, order),
        cells.serials,
        cells.bias.gather(2, there),
    )

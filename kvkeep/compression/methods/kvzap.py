"""Method `kvzap`: what reconstruction would keep, guessed from the cell (arXiv:2601.07891)."""

from typing import ClassVar

import torch
from torch import Tensor

from kvkeep.cache import Ragged
from kvkeep.cache.rope import Rotation, rotate
from kvkeep.compression.methods.base import Candidates, EvictionByCell
from kvkeep.compression.methods.budget import Budget
from kvkeep.compression.methods.surrogate import Surrogate

YOUNG = 32  # positions
TOGETHER = 2**15  # cells of heads, scored at a time: what is in work stays in the caches then
AGE = 0.3  # what a cell is worth less for each doubling of its age, where cells age


class KVzap(EvictionByCell):
    """Keeps the cells of which the surrogate says that repeating the text would need them.

    It costs a product of each key and value with a vector, and needs nothing but the cells: an
    archive decides by it for ever. There, cells are worth less the older they are.
    """

    name: ClassVar[str] = "kvzap"
    budget: ClassVar[Budget] = "heads"
    guesses: ClassVar[bool] = True

    def score(self, candidates: Candidates) -> Tensor:
        score = super().score(candidates)
        if candidates.ageing:
            score = score - AGE * torch.log2(candidates.age / YOUNG + 1)
        return score

    def worth(self, candidates: Candidates) -> Tensor:
        assert candidates.statistics is not None, "no calibration"
        surrogate = candidates.statistics.surrogate
        assert surrogate is not None, "a calibration without a surrogate"
        return _guessed(candidates, surrogate)


def _guessed(candidates: Candidates, surrogate: Surrogate) -> Tensor:
    cells = candidates.cells
    if isinstance(cells, Ragged):
        return surrogate.score(candidates.unrotated, cells.values, cells.owners)
    turns, found = cells.key_shifts(candidates.rope, -cells.positions), []
    back = candidates.rope.at(turns)
    layers, kv_heads, count = candidates.shape
    together = max(1, TOGETHER // (kv_heads * max(1, count)))
    for first in range(0, layers, together):
        some = slice(first, first + together)
        turn = back if turns.ndim == 1 else Rotation(back.cosine[some], back.sine[some])
        keys = rotate(cells.keys[some].float().unsqueeze(-2), turn).squeeze(-2)
        found.append(surrogate.layers(some).score(keys, cells.values[some]))
    return torch.cat(found)

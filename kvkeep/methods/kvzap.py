"""Method `kvzap`: what reconstruction would keep, guessed from the cell (arXiv:2601.07891)."""

from typing import ClassVar

import torch
from torch import Tensor

from kvkeep.cache import Ragged
from kvkeep.cache.rope import Rotation, rotate
from kvkeep.methods.base import Candidates, Eviction
from kvkeep.methods.budget import Budget
from kvkeep.methods.surrogate import Surrogate

YOUNG = 32  # positions
LAYERS = 2  # scored at a time: what is in work then stays in the processor's caches
AGE = 0.3  # what a cell is worth less for each doubling of its age, where cells age


class KVzap(Eviction):
    """Keeps the cells of which the surrogate says that repeating the text would need them.

    It costs a product of each key and value with a vector, and needs nothing but the cells: an
    archive decides by it for ever. There, cells are worth less the older they are.
    """

    name: ClassVar[str] = "kvzap"
    budget: ClassVar[Budget] = "heads"
    alone: ClassVar[bool] = True
    guesses: ClassVar[bool] = True

    def score(self, candidates: Candidates) -> Tensor:
        assert candidates.statistics is not None, "no calibration"
        surrogate = candidates.statistics.surrogate
        assert surrogate is not None, "a calibration without a surrogate"
        score = _score(candidates, surrogate)
        if candidates.ageing:
            score -= AGE * torch.log2(candidates.age / YOUNG + 1)
        return score


def _score(candidates: Candidates, surrogate: Surrogate) -> Tensor:
    cells = candidates.cells
    if isinstance(cells, Ragged):
        return surrogate.score(candidates.unrotated, cells.values, cells.owners)
    back, found = candidates.rope.at(-cells.positions), []
    for first in range(0, candidates.shape[0], LAYERS):
        some = slice(first, first + LAYERS)
        turn = back if cells.positions.ndim == 1 else Rotation(back.cosine[some], back.sine[some])
        keys = rotate(cells.keys[some].float().unsqueeze(-2), turn).squeeze(-2)
        found.append(surrogate.layers(some).score(keys, cells.values[some]))
    return torch.cat(found)

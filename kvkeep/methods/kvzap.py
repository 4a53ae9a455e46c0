"""Method `kvzap`: what reconstruction would keep, guessed from the cell (arXiv:2601.07891)."""

from typing import ClassVar

import torch
from torch import Tensor

from kvkeep.cache import Ragged
from kvkeep.methods.base import Candidates, Eviction
from kvkeep.methods.budget import Budget

YOUNG = 32  # positions
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
        cells = candidates.cells
        owners = cells.owners if isinstance(cells, Ragged) else None
        score = surrogate.score(candidates.unrotated, cells.values, owners)
        if candidates.ageing:
            score -= AGE * torch.log2(candidates.age / YOUNG + 1)
        return score

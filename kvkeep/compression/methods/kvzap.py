"""Method `kvzap`: reconstruction scores predicted from the cell alone (arXiv:2601.07891)."""

from typing import ClassVar

import torch
from torch import Tensor

from kvkeep.cache import Ragged
from kvkeep.cache.rope import Rotation, rotate
from kvkeep.compression.methods.base import Candidates, CellwiseEviction
from kvkeep.compression.methods.budget import Budget
from kvkeep.compression.methods.statistics import Surrogate

YOUNG = 32  # positions; ageing starts beyond them
BATCH = 2**15  # cells scored at a time over all heads, so that the work stays in the CPU caches
AGE_PENALTY = 0.3  # subtracted from a score for each doubling of age, if cells age


class KVzap(CellwiseEviction):
    """Keeps the cells whose reconstruction scores a calibration's surrogate predicts to be highest.

    It costs a product of each key and value with a vector, and needs nothing but the cells, so that
    an archive can use it indefinitely. There, scores fall with age.
    """

    name: ClassVar[str] = "kvzap"
    budget: ClassVar[Budget] = "heads"
    uses_surrogate: ClassVar[bool] = True

    def score(self, candidates: Candidates) -> Tensor:
        score = super().score(candidates)
        if candidates.ageing:
            score = score - AGE_PENALTY * torch.log2(candidates.age / YOUNG + 1)
        return score

    def cell_score(self, candidates: Candidates) -> Tensor:
        assert candidates.statistics is not None, "no calibration"
        surrogate = candidates.statistics.surrogate
        assert surrogate is not None, "a calibration without a surrogate"
        return _predict(candidates, surrogate)


def _predict(candidates: Candidates, surrogate: Surrogate) -> Tensor:
    cells = candidates.cells
    if isinstance(cells, Ragged):
        return surrogate.score(candidates.unrotated, cells.values, cells.owners)
    shifts, scores = cells.key_shifts(candidates.rope, -cells.positions), []
    inverse = candidates.rope.at(shifts)
    layers, kv_heads, count = candidates.shape
    batch = max(1, BATCH // (kv_heads * max(1, count)))
    for first in range(0, layers, batch):
        part = slice(first, first + batch)
        rotation = (
            inverse if shifts.ndim == 1 else Rotation(inverse.cosine[part], inverse.sine[part])
        )
        keys = rotate(cells.keys[part].float().unsqueeze(-2), rotation).squeeze(-2)
        scores.append(surrogate.layers(part).score(keys, cells.values[part]))
    return torch.cat(scores)

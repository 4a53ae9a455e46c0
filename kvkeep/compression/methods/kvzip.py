"""Methods `kvzip`, `kvzip+` and `kvzap`: keep the cells that reconstructing the text needs."""

from typing import ClassVar

import torch
from torch import Tensor

from kvkeep.cache import Ragged
from kvkeep.cache.rope import Rotation, rotate
from kvkeep.compression.methods.attention import max_pooled
from kvkeep.compression.methods.base import (
    Budget,
    Candidates,
    CellwiseEviction,
    Eviction,
    ReconstructionScore,
)

# Natural logarithms of factors: see `KVzip`.
OTHER_HEADS = 2.0
NEIGHBOURS = 1.5
AGE_PENALTY = 0.3  # subtracted from a score of `KVzap` for each doubling of age, if cells age
BATCH = 2**15  # cells scored at a time over all heads, so that the work stays in the CPU caches


class KVzip(Eviction):
    """Keeps the cells with the most attention while the model repeats the text.

    Kim et al., arXiv:2505.23416. No question is assumed: what is needed to reconstruct the text is
    needed for any. Heads compete, since few of them have most of what is needed. It costs about one
    more prefill.

    Beyond the paper: the other KV heads of a layer get the score of a head for the same token,
    times e^-2; at 8 times fewer cells the model then confuses two facts less often. And the
    neighbours of a cell get its score times e^-1.5 (as SnapKV pools, arXiv:2404.14469), so that
    what is said in several tokens stays whole.
    """

    name: ClassVar[str] = "kvzip"
    uses_reconstruction: ClassVar[ReconstructionScore | None] = "attention"
    budget: ClassVar[Budget] = "heads"

    def score(self, candidates: Candidates) -> Tensor:
        score = candidates.reconstruction
        assert score is not None, "the text was not reconstructed"
        score = torch.maximum(score, score.amax(1, keepdim=True) - OTHER_HEADS)
        return torch.maximum(score, max_pooled(score, 3) - NEIGHBOURS)


class KVzipPlus(KVzip):
    """Keeps the cells that contribute most to the repeated tokens (arXiv:2601.07891).

    Scores are those of `KVzip`, except that the attention weight is multiplied by the norm of the
    cell's projected value, and divided by that of the residual stream of the query's token.
    """

    name: ClassVar[str] = "kvzip+"
    uses_reconstruction: ClassVar[ReconstructionScore | None] = "contribution"


class KVzap(CellwiseEviction):
    """Keeps the cells whose reconstruction scores a calibration's surrogate predicts to be highest.

    arXiv:2601.07891. It costs a product of each key and value with a vector, and needs nothing but
    the cells, so that an archive can use it indefinitely. There, scores fall with age.
    """

    name: ClassVar[str] = "kvzap"
    budget: ClassVar[Budget] = "heads"
    uses_surrogate: ClassVar[bool] = True

    def score(self, candidates: Candidates) -> Tensor:
        score = super().score(candidates)
        return score - AGE_PENALTY * candidates.age_doublings if candidates.ageing else score

    def cell_score(self, candidates: Candidates) -> Tensor:
        assert candidates.statistics is not None, "no calibration"
        surrogate = candidates.statistics.surrogate
        assert surrogate is not None, "a calibration without a surrogate"
        cells, scores = candidates.cells, []
        if isinstance(cells, Ragged):
            return surrogate.score(candidates.unrotated, cells.values, cells.head_indices)
        shifts = cells.key_shifts(candidates.rope, -cells.positions)
        inverse = rotation = candidates.rope.at(shifts)
        layers, kv_heads, count = candidates.shape
        batch = max(1, BATCH // (kv_heads * max(1, count)))
        for first in range(0, layers, batch):
            part = slice(first, first + batch)
            if shifts.ndim > 1:  # otherwise the same in all layers
                rotation = Rotation(inverse.cosine[part], inverse.sine[part])
            keys = rotate(cells.keys[part].float().unsqueeze(-2), rotation).squeeze(-2)
            scores.append(surrogate.part(part).score(keys, cells.values[part]))
        return torch.cat(scores)

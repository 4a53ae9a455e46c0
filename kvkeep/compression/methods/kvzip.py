"""Methods `kvzip`, `kvzip+` and `kvzap`: keep the cells that reconstructing the text needs."""

from typing import ClassVar

import torch
from torch import Tensor

from kvkeep.cache import RaggedCells
from kvkeep.cache.rope import Rotation, rotate
from kvkeep.compression.methods.attention import max_pool
from kvkeep.compression.methods.base import (
    Budget,
    Candidates,
    CellwiseEviction,
    Eviction,
    ReconstructionScore,
)

# Subtracted from the log of a score that a cell takes from another head or neighbour: see `KVzip`.
HEAD_PENALTY = 2.0
NEIGHBOUR_PENALTY = 1.5
AGE_PENALTY = 0.3  # subtracted from a score of `KVzap` for each doubling of age, if cells age
BATCH_CELLS = 2**15  # scored at a time over all heads, so that the work stays in the CPU caches


class KVzip(Eviction):
    """Keeps the cells with the most attention while the model repeats the text.

    Kim et al., arXiv:2505.23416. The cells that reconstruct the text serve any later question.
    Heads compete, since a few heads hold most of these cells. It costs about one more prefill.

    Beyond the paper: a token's score in one KV head counts in the layer's other heads, times e^-2;
    with 8 times fewer cells the model then confuses two facts less often. And a cell's score counts
    for its neighbours, times e^-1.5 (as SnapKV pools, arXiv:2404.14469), so that a phrase of
    several tokens stays whole.
    """

    name: ClassVar[str] = "kvzip"
    reconstruction_kind: ClassVar[ReconstructionScore | None] = "attention"
    budget: ClassVar[Budget] = "heads"
    residual: ClassVar[bool] = True

    def score(self, candidates: Candidates) -> Tensor:
        scores = candidates.reconstruction
        assert scores is not None, "the text was not reconstructed"
        scores = torch.maximum(scores, scores.amax(1, keepdim=True) - HEAD_PENALTY)
        return torch.maximum(scores, max_pool(scores, 3) - NEIGHBOUR_PENALTY)


class KVzipExact(KVzip):
    """Keeps the cells of `KVzip` without residual ones, as published: for comparisons."""

    name: ClassVar[str] = "kvzip-exact"
    residual: ClassVar[bool] = False


class KVzipPlus(KVzip):
    """Keeps the cells that contribute most to the repeated tokens (arXiv:2601.07891).

    As `KVzip`, but attention weights are multiplied by the norm of the cell's projected value and
    divided by the norm of the query's residual stream.
    """

    name: ClassVar[str] = "kvzip+"
    reconstruction_kind: ClassVar[ReconstructionScore | None] = "contribution"


class KVzap(CellwiseEviction):
    """Keeps the cells whose reconstruction scores a calibration's surrogate predicts to be highest.

    arXiv:2601.07891. It costs one dot product per key and value, and needs only the cells, so that
    an archive can apply it again and again. There, scores fall with age.
    """

    name: ClassVar[str] = "kvzap"
    budget: ClassVar[Budget] = "heads"
    uses_surrogate: ClassVar[bool] = True
    # A nat for 4,000 tokens. Without it, an archive of a million tokens holds the highest scores
    # of all of them, and predicts text worse than a window of as many cells.
    decay_per_token: ClassVar[float] = 1 / 4000

    def score(self, candidates: Candidates) -> Tensor:
        score = super().score(candidates)
        return score - AGE_PENALTY * candidates.age_doublings if candidates.ageing else score

    def cell_score(self, candidates: Candidates) -> Tensor:
        assert candidates.statistics is not None, "no calibration"
        surrogate = candidates.statistics.surrogate
        assert surrogate is not None, "a calibration without a surrogate"
        cells, scores = candidates.cells, []
        if isinstance(cells, RaggedCells):
            return surrogate.score(candidates.unrotated_keys, cells.values, cells.head_indices)
        shifts = cells.key_shifts(candidates.rope, -cells.positions)
        inverse_rotation = rotation = candidates.rope.rotation_at(shifts)
        layers, kv_heads, count = candidates.shape
        layers_at_once = max(1, BATCH_CELLS // (kv_heads * max(1, count)))
        for first_layer in range(0, layers, layers_at_once):
            batch = slice(first_layer, first_layer + layers_at_once)
            if shifts.ndim > 1:  # otherwise the same in all layers
                rotation = Rotation(inverse_rotation.cosine[batch], inverse_rotation.sine[batch])
            keys = rotate(cells.keys[batch].float().unsqueeze(-2), rotation).squeeze(-2)
            scores.append(surrogate.select(batch).score(keys, cells.values[batch]))
        return torch.cat(scores)

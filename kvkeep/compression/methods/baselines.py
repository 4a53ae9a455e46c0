"""Methods that need no queries: random choice, key norms, and key directions."""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from kvkeep.compression.methods.base import Candidates, CellwiseEviction, Eviction

EPSILON = 1e-12  # norm below which a key has no direction


class Random(Eviction):
    """Keeps random cells, different ones in each KV head; the same ones for the same seed.

    The baseline for all other methods.
    """

    name: ClassVar[str] = "random"

    def score(self, candidates: Candidates) -> Tensor:
        generator = torch.Generator("cpu").manual_seed(candidates.seed)
        score = torch.rand(candidates.shape, generator=generator, dtype=torch.float32, device="cpu")
        return score.to(candidates.cells.keys.device)


class KNorm(CellwiseEviction):
    """Keeps the cells whose keys have the smallest norm, which attention was found to favour.

    Devoto et al., arXiv:2406.11430.
    """

    name: ClassVar[str] = "knorm"

    def cell_score(self, candidates: Candidates) -> Tensor:
        norms: Tensor = candidates.cells.keys.float().norm(dim=-1)
        return -norms


class KeyDiff(Eviction):
    """Keeps the cells whose rotated keys are least similar to the mean of all key directions.

    Park et al., arXiv:2504.15364.
    """

    name: ClassVar[str] = "keydiff"

    def score(self, candidates: Candidates) -> Tensor:
        return dissimilarity(candidates.keys, inverse_norms(candidates.keys))


def inverse_norms(x: Tensor) -> Tensor:
    """Map `[..., n, width]` to the inverse norm of each row, `[..., n]`."""
    norms: Tensor = x.norm(dim=-1)
    return 1 / norms.clamp(min=EPSILON)


def dissimilarity(x: Tensor, inverse_norms: Tensor) -> Tensor:
    """Return minus the cosine of each row of `[..., n, width]` with the mean direction."""
    mean_direction = F.normalize(inverse_norms.unsqueeze(-2) @ x, dim=-1)
    cosine: Tensor = (x @ mean_direction.transpose(-1, -2)).squeeze(-1) * inverse_norms
    return -cosine

"""Method `random`: the baseline that everything else must beat."""

from typing import ClassVar

import torch
from torch import Tensor

from kvkeep.methods.base import Candidates, Eviction


class Random(Eviction):
    """Keeps cells at random, each KV head its own; the same ones for the same seed."""

    name: ClassVar[str] = "random"

    def score(self, candidates: Candidates) -> Tensor:
        generator = torch.Generator().manual_seed(candidates.seed)
        score = torch.rand(candidates.shape, generator=generator)
        return score.to(candidates.cells.keys.device)

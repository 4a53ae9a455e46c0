"""Method `random`: the baseline that everything else must beat."""

from typing import ClassVar

import torch
from torch import Tensor

from kvkeep.compression.methods.base import Candidates, Eviction


class Random(Eviction):
    """Keeps cells at random, each KV head its own; the same ones for the same seed."""

    name: ClassVar[str] = "random"

    def score(self, candidates: Candidates) -> Tensor:
        generator = torch.Generator("cpu").manual_seed(candidates.seed)
        score = torch.rand(candidates.shape, generator=generator, dtype=torch.float32, device="cpu")
        return score.to(candidates.cells.keys.device)

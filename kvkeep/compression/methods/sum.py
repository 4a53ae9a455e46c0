"""Method `sum`: neighbours become their sum (llama.cpp, pull request 5719)."""

from typing import ClassVar

import torch
from torch import Tensor

from kvkeep.compression.methods.base import Candidates
from kvkeep.compression.methods.runs import RunMerging


class Sum(RunMerging):
    """The summed keys and values of each run of cells. Published as a failure, and kept as one."""

    name: ClassVar[str] = "sum"

    def weights(self, candidates: Candidates, run: Tensor, sizes: Tensor) -> Tensor:
        return torch.ones(candidates.shape[1:], dtype=torch.float32, device="cpu")

"""Method `average`: neighbours become their mean (llama.cpp, pull request 5719)."""

from typing import ClassVar

from torch import Tensor

from kvkeep.compression.methods.base import Candidates
from kvkeep.compression.methods.runs import RunMerging


class Average(RunMerging):
    """The mean key and value of each run of cells. Published as a failure, and kept as one.

    If a key stands out by a logit gap D, its average with another leaves it 2 e^(-D/2) / (1 +
    e^-D) of its share: 27 % at a gap of 4. What was distinct is lost.
    """

    name: ClassVar[str] = "average"

    def weights(self, candidates: Candidates, run: Tensor, sizes: Tensor) -> Tensor:
        return (1 / sizes)[run].expand(candidates.shape[1], -1)

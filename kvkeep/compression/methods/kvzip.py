"""Methods `kvzip` and `kvzip+`: keep the cells that reconstructing the text needs."""

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d

from kvkeep.compression.methods.base import Candidates, Eviction, ReconstructionScore
from kvkeep.compression.methods.budget import Budget

# Natural logarithms of factors: see `KVzip`.
OTHER_HEADS = 2.0
NEIGHBOURS = 1.5


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
        assert candidates.reconstruction is not None, "the text was not reconstructed"
        score = candidates.reconstruction
        score = torch.maximum(score, score.amax(1, keepdim=True) - OTHER_HEADS)
        neighbours = max_pool1d(score.flatten(0, 1).unsqueeze(1), 3, stride=1, padding=1)
        return torch.maximum(score, neighbours.view_as(score) - NEIGHBOURS)


class KVzipPlus(KVzip):
    """Keeps the cells that contribute most to the repeated tokens (arXiv:2601.07891).

    Scores are those of `KVzip`, except that the attention weight is multiplied by the norm of the
    cell's projected value, and divided by that of the residual stream of the query's token.
    """

    name: ClassVar[str] = "kvzip+"
    uses_reconstruction: ClassVar[ReconstructionScore | None] = "contribution"

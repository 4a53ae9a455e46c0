"""Method `kvzip`: what it takes to say the text again (Kim et al., arXiv:2505.23416)."""

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d

from kvkeep.compression.methods.base import Candidates, Eviction, Repeated
from kvkeep.compression.methods.budget import Budget

SHARED = 2.0  # of a natural logarithm
NEAR = 1.5


class KVzip(Eviction):
    """Keeps the cells that attention looks at most while the model repeats the text.

    No question is foreseen: what is needed to know the text is needed for any. Heads compete, since
    most of what is needed is in few of them. It costs about one more prefill.

    Beyond the paper: what one KV head of a layer needs of a token, the others need by a factor of
    e^-2. Who is told of two things then mixes them up less often, at 8 times fewer cells. And
    of what a head needs, it needs the cells on both sides by e^-1.5 (as SnapKV pools,
    arXiv:2404.14469): what is said in several tokens then stays whole.
    """

    name: ClassVar[str] = "kvzip"
    reconstructs: ClassVar[Repeated | None] = "attention"
    budget: ClassVar[Budget] = "heads"

    def score(self, candidates: Candidates) -> Tensor:
        assert candidates.reconstruction is not None, "the text was not repeated"
        needed = candidates.reconstruction
        needed = torch.maximum(needed, needed.amax(1, keepdim=True) - SHARED)
        near = max_pool1d(needed.flatten(0, 1).unsqueeze(1), 3, stride=1, padding=1)
        return torch.maximum(needed, near.view_as(needed) - NEAR)

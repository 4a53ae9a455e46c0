"""Method `tova`: what the last token looks at (Oren et al., arXiv:2401.06104)."""

from typing import ClassVar

from torch import Tensor

from kvkeep.compression.methods.attended import attention
from kvkeep.compression.methods.base import Candidates, Eviction
from kvkeep.compression.methods.observed import observed


class TOVA(Eviction):
    """Keeps the cells that the newest query attends to most, the same ones in all KV heads."""

    name: ClassVar[str] = "tova"
    observes: ClassVar[bool] = True

    def score(self, candidates: Candidates) -> Tensor:
        shares = attention(candidates, observed(candidates, 1)).squeeze(2)
        return shares.mean(1, keepdim=True).expand(candidates.shape)

"""Method `knorm`: keys of a small norm (Devoto et al., arXiv:2406.11430)."""

from typing import ClassVar

from torch import Tensor

from kvkeep.compression.methods.base import Candidates, EvictionByCell


class KNorm(EvictionByCell):
    """Keeps the cells whose keys have the smallest norm, which attention was found to favour."""

    name: ClassVar[str] = "knorm"

    def worth(self, candidates: Candidates) -> Tensor:
        norms: Tensor = candidates.cells.keys.float().norm(dim=-1)
        return -norms

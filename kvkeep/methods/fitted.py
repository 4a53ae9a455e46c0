"""Method `fitted`: what is distinct stays as it is; what is alike lives on in it."""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from kvkeep.cache import Cells
from kvkeep.methods.base import Candidates, Compressed, Method, best
from kvkeep.methods.keydiff import unlikeness

ALIKE = 0.9  # the least cosine of keys that are taken for one
EMPHASIS = 0.25  # power of the queries' second moment; 0 does without, 0.5 is their own measure
MASS = 0.5  # how much of the log of a count goes into the bias


class Fitted(Method):
    """Dominant keys, with the mass and the values of what resembles them.

    Everything is decided on keys before rotation, so that the same word said again is the same,
    wherever it stands. Keys least like the mean direction are dominant and stay as they are (no
    average blurs a key that stands out). Another cell joins the dominant that it is most like if
    it is alike enough: its value goes into a mean there, and its mass into a bias on the logit.
    What is like no other, and not distinct enough to stay, is forgotten.

    With statistics, keys are compared as queries see them: by the difference that they make to a
    logit.
    """

    name: ClassVar[str] = "fitted"

    def __init__(self, alike: float = ALIKE):
        self._alike = alike

    def compress(self, candidates: Candidates, count: int) -> Compressed:
        seen = self._as_seen(candidates)
        kept = best(unlikeness(seen), count)
        cells = candidates.taken(kept)
        into, joins = self._joining(seen, kept)
        mass = (candidates.bias / MASS).exp()
        own, masses = mass.gather(2, kept), joins * mass
        gained = torch.zeros_like(own).scatter_add_(2, into, masses)
        return Compressed(
            Cells(
                cells.keys,
                self._mixed(candidates, cells, into, masses, own),
                cells.positions,
                cells.serials,
                MASS * (own + gained).log(),
            ),
            merged=float(joins.sum(-1).mean()),
        )

    def _as_seen(self, candidates: Candidates) -> Tensor:
        """`[layers, kv_heads, n, head_dim]`: keys such that their distance is what queries see."""
        known = candidates.statistics
        keys = candidates.unrotated
        if known is None:
            return keys
        values, vectors = torch.linalg.eigh(known.moment)
        root = vectors * values.clamp(min=0).pow(EMPHASIS).unsqueeze(-2)
        seen: Tensor = keys @ root
        return seen

    def _joining(self, seen: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
        """For each cell: which of the kept it is most like, and 1 if it joins it, else 0."""
        directions = F.normalize(seen, dim=-1).bfloat16()
        rows = kept.unsqueeze(-1).expand(-1, -1, -1, seen.shape[-1])
        likeness, into = (directions @ directions.gather(2, rows).transpose(-1, -2)).max(-1)
        joins = (likeness.float() > self._alike).float()
        return into, joins.scatter_(2, kept, 0.0)

    def _mixed(
        self, candidates: Candidates, cells: Cells, into: Tensor, masses: Tensor, own: Tensor
    ) -> Tensor:
        """Values as the means of all that each cell stands for."""
        values = candidates.cells.values.float()
        rows = into.unsqueeze(-1).expand_as(values)
        total = cells.values.float() * own.unsqueeze(-1)
        total.scatter_add_(2, rows, values * masses.unsqueeze(-1))
        weight = own.scatter_add(2, into, masses)
        return (total / weight.unsqueeze(-1)).to(cells.values.dtype)

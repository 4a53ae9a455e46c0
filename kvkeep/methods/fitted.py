"""Method `fitted`: what is distinct stays as it is; what is alike lives on in it."""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from kvkeep.cache import Cells
from kvkeep.methods.base import Candidates, Compressed, Method, best
from kvkeep.methods.keydiff import unlikeness

ALIKE = 0.9  # the least cosine of keys that are taken for one
MASS = 0.5  # how much of the log of a count goes into the bias
REPEATED = 4.0  # what a repeat is worth less; distinctness lies within -2 and 2


class Fitted(Method):
    """Dominant keys, with the mass and the values of what resembles them.

    Keys are compared before rotation, so that the same word said again is the same, wherever it
    stands. Of cells that say the same, the first counts; of these, the ones least like the mean
    direction, before rotation and after it, are dominant and stay as they are: no average blurs a
    key that stands out. Another cell joins the dominant that it is most like if it is alike enough:
    its value goes into a mean there, and its mass into a bias on the logit. What is like none of
    them is forgotten.

    With statistics, keys are compared as queries see them (differences are weighted by a power of
    the queries' second moment), and each KV head has the likeness that its merges tolerate.
    """

    name: ClassVar[str] = "fitted"

    def __init__(self, alike: float | None = None):
        """alike: the least cosine of keys to be merged, whatever statistics say."""
        self._alike = alike

    def compress(self, candidates: Candidates, count: int) -> Compressed:
        seen = _as_seen(candidates)
        least = self._least_likeness(candidates)
        kept = best(_worth(candidates, seen, least), count)
        cells = candidates.taken(kept)
        into, joins = _joining(seen, kept, least)
        mass = (candidates.bias / MASS).exp()
        own, masses = mass.gather(2, kept), joins * mass
        gained = torch.zeros_like(own).scatter_add_(2, into, masses)
        return Compressed(
            Cells(
                cells.keys,
                _mixed(candidates, cells, into, masses, own),
                cells.positions,
                cells.serials,
                MASS * (own + gained).log(),
            ),
            merged=float(joins.sum(-1).mean()),
        )

    def _least_likeness(self, candidates: Candidates) -> float | Tensor:
        if candidates.statistics is None or self._alike is not None:
            return self._alike or ALIKE
        return candidates.statistics.tolerance.unsqueeze(-1)


def _worth(candidates: Candidates, seen: Tensor, least: float | Tensor) -> Tensor:
    """`[layers, kv_heads, n]`: how distinct a cell is; less than that of any if it is a repeat."""
    distinct = unlikeness(seen) + unlikeness(candidates.cells.keys.float())
    directions = F.normalize(seen, dim=-1).bfloat16()
    likeness = directions @ directions.transpose(-1, -2)
    repeated = likeness.tril_(-1).amax(-1).float() > least
    return distinct - REPEATED * repeated


def _as_seen(candidates: Candidates) -> Tensor:
    """`[layers, kv_heads, n, head_dim]`: unrotated keys whose distance is what queries see."""
    known = candidates.statistics
    if known is None:
        return candidates.unrotated
    seen: Tensor = candidates.unrotated @ known.emphasis
    return seen


def _joining(seen: Tensor, kept: Tensor, least: float | Tensor) -> tuple[Tensor, Tensor]:
    """For each cell: which of the kept it is most like, and 1 if it joins it, else 0."""
    directions = F.normalize(seen, dim=-1).bfloat16()
    rows = kept.unsqueeze(-1).expand(-1, -1, -1, seen.shape[-1])
    likeness, into = (directions @ directions.gather(2, rows).transpose(-1, -2)).max(-1)
    joins = (likeness.float() > least).float()
    return into, joins.scatter_(2, kept, 0.0)


def _mixed(
    candidates: Candidates, cells: Cells, into: Tensor, masses: Tensor, own: Tensor
) -> Tensor:
    """Values as the means of all that each cell stands for."""
    values = candidates.cells.values.float()
    rows = into.unsqueeze(-1).expand_as(values)
    total = cells.values.float() * own.unsqueeze(-1)
    total.scatter_add_(2, rows, values * masses.unsqueeze(-1))
    weight = own.scatter_add(2, into, masses)
    return (total / weight.unsqueeze(-1)).to(cells.values.dtype)

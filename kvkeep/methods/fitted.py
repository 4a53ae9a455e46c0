"""Method `fitted`: what is distinct stays as it is; what is alike lives on in it."""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from kvkeep.cache import Cells
from kvkeep.methods.attended import attention
from kvkeep.methods.base import Candidates, Compressed, Method, best
from kvkeep.methods.keydiff import unlikeness
from kvkeep.methods.statistics import Statistics

ALIKE = 0.9  # the least cosine of keys that are taken for one
EMPHASIS = 0.25  # power of the queries' second moment; 0 does without, 0.5 is their own measure
EVERY = 4  # one query of so many is asked
MASS = 0.5  # how much of the log of a count goes into the bias


class Fitted(Method):
    """Dominant keys, with the mass and the values of what resembles them.

    Keys are compared before rotation, so that the same word said again is the same, wherever it
    stands. The keys least like the mean direction, before rotation and after it, are dominant and
    stay as they are: no average blurs a key that stands out. Another cell joins the dominant that
    it is most like if it is alike enough: its value goes into a mean there, and its mass into a
    bias on the logit. What is like none of them is forgotten.

    Where queries are observed, as in an archive, what they attend to most stays as well: what a
    text comes back to it goes on with. A question not yet asked is no such query, and is answered
    from what is distinct.

    With statistics, keys are compared as queries see them (differences are weighted by a power of
    the queries' second moment), and each KV head has the likeness that its merges tolerate.
    """

    name: ClassVar[str] = "fitted"
    observes: ClassVar[bool] = True

    def needs_queries(self, statistics: Statistics | None) -> bool:
        return False

    def __init__(self, alike: float | None = None):
        """alike: the least cosine of keys to be merged, whatever statistics say."""
        self._alike = alike

    def compress(self, candidates: Candidates, count: int) -> Compressed:
        seen = _as_seen(candidates)
        kept = best(_worth(candidates, seen), count)
        cells = candidates.taken(kept)
        into, joins = _joining(seen, kept, self._least_likeness(candidates))
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


def _worth(candidates: Candidates, seen: Tensor) -> Tensor:
    """`[layers, kv_heads, n]`: the greater of how distinct and how much attended a cell is."""
    distinct = unlikeness(seen) + unlikeness(candidates.cells.keys.float())
    if candidates.queries is None:
        return distinct
    some = candidates.queries.every(EVERY)
    attended = attention(candidates, some).mean(2)
    return torch.maximum(_standardised(distinct), _standardised(attended))


def _standardised(x: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True).clamp(min=1e-6)


def _as_seen(candidates: Candidates) -> Tensor:
    """`[layers, kv_heads, n, head_dim]`: unrotated keys whose distance is what queries see."""
    known = candidates.statistics
    if known is None:
        return candidates.unrotated
    values, vectors = torch.linalg.eigh(known.moment)
    root = vectors * values.clamp(min=0).pow(EMPHASIS).unsqueeze(-2)
    seen: Tensor = candidates.unrotated @ root
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

"""Method `fitted`: what is distinct stays as it is; what is alike lives on in it."""

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from kvkeep.cache import Cells
from kvkeep.methods.base import Candidates, Compressed, Method, rows
from kvkeep.methods.keydiff import inverse_lengths, unlikeness

ALIKE = 0.9  # the least cosine of keys that are taken for one
AGE = 0.6  # what a cell is worth less for each doubling of its age, where cells age
BLOCK = 256  # cells compared with all older ones at a time
FADING = 0.9  # what is left of a bias each time, where cells age
LAYERS = 10  # whose pairs of cells are compared at a time
MASS = 0.5  # how much of the log of a count goes into the bias
REPEATED = 4.0  # what a repeat is worth less; distinctness lies within -2 and 2
YOUNG = 32  # positions


class Fitted(Method):
    """Dominant keys, with the mass and the values of what resembles them.

    Keys are compared before rotation, so that the same word said again is the same, wherever it
    stands. Of cells that say the same, the first counts; of these, the ones least like the mean
    direction, before rotation and after it, are dominant and stay as they are: no average blurs a
    key that stands out. Another cell joins the dominant that it is most like if it is alike enough:
    its value goes into a mean there, and its mass into a bias on the logit. What is like none of
    them is forgotten.

    In an archive, cells are worth less the older they are, and their mass fades: otherwise it fills
    up with what was distinct long ago, and what has been said a thousand times drowns the rest.

    With statistics, keys are compared as queries see them (differences are weighted by a power of
    the queries' second moment), and each KV head has the likeness that its merges tolerate.
    """

    name: ClassVar[str] = "fitted"

    def __init__(self, alike: float | None = None):
        """alike: the least cosine of keys to be merged, whatever statistics say."""
        self._alike = alike

    def compress(self, candidates: Candidates, count: int) -> Compressed:
        least = self._least_likeness(candidates)
        lengths = inverse_lengths(candidates.keys)  # rotation does not change them
        seen, shortened = _as_seen(candidates, lengths)
        directions = (seen * shortened.unsqueeze(-1)).bfloat16()
        distinct = unlikeness(seen, shortened) + unlikeness(candidates.keys, lengths)
        if candidates.ageing:
            distinct -= AGE * torch.log2(candidates.age / YOUNG + 1)
        worth = distinct - REPEATED * _by_layers(_repeats, directions, least)[0]
        order = worth.argsort(-1, descending=True)
        kept, left = order[..., :count].sort(-1).values, order[..., count:]
        into, joins = _by_layers(_joining, directions, least, kept, left)
        return _merged(candidates, kept, left, into, joins)

    def _least_likeness(self, candidates: Candidates) -> Tensor:
        """`[layers, kv_heads, 1]`."""
        if candidates.statistics is not None and self._alike is None:
            return candidates.statistics.tolerance.unsqueeze(-1)
        return torch.full((*candidates.shape[:2], 1), self._alike or ALIKE)


def _as_seen(candidates: Candidates, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Unrotated keys, whose distance is what queries see, and their inverse lengths."""
    known = candidates.statistics
    if known is None:
        return candidates.unrotated, lengths
    seen: Tensor = candidates.unrotated @ known.emphasis
    return seen, inverse_lengths(seen)


def _by_layers(work: Callable[..., tuple[Tensor, ...]], *given: Tensor) -> list[Tensor]:
    """Work on a few layers at a time: matrices of all pairs of cells then stay in the caches."""
    parts = [
        work(*(tensor[first : first + LAYERS] for tensor in given))
        for first in range(0, given[0].shape[0], LAYERS)
    ]
    return [torch.cat(found) for found in zip(*parts, strict=True)]


def _repeats(directions: Tensor, least: Tensor) -> tuple[Tensor]:
    """1 for each cell that says what an older one says, else 0."""
    found, count = [], directions.shape[2]
    for first in range(0, count, BLOCK):  # what is younger need not be looked at
        upto = min(first + BLOCK, count)
        likeness = directions[:, :, first:upto] @ directions[:, :, :upto].transpose(-1, -2)
        found.append(likeness.tril_(first - 1).amax(-1))
    return ((torch.cat(found, -1) > least).float(),)


def _joining(
    directions: Tensor, least: Tensor, kept: Tensor, left: Tensor
) -> tuple[Tensor, Tensor]:
    """For each cell that is left over: which of the kept it is most like, and 1 if it joins it."""
    if not left.shape[-1]:
        return left, left.float()
    likeness, into = (rows(directions, left) @ rows(directions, kept).transpose(-1, -2)).max(-1)
    return into, (likeness > least).float()


def _merged(
    candidates: Candidates, kept: Tensor, left: Tensor, into: Tensor, joins: Tensor
) -> Compressed:
    """The kept cells, with the mass and the mean value of all that joined them."""
    cells = candidates.taken(kept)
    mass = (candidates.bias / MASS).exp()
    own, masses = mass.gather(2, kept), joins * mass.gather(2, left)
    total = own.scatter_add(2, into, masses)
    values = rows(candidates.cells.values, left).float() * masses.unsqueeze(-1)
    mixed = cells.values.float() * own.unsqueeze(-1)
    mixed.scatter_add_(2, into.unsqueeze(-1).expand_as(values), values)
    mixed /= total.unsqueeze(-1)
    bias = MASS * total.log() * (FADING if candidates.ageing else 1)
    values = mixed.to(cells.values.dtype)
    return Compressed(
        Cells(cells.keys, values, cells.positions, cells.serials, bias),
        merged=float(joins.sum(-1).mean()),
    )

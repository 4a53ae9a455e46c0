"""Method `fitted`: what is distinct stays as it is; what is alike lives on in it."""

from typing import ClassVar

import torch
from torch import Tensor

from kvkeep.cache import Cells
from kvkeep.compression.methods.base import Candidates, Compressed, Method, rows
from kvkeep.compression.methods.keydiff import inverse_lengths, unlikeness
from kvkeep.compression.methods.similarity import most_similar, most_similar_older

SIMILAR = 0.9  # the least cosine of keys that are taken for one
AGE = 0.6  # what a cell is worth less for each doubling of its age, where cells age
FADING = 0.9  # what is left of a bias each time, where cells age
LAYERS = 5  # compressed at a time: what is in work then stays in the processor's caches
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

    def __init__(self, similar: float | None = None):
        """similar: the least cosine of keys to be merged, whatever statistics say."""
        self._similar = similar

    def compress(self, candidates: Candidates, count: int) -> Compressed:
        threshold, emphasis = self._likeness_threshold(candidates), None
        if candidates.statistics is not None:
            emphasis = candidates.statistics.emphasis
        worn = torch.zeros_like(candidates.bias)
        if candidates.ageing:
            worn += AGE * torch.log2(candidates.age / YOUNG + 1)
        parts = []
        for first in range(0, candidates.shape[0], LAYERS):
            some = slice(first, first + LAYERS)
            seen_by = None if emphasis is None else emphasis[some]
            parts.append(
                _fitted(candidates.layers(some), count, threshold[some], worn[some], seen_by)
            )
        return _stacked(parts)

    def _likeness_threshold(self, candidates: Candidates) -> Tensor:
        """`[layers, kv_heads, 1]`."""
        if candidates.statistics is not None and self._similar is None:
            return candidates.statistics.tolerance.unsqueeze(-1)
        threshold, shape = self._similar or SIMILAR, (*candidates.shape[:2], 1)
        return torch.full(
            shape, threshold, dtype=torch.float32, device=candidates.cells.keys.device
        )


def _fitted(
    candidates: Candidates, count: int, threshold: Tensor, worn: Tensor, emphasis: Tensor | None
) -> Compressed:
    """worn: what each cell is worth less. emphasis: the metric of queries, where it is known."""
    lengths = inverse_lengths(candidates.keys)  # rotation does not change them
    seen, shortened = candidates.unrotated, lengths
    if emphasis is not None:
        seen = seen @ emphasis
        shortened = inverse_lengths(seen)
    directions = (seen * shortened.unsqueeze(-1)).bfloat16()
    distinct = unlikeness(seen, shortened) + unlikeness(candidates.keys, lengths)
    repeats = most_similar_older(directions) > threshold
    worth = distinct - worn - REPEATED * repeats.float()
    kept, left = _divided(worth, count)
    into, joins = _joining(directions, threshold, kept, left)
    return _merged(candidates, kept, left, into, joins)


def _stacked(parts: list[Compressed]) -> Compressed:
    """What became of the cells in some layers after what became of them in those before."""
    cells = [part.cells for part in parts]
    return Compressed(
        Cells(
            torch.cat([each.keys for each in cells]),
            torch.cat([each.values for each in cells]),
            torch.cat([each.positions for each in cells]),
            cells[0].serials,
            torch.cat([each.bias for each in cells if each.bias is not None]),
        ),
        merged=sum(part.merged * len(part.cells.keys) for part in parts)
        / sum(len(part.cells.keys) for part in parts),
    )


def _divided(worth: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Which cells have the highest worth, and which are left over, both in their order."""
    stays = torch.zeros_like(worth, dtype=torch.bool)
    stays.scatter_(-1, worth.topk(count, sorted=False).indices, True)
    layers, kv_heads, total = worth.shape
    kept = stays.nonzero()[:, -1].view(layers, kv_heads, count)
    return kept, (~stays).nonzero()[:, -1].view(layers, kv_heads, total - count)


def _joining(
    directions: Tensor, threshold: Tensor, kept: Tensor, left: Tensor
) -> tuple[Tensor, Tensor]:
    """For each cell that is left over: which of the kept it is most like, and 1 if it joins it."""
    if not left.shape[-1]:
        return left, left.float()
    likeness, into = most_similar(rows(directions, left), rows(directions, kept))
    return into, (likeness > threshold).float()


def _merged(
    candidates: Candidates, kept: Tensor, left: Tensor, into: Tensor, joins: Tensor
) -> Compressed:
    """The kept cells, with the mass and the mean value of all that joined them."""
    cells = candidates.taken(kept)
    mass = (candidates.bias / MASS).exp()
    own, masses = mass.gather(2, kept), joins * mass.gather(2, left)
    total = own.scatter_add(2, into, masses)
    values = rows(candidates.cells.values, left).float() * masses.unsqueeze(-1)
    means = cells.values.float() * own.unsqueeze(-1)
    means.scatter_add_(2, into.unsqueeze(-1).expand_as(values), values)
    means /= total.unsqueeze(-1)
    bias = MASS * total.log() * (FADING if candidates.ageing else 1)
    values = means.to(cells.values.dtype)
    return Compressed(
        Cells(cells.keys, values, cells.positions, cells.serials, bias),
        merged=float(joins.sum(-1).mean()),
    )

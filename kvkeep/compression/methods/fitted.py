"""Method `fitted`: keeps distinct keys unchanged and merges similar cells into them."""

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from kvkeep.cache import Cells
from kvkeep.compression.methods.base import Candidates, CompressionResult, Method, gather_rows
from kvkeep.compression.methods.baselines import dissimilarity, inverse_norms
from kvkeep.compression.methods.similarity import most_similar, most_similar_older

MIN_COSINE = 0.9  # of keys that are merged
AGE_PENALTY = 0.6  # subtracted from a score for each doubling of age, if cells age
BIAS_DECAY = 0.9  # factor on the bias in each compression, if cells age
LAYERS_AT_ONCE = 5  # so that intermediate results stay in the CPU caches
MASS_EXPONENT = 0.5  # a cell that stands for m cells has a bias of MASS_EXPONENT * log(m)
REPEAT_PENALTY = 4.0  # subtracted from a repeat's score; dissimilarity lies within -2 and 2


class Fitted(Method):
    """Keeps distinct keys, with the mass and the mean value of the cells that resemble them.

    Keys are compared before rotation, so that a repeated word has the same key at any position.
    The cells least similar to the mean direction, before and after rotation, are dominant and keep
    their keys, so that no average blurs a distinct key; of similar cells only the first can be
    dominant. Each other cell joins its most similar dominant cell if their cosine is above a
    threshold: its value goes into a mean, and its mass into a bias on the logit. If there is no
    similar dominant cell, it is evicted.

    In an archive, scores fall with age and the bias decays: otherwise it would fill up with cells
    that were distinct long ago, and what was repeated a thousand times would drown the rest.

    With statistics, keys are compared after multiplication with `Statistics.metric`, and each KV
    head has its own threshold.
    """

    name: ClassVar[str] = "fitted"

    def __init__(self, min_cosine: float | None = None):
        """min_cosine: the least cosine of keys that are merged; overrides that of statistics."""
        self._min_cosine = min_cosine

    def compress(self, candidates: Candidates, count: int) -> CompressionResult:
        min_cosine, statistics = self._min_cosine_of(candidates), candidates.statistics
        metric = None if statistics is None else statistics.metric.to(candidates.bias.device)
        age_penalty = torch.zeros_like(candidates.bias)
        if candidates.ageing:
            age_penalty += AGE_PENALTY * candidates.age_doublings
        parts = []
        for first_layer in range(0, candidates.shape[0], LAYERS_AT_ONCE):
            layers = slice(first_layer, first_layer + LAYERS_AT_ONCE)
            part = candidates.layers(first_layer, first_layer + LAYERS_AT_ONCE)
            part_metric = None if metric is None else metric[layers]
            penalty, cosine = age_penalty[layers], min_cosine[layers]
            parts.append(_compress_layers(part, count, cosine, penalty, part_metric))
        return _stack_layers(parts)

    def _min_cosine_of(self, candidates: Candidates) -> Tensor:
        """Return the least cosine of merged keys, `[layers, kv_heads, 1]`."""
        if candidates.statistics is not None and self._min_cosine is None:
            return candidates.statistics.min_cosine.to(candidates.bias.device).unsqueeze(-1)
        return candidates.bias.new_full((*candidates.shape[:2], 1), self._min_cosine or MIN_COSINE)


def _compress_layers(
    candidates: Candidates, count: int, min_cosine: Tensor, penalty: Tensor, metric: Tensor | None
) -> CompressionResult:
    """Compress some layers. penalty: subtracted from scores. metric: see `Statistics.metric`."""
    rotated_inverse_norms = inverse_norms(candidates.keys)  # unrotated keys have the same
    keys, key_inverse_norms = candidates.unrotated_keys, rotated_inverse_norms
    if metric is not None:
        keys = keys @ metric
        key_inverse_norms = inverse_norms(keys)
    directions = (keys * key_inverse_norms.unsqueeze(-1)).bfloat16()
    rotated_distinctness = dissimilarity(candidates.keys, rotated_inverse_norms)
    distinctness = dissimilarity(keys, key_inverse_norms) + rotated_distinctness
    is_repeat = most_similar_older(directions) > min_cosine
    scores = distinctness - penalty - REPEAT_PENALTY * is_repeat.float()
    dominant, others = _split_by_score(scores, count)
    targets, joins = others, others.float()  # both empty if all cells are dominant
    if others.shape[-1]:
        other_directions = gather_rows(directions, others)
        cosines, targets = most_similar(other_directions, gather_rows(directions, dominant))
        joins = (cosines > min_cosine).float()
    return _merge_into_dominant(candidates, dominant, others, targets, joins)


def _stack_layers(parts: list[CompressionResult]) -> CompressionResult:
    """Concatenate results of successive layers."""
    cells = [part.cells for part in parts]
    keys, values, positions, bias = (
        torch.cat([getattr(layer_cells, name) for layer_cells in cells])
        for name in ("keys", "values", "positions", "bias")
    )
    merged = sum(part.merged * len(part.cells.keys) for part in parts) / len(keys)
    return CompressionResult(Cells(keys, values, positions, cells[0].serials, bias), merged)


def _split_by_score(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the indices of the `count` highest scores and of the others, both ascending."""
    is_dominant = torch.zeros_like(scores, dtype=torch.bool)
    is_dominant.scatter_(-1, scores.topk(count, sorted=False).indices, True)
    layers, kv_heads, total = scores.shape
    dominant = is_dominant.nonzero()[:, -1].view(layers, kv_heads, count)
    return dominant, (~is_dominant).nonzero()[:, -1].view(layers, kv_heads, total - count)


def _merge_into_dominant(
    candidates: Candidates, dominant: Tensor, others: Tensor, targets: Tensor, joins: Tensor
) -> CompressionResult:
    """Return the dominant cells, with the mass and mean value of all cells that join them.

    dominant, others: indices of cells, `[layers, kv_heads, ...]`. targets: for each other cell, the
    index of the most similar dominant one among these. joins: 1 if it joins that one, else 0.
    """
    cells = candidates.select(dominant)
    mass = (candidates.bias / MASS_EXPONENT).exp()
    dominant_mass, joined_mass = mass.gather(2, dominant), joins * mass.gather(2, others)
    total_mass = dominant_mass.scatter_add(2, targets, joined_mass)
    joined_values = gather_rows(candidates.cells.values, others).float() * joined_mass.unsqueeze(-1)
    means = cells.values.float() * dominant_mass.unsqueeze(-1)
    means.scatter_add_(2, targets.unsqueeze(-1).expand_as(joined_values), joined_values)
    means /= total_mass.unsqueeze(-1)
    bias = MASS_EXPONENT * total_mass.log() * (BIAS_DECAY if candidates.ageing else 1)
    remaining = replace(cells, stored_values=means.to(cells.values.dtype), bias=bias)
    return CompressionResult(remaining, merged=float(joins.sum(-1).mean()))

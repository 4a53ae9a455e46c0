"""Statistics of a model that compression methods use, measured once by a calibration."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

POWER = 0.25  # of the second moment in `Statistics.metric`


@dataclass(frozen=True)
class Surrogate:
    """A linear predictor of reconstruction scores for each layer and KV head; float32.

    KVzap (arXiv:2601.07891) predicts from hidden states, which are gone once a token is evaluated.
    A cell's key before rotation and its value predict as well, and last as long as the cell.

    key, value: `[layers, kv_heads, head_dim]`. constant: `[layers, kv_heads]`.
    """

    key: Tensor
    value: Tensor
    constant: Tensor

    def score(self, keys: Tensor, values: Tensor, owners: Tensor | None = None) -> Tensor:
        """Return the predicted log of each cell's attention weight, `[layers, kv_heads, n]`.

        keys: before rotation, and values: `[layers, kv_heads, n, head_dim]`. For ragged cells
        `[total, head_dim]`, with owners: the index of each cell's layer and KV head; the result is
        `[total]` then.
        """
        key, value, constant = (x.to(keys.device) for x in (self.key, self.value, self.constant))
        if owners is not None:
            key, value = key.flatten(0, 1)[owners], value.flatten(0, 1)[owners]
            score = (keys.float() * key).sum(-1) + (values.float() * value).sum(-1)
            return score + constant.flatten()[owners]
        score = keys.float() @ key.unsqueeze(-1) + values.float() @ value.unsqueeze(-1)
        return score.squeeze(-1) + constant.unsqueeze(-1)

    def part(self, layers: slice, heads: slice = slice(None)) -> "Surrogate":
        """Return the predictors of some layers and KV heads."""
        index = layers, heads
        return Surrogate(self.key[index], self.value[index], self.constant[index])

    @classmethod
    def from_weights(cls, weights: Tensor) -> "Surrogate":
        """Return the predictor with weights of `features`: `[layers, kv_heads, 2 head_dim + 1]`."""
        head_dim, weights = weights.shape[-1] // 2, weights.float()
        key, value = weights[..., :head_dim], weights[..., head_dim:-1]
        return cls(key.contiguous(), value.contiguous(), weights[..., -1].contiguous())


def features(keys: Tensor, values: Tensor) -> Tensor:
    """Return key, value and 1 of each cell, `[..., n, 2 head_dim + 1]` float64.

    keys: before rotation, and values: `[..., n, head_dim]`.
    """
    ones = torch.ones(*keys.shape[:-1], 1, dtype=torch.float64, device=keys.device)
    return torch.cat((keys.double(), values.double(), ones), -1)


@dataclass(frozen=True)
class Statistics:
    """Statistics of a model's queries before rotation, float32.

    For each KV head over all query heads that share it.

    Attributes:
        mean: `[layers, kv_heads, head_dim]`.
        moment: `[layers, kv_heads, head_dim, head_dim]`, the mean of q q^T.
        tolerance: `[layers, kv_heads]`, the least cosine of keys that can be merged without harm to
            attention output.
        surrogate: None in a calibration of an earlier kvkeep.
    """

    mean: Tensor
    moment: Tensor
    tolerance: Tensor
    surrogate: Surrogate | None = None

    def head(self, layer: int, head: int) -> "Statistics":
        """Return the statistics of one KV head, of shape `[1, 1, ...]`."""
        index = slice(layer, layer + 1), slice(head, head + 1)
        surrogate = None if self.surrogate is None else self.surrogate.part(*index)
        return Statistics(self.mean[index], self.moment[index], self.tolerance[index], surrogate)

    @cached_property
    def metric(self) -> Tensor:
        """`[layers, kv_heads, head_dim, head_dim]`: keys times it differ as queries see them.

        A power of the moment: at 0.5, which is what a query measures itself, the few directions in
        which queries are strongest would decide alone; at 0 no query would count. In between, text
        is predicted best from the remaining cells.
        """
        values, vectors = torch.linalg.eigh(self.moment)
        metric: Tensor = vectors * values.clamp(min=0).pow(POWER).unsqueeze(-2)
        return metric

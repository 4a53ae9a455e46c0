"""Statistics of a model that compression methods use, measured once by a calibration."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

METRIC_POWER = 0.25  # to which `metric` raises the second moment


@dataclass(frozen=True)
class Surrogate:
    """A linear predictor of each cell's reconstruction score: the log of its attention weight.

    KVzap (arXiv:2601.07891) predicts from hidden states, which are gone once a token is evaluated.
    A cell's key before rotation and its value predict as well, and last as long as the cell.

    key_weights, value_weights: `[layers, kv_heads, head_dim]` float32. constant: `[layers,
    kv_heads]` float32.
    """

    key_weights: Tensor
    value_weights: Tensor
    constant: Tensor

    def score(self, keys: Tensor, values: Tensor, head_indices: Tensor | None = None) -> Tensor:
        """Return the predicted score of each cell, `[layers, kv_heads, n]`; `[total]` if ragged.

        keys (before rotation), values: `[layers, kv_heads, n, head_dim]`; `[total, head_dim]` of
        ragged cells. head_indices: `[total]`, the index of each ragged cell's layer and KV head.
        """
        parameters = (self.key_weights, self.value_weights, self.constant)
        key_weights, value_weights, constant = (tensor.to(keys.device) for tensor in parameters)
        if head_indices is not None:
            key_terms = (keys.float() * key_weights.flatten(0, 1)[head_indices]).sum(-1)
            value_terms = (values.float() * value_weights.flatten(0, 1)[head_indices]).sum(-1)
            return key_terms + value_terms + constant.flatten()[head_indices]
        key_terms = keys.float() @ key_weights.unsqueeze(-1)
        value_terms = values.float() @ value_weights.unsqueeze(-1)
        return (key_terms + value_terms).squeeze(-1) + constant.unsqueeze(-1)

    def select(self, layers: slice, heads: slice = slice(None)) -> "Surrogate":
        """Select some layers and KV heads."""
        index = layers, heads
        return Surrogate(self.key_weights[index], self.value_weights[index], self.constant[index])

    @classmethod
    def from_weights(cls, weights: Tensor) -> "Surrogate":
        """Split weights of what `features` returns, `[layers, kv_heads, 2 head_dim + 1]`."""
        head_dim, weights = weights.shape[-1] // 2, weights.float()
        key_weights, value_weights = weights[..., :head_dim], weights[..., head_dim:-1]
        constant = weights[..., -1]
        return cls(key_weights.contiguous(), value_weights.contiguous(), constant.contiguous())


def features(keys: Tensor, values: Tensor) -> Tensor:
    """Concatenate each cell's key, value and 1 to `[..., n, 2 head_dim + 1]` float64.

    keys (before rotation), values: `[..., n, head_dim]`.
    """
    ones = torch.ones(*keys.shape[:-1], 1, dtype=torch.float64, device=keys.device)
    return torch.cat((keys.double(), values.double(), ones), -1)


@dataclass(frozen=True)
class Statistics:
    """Statistics of queries before rotation, over all query heads that share a KV head; float32.

    Attributes:
        mean: `[layers, kv_heads, head_dim]`.
        moment: `[layers, kv_heads, head_dim, head_dim]`, the second: the mean of q q^T.
        min_cosine: `[layers, kv_heads]`, the least cosine of keys that can be merged without harm
            to attention output.
        surrogate: None in a calibration of an earlier kvkeep.
    """

    mean: Tensor
    moment: Tensor
    min_cosine: Tensor
    surrogate: Surrogate | None = None

    def head(self, layer: int, head: int) -> "Statistics":
        """Return the statistics of one KV head, of shape `[1, 1, ...]`."""
        index = slice(layer, layer + 1), slice(head, head + 1)
        surrogate = None if self.surrogate is None else self.surrogate.select(*index)
        return Statistics(self.mean[index], self.moment[index], self.min_cosine[index], surrogate)

    @cached_property
    def metric(self) -> Tensor:
        """`[layers, kv_heads, head_dim, head_dim]`: multiplies keys before they are compared.

        It weights the directions of keys by a power of the queries' second moment. A power of 0.5
        would give a query's own distances, in which a few strong directions decide alone; 0 would
        ignore queries. In between, the remaining cells predict text best.
        """
        eigenvalues, eigenvectors = torch.linalg.eigh(self.moment)
        scales = eigenvalues.clamp(min=0).pow(METRIC_POWER)
        metric: Tensor = eigenvectors * scales.unsqueeze(-2)
        return metric

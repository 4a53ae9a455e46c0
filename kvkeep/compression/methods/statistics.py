"""What a calibration knows of a model."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kvkeep.compression.methods.surrogate import Surrogate

POWER = 0.25  # of the second moment; 0 would do without it, 0.5 is what a query itself measures


@dataclass(frozen=True)
class Statistics:
    """Of queries before rotation, float32; each KV head's are those of all heads that share it.

    mean: `[layers, kv_heads, head_dim]`. moment: `[layers, kv_heads, head_dim, head_dim]`, the mean
    of q q^T. tolerance: `[layers, kv_heads]`, how alike (cosine) keys must be there to be merged
    without harm to what queries get. surrogate: what reconstruction is guessed by; None in a
    calibration of an earlier kvkeep.
    """

    mean: Tensor
    moment: Tensor
    tolerance: Tensor
    surrogate: Surrogate | None = None

    def head(self, layer: int, head: int) -> "Statistics":
        """What is known of one KV head, of shape `[1, 1, ...]`."""
        own = slice(layer, layer + 1), slice(head, head + 1)
        surrogate = None if self.surrogate is None else self.surrogate.head(layer, head)
        return Statistics(self.mean[own], self.moment[own], self.tolerance[own], surrogate)

    @cached_property
    def emphasis(self) -> Tensor:
        """`[layers, kv_heads, head_dim, head_dim]`: keys times it differ as queries see them.

        With the moment itself (power 0.5) the few directions that queries are strongest in decide
        alone; in between, text is foretold best from what is kept.
        """
        values, vectors = torch.linalg.eigh(self.moment)
        emphasis: Tensor = vectors * values.clamp(min=0).pow(POWER).unsqueeze(-2)
        return emphasis

"""An MLP's gate of which few numbers are left: those far above the mean (arXiv:2506.06644).

How far follows from a normal distribution, so that nothing is sorted: above 1.645 standard
deviations lie 5% of it, and a sparsity of 0.95 leaves these, less the bound.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import NormalDist

import torch.nn.functional as F
from torch import Tensor

from kvkeep.models.layers.experts import Experts, Mlp
from kvkeep.models.spec.model_spec import ModelSpec


@dataclass(frozen=True)
class SparseGate:
    """gate: `[intermediate_size, hidden_size]`. deviations: how many of them the bound is above
    the mean of a token's numbers.
    """

    gate: Callable[[Tensor], Tensor]
    deviations: float

    def __call__(self, x: Tensor) -> Tensor:
        """`[n, hidden_size]` to `[n, intermediate_size]`."""
        given = self.gate(x)
        wide = given.float()  # few numbers are left, and what they are hangs on the bound
        spread = wide.std(dim=-1, correction=0, keepdim=True)
        bound = wide.mean(dim=-1, keepdim=True) + self.deviations * spread
        return F.relu(wide - bound).to(given.dtype)


def with_sparse_gate(spec: ModelSpec, layer: int, mlp: Mlp | Experts) -> Mlp | Experts:
    """A layer's MLP as it is, or with a sparse gate where the model has one there."""
    sparsity = spec.activation_sparsity[layer] if spec.activation_sparsity else 0
    if not sparsity or isinstance(mlp, Experts):
        return mlp
    return replace(mlp, gate=SparseGate(mlp.gate, NormalDist().inv_cdf(sparsity)))

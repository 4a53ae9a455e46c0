"""Numbers of a forward that are none: found before anything is taken in."""

import math

import torch
from torch import Tensor

from kvkeep.errors import NonFiniteLogits


def require_finite(x: Tensor) -> None:
    """Raises NonFiniteLogits where hidden states or logits hold NaN or infinity."""
    total = float(x.numpy().sum()) if x.dtype is torch.float32 and x.is_cpu else float(x.sum())
    if not math.isfinite(total):
        raise not_finite()


def checked(x: Tensor) -> Tensor:
    """Itself, where `require_finite` has nothing against it."""
    require_finite(x)
    return x


def not_finite() -> NonFiniteLogits:
    return NonFiniteLogits(
        "the model produced NaN or infinity: its weights are broken, or need "
        'dtype="float32"; the tokens of this step were not taken in'
    )

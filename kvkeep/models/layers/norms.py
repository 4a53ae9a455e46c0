"""RMSNorm and LayerNorm."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from kvkeep.models.spec.model_spec import ModelSpec


@dataclass(frozen=True)
class Norm:
    """RMSNorm (arXiv:1910.07467) over the last dimension; weight: `[width]`.

    It is computed in the dtype of the weight, and given in that of what it norms.

    centred: the mean is taken off first, which makes it LayerNorm (arXiv:1607.06450).
    """

    weight: Tensor
    eps: float
    centred: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        if self.centred:
            return F.layer_norm(x, self.weight.shape, self.weight, None, self.eps)
        wide = x.to(self.weight.dtype)
        return F.rms_norm(wide, self.weight.shape, self.weight, self.eps).to(x.dtype)


def norm_of(spec: ModelSpec, weight: Tensor) -> Norm:
    """weight: as it is stored."""
    whole = 1 + weight.float() if spec.unit_norms else weight
    return Norm(whole, spec.norm_eps, spec.centred_norms)

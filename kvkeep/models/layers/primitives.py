"""Matrix products, norms and the check for non-finite numbers, which all layers share.

PyTorch's CPU library compiles a matrix product anew for each number of rows, and keeps every
compiled product, so that each turn of a chat with a new length would add memory. So `Linear` pads
its rows with zeros to the next of a few sizes. More sizes would waste fewer rows and keep more
products (docs/speed.md).

The last bits of a row may depend on the number of rows in its product, never on the contents of
the other rows. So they depend on the number of tokens in the step only, and a replay gives the
same bits.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kvkeep.errors import NonFiniteLogits
from kvkeep.models.spec.model_spec import ModelSpec

# (most rows, multiple): up to so many rows, the row count is rounded up to this multiple.
_ROW_MULTIPLES = ((32, 4), (96, 8), (256, 16), (512, 32))
_MULTIPLE_BEYOND = 128


@dataclass(frozen=True)
class Linear:
    """A linear layer. weight: `[out, in]`, bias: `[out]` or None."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """Map `[n, in]` to `[n, out]`."""
        n = x.shape[0]
        padding = padded_rows(n) - n
        if not padding:
            return F.linear(x, self.weight, self.bias)
        return F.linear(F.pad(x, (0, 0, 0, padding)), self.weight, self.bias)[:n]

    def take_rows(self, indices: Tensor) -> Tensor:
        """Return rows of the weight, `[n, in]`. indices: `[n]` int64."""
        return F.embedding(indices, self.weight)


def padded_rows(n: int) -> int:
    """Return the row count that a product of `n` rows is padded to: one of 35 values up to 512."""
    if n == 1:
        return 1
    multiple = next((multiple for most, multiple in _ROW_MULTIPLES if n <= most), _MULTIPLE_BEYOND)
    return -(-n // multiple) * multiple


@dataclass(frozen=True)
class Norm:
    """RMSNorm (arXiv:1910.07467) over the last dimension; weight: `[width]`.

    Computed in the dtype of the weight, returned in the dtype of the input.

    centred: subtract the mean first, which makes it LayerNorm (arXiv:1607.06450).
    """

    weight: Tensor
    eps: float
    centred: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        if self.centred:
            return F.layer_norm(x, self.weight.shape, self.weight, None, self.eps)
        wide = x.to(self.weight.dtype)
        return F.rms_norm(wide, self.weight.shape, self.weight, self.eps).to(x.dtype)


def make_norm(spec: ModelSpec, weight: Tensor) -> Norm:
    """Return the norm of a stored weight, which is the factor less 1 in some families."""
    factor = 1 + weight.float() if spec.unit_norms else weight
    return Norm(factor, spec.norm_eps, spec.centred_norms)


def require_finite(x: Tensor) -> None:
    """Raise NonFiniteLogits if hidden states or logits hold NaN or infinity."""
    total = float(x.numpy().sum()) if x.dtype is torch.float32 and x.is_cpu else float(x.sum())
    if not math.isfinite(total):
        raise non_finite_error()


def finite(x: Tensor) -> Tensor:
    """Return x after `require_finite(x)`."""
    require_finite(x)
    return x


def non_finite_error() -> NonFiniteLogits:
    return NonFiniteLogits(
        "the model produced NaN or infinity: its weights are broken, or need "
        'dtype="float32"; the tokens of this step were not taken in'
    )

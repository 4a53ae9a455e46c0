"""Matrix products, norms, weights by name, and the check for non-finite numbers.

PyTorch's CPU library compiles a matrix product anew for each number of rows, and keeps every
compiled product, so that each turn of a chat with a new length would add memory. So `Linear` pads
its rows with zeros to the next of a few sizes (docs/speed.md).

The last bits of a row may depend on the number of rows in its product, never on the contents of
the other rows. So they depend on the number of tokens in the step only, and a replay gives the
same bits.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kvkeep.errors import NonFiniteLogits
from kvkeep.models.spec.model_spec import ModelSpec

EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"
FINAL_NORM = "model.norm.weight"  # in every model, so its dtype and device are those of all weights
# (most rows, multiple): up to so many rows, the row count is rounded up to this multiple.
_ROW_MULTIPLES = ((32, 4), (96, 8), (256, 16), (512, 32))
_LARGEST_MULTIPLE = 128
# Stands for any weight: without elements, since a config may state any size. Not on "meta": there
# arithmetic imports torch._dynamo, 70 MB and most of a second.
_NO_WEIGHT = torch.empty(0, dtype=torch.float32, device="cpu")


class WeightMatrix(Protocol):
    """A matrix to multiply by, in whatever form it is stored: a `Linear` or packed weights."""

    def __call__(self, x: Tensor) -> Tensor:
        """Map `[n, in]` to `[n, out]`."""

    def take_rows(self, indices: Tensor) -> Tensor:
        """Return rows of the matrix, `[n, in]`. indices: `[n]` int64."""


@dataclass(frozen=True)
class Linear:
    """A linear layer. weight: `[out, in]`, bias: `[out]` or None."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        n = x.shape[0]
        padding = padded_row_count(n) - n
        if not padding:
            return F.linear(x, self.weight, self.bias)
        return F.linear(F.pad(x, (0, 0, 0, padding)), self.weight, self.bias)[:n]

    def take_rows(self, indices: Tensor) -> Tensor:
        return F.embedding(indices, self.weight)


def multiply(x: Tensor, multiplier: float) -> Tensor:
    return x if multiplier == 1 else x * multiplier


def padded_row_count(n: int) -> int:
    """Return to how many rows a product of `n` rows is padded: one of 35 numbers up to 512."""
    if n == 1:
        return 1
    multiple = next(
        (multiple for limit, multiple in _ROW_MULTIPLES if n <= limit), _LARGEST_MULTIPLE
    )
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
        x_cast = x.to(self.weight.dtype)
        return F.rms_norm(x_cast, self.weight.shape, self.weight, self.eps).to(x.dtype)


@dataclass(frozen=True)
class NamedWeights:
    """A model's weights by Hugging Face name, or one layer's by what follows its prefix.

    Modules state the shape of each tensor that they take; `tensor_shapes` collects them.

    Attributes:
        tensors: all of one dtype and on one device.
        matrices: matrices that are not stored as tensors.
        prefix: put before each name.
    """

    spec: ModelSpec
    tensors: Mapping[str, Tensor]
    matrices: Mapping[str, WeightMatrix] = field(default_factory=dict)
    prefix: str = ""

    def for_layer(self, index: int) -> "NamedWeights":
        return replace(self, prefix=f"model.layers.{index}.")

    def tensor(self, name: str, *shape: int) -> Tensor:
        """Return a tensor. shape: what the module expects; only `DeclaredTensors` uses it."""
        return self.tensors[self.prefix + name]

    def matrix(self, name: str, rows: int, columns: int, bias: bool = False) -> WeightMatrix:
        matrix = self.matrices.get(self.prefix + name)
        return self._linear(name, rows, columns, bias, None) if matrix is None else matrix

    def float32_linear(self, name: str, rows: int, columns: int, bias: bool = False) -> Linear:
        return self._linear(name, rows, columns, bias, torch.float32)

    def _linear(
        self, name: str, rows: int, columns: int, bias: bool, dtype: torch.dtype | None
    ) -> Linear:
        weight = self.tensor(name, rows, columns).to(dtype)
        bias_name = f"{name.removesuffix('weight')}bias"
        return Linear(weight, self.tensor(bias_name, rows).to(dtype) if bias else None)

    def norm(self, name: str, width: int, dtype: torch.dtype | None = None) -> Norm:
        """Return a norm computed in `dtype`, or else in that of the weight."""
        weight = self.tensor(name, width).to(dtype)
        if self.spec.unit_norms:  # stored less 1
            weight = 1 + weight.float()
        return Norm(weight, self.spec.norm_eps, self.spec.centred_norms)


@dataclass(frozen=True)
class DeclaredTensors(NamedWeights):
    """Records the shapes that modules state while they are built; has no weights."""

    tensors: Mapping[str, Tensor] = field(default_factory=lambda: {FINAL_NORM: _NO_WEIGHT})
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def tensor(self, name: str, *shape: int) -> Tensor:
        self.shapes[self.prefix + name] = shape
        return _NO_WEIGHT


def require_finite(x: Tensor) -> Tensor:
    """Return hidden states or logits. Raises NonFiniteLogits if they hold NaN or infinity."""
    # One such number makes the sum so.
    total = float(x.numpy().sum()) if x.dtype is torch.float32 and x.is_cpu else float(x.sum())
    if not math.isfinite(total):
        raise non_finite_error()
    return x


def non_finite_error() -> NonFiniteLogits:
    return NonFiniteLogits(
        'the model produced NaN or infinity: its weights are broken, or need dtype="float32"; this '
        "step was rolled back"
    )

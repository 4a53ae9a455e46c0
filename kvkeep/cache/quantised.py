"""Keys and values quantised to 8 or 4 bits.

A vector of head_dim numbers is first multiplied by a Hadamard matrix, which spreads outliers over
all numbers (QuaRot, arXiv:2404.00456; llama.cpp does so, too). The result is rounded: in 8 bits to
multiples of the vector's scale; in 4 bits to multiples of a scale above a minimum, both of which 32
numbers share.

The matrix is symmetric and its own inverse: a transformed query and a transformed key have the same
product as the original ones. So attention never transforms cells back.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

import torch
from torch import Tensor

GROUP_SIZE = 32  # numbers that share a scale and a minimum in 4 bits
SCALE_DTYPE = torch.bfloat16  # exact in every dtype that cells are dequantised to
_Index: TypeAlias = int | slice | Tensor | tuple[int | slice | None, ...] | None


@dataclass(frozen=True)
class QuantisedTensor:
    """Hadamard-transformed vectors `[..., head_dim]` in 8 or 4 bits.

    Indices apply to the dimensions before the last.

    data: in 8 bits int8 `[..., head_dim]`. In 4 bits uint8 `[..., head_dim / 2]`: number i in the
        lower half of byte i, number i + head_dim / 2 in the upper half.
    scale: in 8 bits `[..., 1]`: a number is `data x scale`. In 4 bits `[..., 2 x groups]`, the
        scales and then the minima of groups of equal length: a number is `data x scale + minimum`.
    """

    data: Tensor
    scale: Tensor

    @classmethod
    def zeros(cls, shape: Sequence[int], bits: int, device: torch.device) -> "QuantisedTensor":
        """Return zeros of the shape `[..., head_dim]`."""
        *leading, head_dim = shape
        dtype, width = (torch.int8, head_dim) if bits == 8 else (torch.uint8, head_dim // 2)
        scale_shape = (*leading, scale_count(head_dim, bits))
        data = torch.zeros(*leading, width, dtype=dtype, device=device)
        return cls(data, torch.zeros(scale_shape, dtype=SCALE_DTYPE, device=device))

    @property
    def bits(self) -> int:
        return 8 if self.data.dtype is torch.int8 else 4

    @property
    def shape(self) -> torch.Size:
        """The shape of the unquantised vectors, `[..., head_dim]`."""
        *leading, width = self.data.shape
        return torch.Size((*leading, width * 8 // self.bits))

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.scale.nbytes

    def __getitem__(self, index: _Index) -> "QuantisedTensor":
        return QuantisedTensor(self.data[index], self.scale[index])

    def unbind(self) -> "tuple[QuantisedTensor, ...]":
        """Split along the first dimension."""
        return tuple(map(QuantisedTensor, self.data.unbind(), self.scale.unbind()))

    def clone(self) -> "QuantisedTensor":
        return QuantisedTensor(self.data.clone(), self.scale.clone())

    def to(self, device: torch.device) -> "QuantisedTensor":
        return QuantisedTensor(self.data.to(device), self.scale.to(device))

    def dequantise_transformed(self, dtype: torch.dtype) -> Tensor:
        """Return the numbers, still Hadamard-transformed."""
        if self.bits == 8:
            return self.data.to(dtype).mul_(self.scale)
        nibbles = torch.cat((self.data & 15, self.data >> 4), -1)
        scale, minimum = self.scale.to(dtype).unsqueeze(-1).chunk(2, -2)
        numbers = nibbles.to(dtype).view(*scale.shape[:-1], -1)
        return torch.addcmul(minimum, numbers, scale).view(nibbles.shape)


KVTensor: TypeAlias = Tensor | QuantisedTensor


def quantise(x: Tensor, bits: int) -> QuantisedTensor:
    """Quantise `x: [..., head_dim]` to 8 or 4 bits.

    The error of a transformed number is at most half its scale, apart from the rounding of scale
    and minimum to bfloat16.
    """
    numbers = hadamard(x)
    if bits == 8:
        scale = (numbers.abs().amax(-1, keepdim=True) / 127).to(SCALE_DTYPE)
        scaled = numbers / scale.masked_fill(scale == 0, 1)
        return QuantisedTensor(scaled.round_().clamp_(-127, 127).to(torch.int8), scale)
    group_count = scale_count(x.shape[-1], bits) // 2
    groups = numbers.view(*x.shape[:-1], group_count, x.shape[-1] // group_count)
    minimum = groups.amin(-1, keepdim=True).to(SCALE_DTYPE)
    scale = ((groups.amax(-1, keepdim=True) - minimum).clamp_min_(0) / 15).to(SCALE_DTYPE)
    scaled = (groups - minimum) / scale.masked_fill(scale == 0, 1)
    low, high = scaled.round_().clamp_(0, 15).to(torch.uint8).flatten(-2).chunk(2, -1)
    return QuantisedTensor(low | high << 4, torch.cat((scale, minimum), -2).squeeze(-1))


def dequantise(stored: KVTensor, dtype: torch.dtype) -> Tensor:
    """Return unquantised numbers, `[..., head_dim]` in `dtype`."""
    if isinstance(stored, Tensor):
        return stored.to(dtype)
    return hadamard(stored.dequantise_transformed(torch.float32)).to(dtype)


def requantise(stored: KVTensor, bits: int, dtype: torch.dtype) -> KVTensor:
    """Return vectors in 8 or 4 bits, or for 16 in `dtype`; unchanged if they are already."""
    if isinstance(stored, QuantisedTensor) and stored.bits == bits:
        return stored
    if bits == 16:
        return dequantise(stored, dtype)
    return quantise(dequantise(stored, torch.float32), bits)


def copy_stored(target: KVTensor, source: KVTensor) -> None:
    """Copy `source` into `target` in place, converted to the target's bits or dtype."""
    if isinstance(target, Tensor):
        target.copy_(dequantise(source, target.dtype))
        return
    source = requantise(source, target.bits, torch.float32)
    for stored, converted in zip(stored_tensors(target), stored_tensors(source), strict=True):
        stored.copy_(converted)


def stored_tensors(stored: KVTensor) -> tuple[Tensor, ...]:
    """Return the tensors that hold keys or values: one, or data and scales."""
    return (stored,) if isinstance(stored, Tensor) else (stored.data, stored.scale)


def map_stored(function: Callable[..., Tensor], *stored: KVTensor) -> KVTensor:
    """Apply a function to keys or values: if quantised, to their data and to their scales."""
    results = [function(*parts) for parts in zip(*map(stored_tensors, stored), strict=True)]
    return results[0] if len(results) == 1 else QuantisedTensor(*results)


def scale_count(head_dim: int, bits: int) -> int:
    """Return how many scales a vector has, minima included."""
    return 1 if bits == 8 else 2 * (head_dim // math.gcd(head_dim, GROUP_SIZE))


def hadamard(x: Tensor) -> Tensor:
    """Multiply `x: [..., head_dim]` by the Hadamard matrix, its own inverse, in float32."""
    return x.float() @ _hadamard(x.shape[-1], x.device)


@cache
def _hadamard(size: int, device: torch.device) -> Tensor:
    """Return an orthonormal block-diagonal matrix of equal Sylvester-Hadamard blocks.

    A block's size is the largest power of two that divides `size`: 64 has one block, 96 three.
    """
    block = torch.ones(1, 1, dtype=torch.float32, device="cpu")
    while size % (2 * block.shape[0]) == 0:
        block = torch.cat((torch.cat((block, block), 1), torch.cat((block, -block), 1)))
    block = block / math.sqrt(block.shape[0])
    diagonal = torch.eye(size // block.shape[0], dtype=torch.float32, device="cpu")
    return torch.kron(diagonal, block).to(device)

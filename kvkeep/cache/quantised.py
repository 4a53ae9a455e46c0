"""Keys and values in 8 or 4 bits.

A vector of head_dim numbers is first multiplied by a Hadamard matrix, which spreads over all of
them what a few stand out by (QuaRot, arXiv:2404.00456; llama.cpp does so, too). What comes of that
is rounded: in 8 bits to multiples of a scale, which each vector has; in 4 bits to multiples above
a minimum, scale and minimum of each 32 numbers.

The matrix is symmetric and its own inverse, so that a query that was multiplied by it as well has
the same product with a key as before: cells are looked at without being transformed back.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

import torch
from torch import Tensor

GROUP = 32  # numbers that share a scale and a minimum in 4 bits
SCALE = torch.bfloat16  # exact in every dtype that cells are restored to
_Index: TypeAlias = int | slice | Tensor | tuple[int | slice | None, ...] | None


@dataclass(frozen=True)
class Quantised:
    """Vectors `[..., head_dim]`, transformed, in 8 or 4 bits. Indices are of the dimensions before.

    data: in 8 bits int8 `[..., head_dim]`. In 4 bits uint8 `[..., head_dim / 2]`: number i in the
        lower half of byte i, number i + head_dim / 2 in the upper half.
    scale: in 8 bits `[..., 1]`: a number is `data x scale`. In 4 bits `[..., 2 x groups]`, scales
        and then minima of runs of equal length: a number is `data x scale + minimum`.
    """

    data: Tensor
    scale: Tensor

    @classmethod
    def empty(cls, shape: Sequence[int], bits: int, device: torch.device) -> "Quantised":
        """Zeros, `[..., head_dim]`."""
        *before, head_dim = shape
        kind, width = (torch.int8, head_dim) if bits == 8 else (torch.uint8, head_dim // 2)
        return cls(
            torch.zeros(*before, width, dtype=kind, device=device),
            torch.zeros(*before, scale_count(head_dim, bits), dtype=SCALE, device=device),
        )

    @property
    def bits(self) -> int:
        return 8 if self.data.dtype is torch.int8 else 4

    @property
    def shape(self) -> torch.Size:
        """As it was before."""
        *before, width = self.data.shape
        return torch.Size((*before, width * 8 // self.bits))

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.scale.nbytes

    def __getitem__(self, index: _Index) -> "Quantised":
        return Quantised(self.data[index], self.scale[index])

    def unbind(self) -> "tuple[Quantised, ...]":
        """Along the first dimension."""
        return tuple(map(Quantised, self.data.unbind(), self.scale.unbind()))

    def clone(self) -> "Quantised":
        return Quantised(self.data.clone(), self.scale.clone())

    def to(self, device: torch.device) -> "Quantised":
        return Quantised(self.data.to(device), self.scale.to(device))

    def copy_(self, source: "KVTensor") -> None:
        """Takes over other vectors: as they are, where they are kept in as many bits."""
        if isinstance(source, Tensor) or source.bits != self.bits:
            source = quantise(dequantise(source, torch.float32), self.bits)
        self.data.copy_(source.data)
        self.scale.copy_(source.scale)

    def dequantise_transformed(self, dtype: torch.dtype) -> Tensor:
        """The numbers, still transformed."""
        if self.bits == 8:
            return self.data.to(dtype).mul_(self.scale)
        halves = torch.cat((self.data & 15, self.data >> 4), -1)
        scale, minimum = self.scale.to(dtype).unsqueeze(-1).chunk(2, -2)
        numbers = halves.to(dtype).view(*scale.shape[:-1], -1)
        return torch.addcmul(minimum, numbers, scale).view(halves.shape)


KVTensor: TypeAlias = Tensor | Quantised


def quantise(x: Tensor, bits: int) -> Quantised:
    """`x: [..., head_dim]` in 8 or 4 bits. No transformed number is off by more than half
    its scale.

    (But for what bfloat16 rounds of the scale and of the minimum.)
    """
    numbers = hadamard(x)
    if bits == 8:
        scale = (numbers.abs().amax(-1, keepdim=True) / 127).to(SCALE)
        units = numbers / _divisor(scale)
        return Quantised(units.round_().clamp_(-127, 127).to(torch.int8), scale)
    runs = scale_count(x.shape[-1], bits) // 2
    groups = numbers.view(*x.shape[:-1], runs, x.shape[-1] // runs)
    minimum = groups.amin(-1, keepdim=True).to(SCALE)
    scale = ((groups.amax(-1, keepdim=True) - minimum).clamp_min_(0) / 15).to(SCALE)
    units = (groups - minimum) / _divisor(scale)
    low, high = units.round_().clamp_(0, 15).to(torch.uint8).flatten(-2).chunk(2, -1)
    return Quantised(low | high << 4, torch.cat((scale, minimum), -2).squeeze(-1))


def _divisor(scale: Tensor) -> Tensor:
    return scale.masked_fill(scale == 0, 1)


def dequantise(stored: KVTensor, dtype: torch.dtype) -> Tensor:
    """Plain numbers; themselves, if they are that."""
    if isinstance(stored, Tensor):
        return stored.to(dtype)
    return hadamard(stored.dequantise_transformed(torch.float32)).to(dtype)


def copy_stored(into: KVTensor, source: KVTensor) -> None:
    """Copies numbers, however each side keeps them."""
    if isinstance(into, Tensor):
        into.copy_(dequantise(source, into.dtype))
    else:
        into.copy_(source)


def concatenate_stored(parts: Sequence[KVTensor], dim: int) -> KVTensor:
    """Parts that are all kept alike, as one; copied."""
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat([x for x in parts if isinstance(x, Tensor)], dim)
    same = [x for x in parts if isinstance(x, Quantised) and x.bits == first.bits]
    assert len(same) == len(parts), "cells of one kind"
    data, scale = ([getattr(x, name) for x in same] for name in ("data", "scale"))
    return Quantised(torch.cat(data, dim), torch.cat(scale, dim))


def tensors(stored: KVTensor) -> tuple[Tensor, ...]:
    """What the numbers lie in."""
    return (stored,) if isinstance(stored, Tensor) else (stored.data, stored.scale)


def scale_count(head_dim: int, bits: int) -> int:
    """How many scales a vector has, minima included."""
    return 1 if bits == 8 else 2 * (head_dim // math.gcd(head_dim, GROUP))


def hadamard(x: Tensor) -> Tensor:
    """`x: [..., head_dim]` multiplied by the Hadamard matrix, in float32. Twice: x again."""
    return x.float() @ _hadamard(x.shape[-1], x.device)


@cache
def _hadamard(size: int, device: torch.device) -> Tensor:
    """Sylvester's, orthonormal, as large as the powers of two in `size` allow, along a diagonal."""
    block = torch.ones(1, 1, dtype=torch.float32, device="cpu")
    while size % (2 * block.shape[0]) == 0:
        block = torch.cat((torch.cat((block, block), 1), torch.cat((block, -block), 1)))
    block = block / math.sqrt(block.shape[0])
    diagonal = torch.eye(size // block.shape[0], dtype=torch.float32, device="cpu")
    return torch.kron(diagonal, block).to(device)

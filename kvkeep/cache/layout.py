"""The shape of cells and the number of bits in which they are stored."""

import operator
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvkeep.cache.quantised import SCALE_DTYPE, KVTensor, QuantisedTensor, scale_count

BITS = {"8": (8, 8), "8/4": (8, 4), "4": (4, 4)}  # bits of keys, and of values


@dataclass(frozen=True)
class Layout:
    """The shape and storage format of cells.

    key_bits, value_bits: 8 or 4 where they are quantised; 16 where they are plain, in `dtype`.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    key_bits: int = 16
    value_bits: int = 16

    @property
    def plain(self) -> "Layout":
        """The layout without quantisation, in which cells are evaluated."""
        return replace(self, key_bits=16, value_bits=16)

    @property
    def quantised(self) -> bool:
        return min(self.key_bits, self.value_bits) < 16

    @property
    def cell_bytes(self) -> int:
        """Bytes of one cell's key and value over all layers and KV heads."""
        key_and_value = self._vector_bytes(self.key_bits) + self._vector_bytes(self.value_bits)
        return key_and_value * self.layers * self.kv_heads

    def _vector_bytes(self, bits: int) -> int:
        if bits == 16:
            return self.head_dim * self.dtype.itemsize
        return self.head_dim * bits // 8 + scale_count(self.head_dim, bits) * SCALE_DTYPE.itemsize

    def zeros(self, count: int, bits: int) -> KVTensor:
        """Return zeros for `count` keys or values, `[layers, kv_heads, count, head_dim]`."""
        shape = (self.layers, self.kv_heads, count, self.head_dim)
        if bits == 16:
            return torch.zeros(shape, dtype=self.dtype, device=self.device)
        return QuantisedTensor.zeros(shape, bits, self.device)


@dataclass(frozen=True)
class Bits:
    """The bits in which a session stores all cells (`kv`), or those outside the window (`far`).

    At most one of them is given, as a key of `BITS` or as the integer 8 or 4. None: cells are
    stored in the dtype in which they were evaluated.
    """

    kv: str | None = None
    far: str | None = None

    def __post_init__(self) -> None:
        for name in ("kv", "far"):
            object.__setattr__(self, name, bits_name(getattr(self, name)))

    def layouts(self, plain: Layout) -> tuple[Layout, Layout]:
        """Return the layouts of the window's cells and of all others."""
        return _with_bits(plain, self.kv), _with_bits(plain, self.far or self.kv)


def bits_name(value: Any) -> Any:
    """Return an integer of any library as a key of `BITS`, such as "8"; other values unchanged."""
    if value is None or isinstance(value, (str, bool)):
        return value
    try:
        return str(operator.index(value))
    except TypeError:
        return value


def _with_bits(plain_layout: Layout, bits: str | None) -> Layout:
    key_bits, value_bits = (16, 16) if bits is None else BITS[bits]
    return replace(plain_layout, key_bits=key_bits, value_bits=value_bits)

"""The GGUF formats that kvkeep multiplies by without unpacking them first.

A weight is `table[code] * scale + minimum`. 16 or 32 columns of a row share a scale and, in some
formats, a minimum; `Format.scales` computes both from what is stored. Blocks of a file are split
without loss; their layouts are those of GGML (`ggml-quants.c`, and `gguf/quants.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

GROUP = 32  # columns that the kernels unpack together
_F16, _U8, _I8 = torch.float16, torch.uint8, torch.int8

# Codes `[rows, tiles, tile_width]` uint8, and the stored parts of scales, each `[rows, tiles, n]`.
CodesAndParts: TypeAlias = tuple[Tensor, tuple[Tensor, ...]]


@dataclass(frozen=True)
class Format:
    """A GGUF quantisation format.

    Attributes:
        name: GGML's.
        kernel_id: the compiled kernels' (`Format` in src/formats.h).
        bits: of a code.
        table: the float32 value of each code; None for signed bytes.
        tile_width: columns of a tile, whose scales are stored together.
        scale_columns: columns that share a scale.
        scale_parts: dtype and count of each stored part of a row's scales in a tile.
        block_bytes: bytes of a tile of one row in a GGUF file.
        split_block: maps blocks `[rows, tiles, block_bytes]` uint8 to codes and parts.
    """

    name: str
    kernel_id: int
    bits: int
    table: Tensor | None
    tile_width: int
    scale_columns: int
    scale_parts: tuple[tuple[torch.dtype, int], ...]
    block_bytes: int
    split_block: Callable[[Tensor], CodesAndParts]

    @property
    def group_bytes(self) -> int:
        """Bytes of the codes of 16 rows of a group."""
        return 64 * self.bits

    @property
    def tile_bytes(self) -> int:
        """Bytes of the scales of 16 rows of a tile."""
        return 16 * sum(dtype.itemsize * count for dtype, count in self.scale_parts)

    def scales(self, scale_parts: tuple[Tensor, ...]) -> tuple[Tensor, Tensor | None]:
        """Return scales and minima, `[rows, columns / scale_columns]` float32, of stored parts."""
        first, *others = scale_parts
        scale, minimum = first.float(), None
        if self.name == "MXFP4":  # a float32 exponent; 2 to the -127 becomes 0
            scale = (first.int() << 23).view(torch.float32)
        elif self.tile_width == GROUP and others:  # one scale for each group, and one minimum
            minimum = others[0].float()
        elif self.name in ("Q4_K", "Q5_K"):
            factor, scale_codes, minimum_codes = (part.float() for part in others)
            scale, minimum = scale * scale_codes, -(factor * minimum_codes)
        elif self.tile_width != GROUP:
            scale = scale * others[0].float()
        return scale.flatten(1), None if minimum is None else minimum.flatten(1)

    def values(self, codes: Tensor, scale_parts: tuple[Tensor, ...]) -> Tensor:
        """Dequantise to `[rows, columns]` float32. codes: uint8 of the same shape."""
        scale, minimum = self.scales(scale_parts)
        unscaled = self._decode(codes)
        grouped = split_last(unscaled, -1, self.scale_columns) * scale.unsqueeze(-1)
        if minimum is not None:
            grouped = grouped + minimum.unsqueeze(-1)
        return grouped.flatten(1)

    def _decode(self, codes: Tensor) -> Tensor:
        table: Tensor | None = self.table
        if table is None:
            return codes.view(torch.int8).float()
        first, second = table[:2].tolist()
        linear = second == first + 1  # consecutive integers: adding is faster than a lookup
        return codes.float() + first if linear else table[codes.int()]


def split_last(x: Tensor, *sizes: int) -> Tensor:
    return x.reshape(*x.shape[:-1], *sizes)


def _arange(first: int, end: int, step: int, dtype: torch.dtype) -> Tensor:
    return torch.arange(first, end, step, dtype=dtype, device="cpu")


def _as_float16(two_bytes: Tensor) -> Tensor:
    return two_bytes.contiguous().view(torch.float16)


def _nibbles(x: Tensor) -> Tensor:
    """Map bytes `[..., n]` to nibbles `[..., 2 n]`: all low ones, then all high ones."""
    return torch.cat((x & 15, x >> 4), -1)


def _fifth_bits(x: Tensor) -> Tensor:
    """Map four bytes, a bit for each of 32 columns, to 32 bytes with that bit in place 4."""
    shifts = _arange(0, 8, 1, _U8)
    return ((x.unsqueeze(-1) >> shifts) & 1).flatten(-2) << 4


def _split_simple(blocks: Tensor, has_minimum: bool, has_fifth: bool) -> CodesAndParts:
    """Split blocks of a scale, a minimum and fifth bits if present, and 32 nibbles."""
    codes, scale = _nibbles(blocks[..., -16:]), _as_float16(blocks[..., :2])
    if has_fifth:
        codes = codes | _fifth_bits(blocks[..., -20:-16])
    return codes, (scale, _as_float16(blocks[..., 2:4])) if has_minimum else (scale,)


def _split_q8_0(blocks: Tensor) -> CodesAndParts:
    return blocks[..., 2:], (_as_float16(blocks[..., :2]),)


def _split_mxfp4(blocks: Tensor) -> CodesAndParts:
    return _nibbles(blocks[..., 1:]), (blocks[..., :1].contiguous(),)


def _split_k(blocks: Tensor, has_fifth: bool) -> CodesAndParts:
    """Split blocks of Q4_K or Q5_K: scale, minimum, codes of both, fifth bits, nibbles."""
    low, high, mixed = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scale_codes = torch.cat((low & 63, (mixed & 15) | ((low >> 2) & 48)), -1)
    minimum_codes = torch.cat((high & 63, (mixed >> 4) | ((high >> 2) & 48)), -1)
    codes = _nibbles(split_last(blocks[..., -128:], 4, 32))
    codes = split_last(codes, 2, 32).flatten(-3, -2)  # [..., 8 groups, 32]
    if has_fifth:
        shifts = _arange(0, 8, 1, _U8).unsqueeze(-1)
        codes = codes | ((blocks[..., 16:48].unsqueeze(-2) >> shifts) & 1) << 4
    scale, minimum = _as_float16(blocks[..., :2]), _as_float16(blocks[..., 2:4])
    return codes.flatten(-2), (scale, minimum, scale_codes, minimum_codes)


def _split_q6_k(blocks: Tensor) -> CodesAndParts:
    low = split_last(blocks[..., :128], 2, 64)
    low = torch.stack((low & 15, low >> 4), -2).flatten(-2)  # [..., 2 halves, 128]
    shifts = _arange(0, 8, 2, _U8).unsqueeze(-1)
    high = (split_last(blocks[..., 128:192], 2, 1, 32) >> shifts) & 3
    codes = low | high.flatten(-2) << 4
    scales = blocks[..., 192:208].contiguous().view(torch.int8)
    return codes.flatten(-2), (_as_float16(blocks[..., 208:]), scales)


def _split_iq4_xs(blocks: Tensor) -> CodesAndParts:
    low, shifts = blocks[..., 4:8], _arange(0, 8, 2, _U8)
    low = torch.stack((low & 15, low >> 4), -1).flatten(-2)
    high = ((blocks[..., 2:4].unsqueeze(-1) >> shifts) & 3).flatten(-2)
    scales = (low | high << 4).to(torch.int8) - 32
    codes = _nibbles(split_last(blocks[..., 8:], 8, 16))
    return codes.flatten(-2), (_as_float16(blocks[..., :2]), scales)


def _integers(first: int, bits: int) -> Tensor:
    return _arange(first, first + (1 << bits), 1, torch.float32)


def _float_table(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device="cpu")


_IQ4 = _float_table(-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)  # OCP Microscaling Formats 1.0
_MXFP4 = _float_table(*_E2M1, *(-x for x in _E2M1))
_SCALE = ((_F16, 1),)
_SCALE_MINIMUM = ((_F16, 1), (_F16, 1))
_K_PARTS = (*_SCALE_MINIMUM, (_U8, 8), (_U8, 8))
_split_q4_0 = partial(_split_simple, has_minimum=False, has_fifth=False)
_split_q4_1 = partial(_split_simple, has_minimum=True, has_fifth=False)
_split_q5_0 = partial(_split_simple, has_minimum=False, has_fifth=True)
_split_q5_1 = partial(_split_simple, has_minimum=True, has_fifth=True)
_split_q4_k, _split_q5_k = partial(_split_k, has_fifth=False), partial(_split_k, has_fifth=True)

_ALL_FORMATS = (
    Format("Q8_0", 3, 8, None, 32, 32, _SCALE, 34, _split_q8_0),
    Format("Q4_0", 4, 4, _integers(-8, 4), 32, 32, _SCALE, 18, _split_q4_0),
    Format("Q4_1", 5, 4, _integers(0, 4), 32, 32, _SCALE_MINIMUM, 20, _split_q4_1),
    Format("Q5_0", 6, 5, _integers(-16, 5), 32, 32, _SCALE, 22, _split_q5_0),
    Format("Q5_1", 7, 5, _integers(0, 5), 32, 32, _SCALE_MINIMUM, 24, _split_q5_1),
    Format("Q4_K", 8, 4, _integers(0, 4), 256, 32, _K_PARTS, 144, _split_q4_k),
    Format("Q5_K", 9, 5, _integers(0, 5), 256, 32, _K_PARTS, 176, _split_q5_k),
    Format("Q6_K", 10, 6, _integers(-32, 6), 256, 16, (*_SCALE, (_I8, 16)), 210, _split_q6_k),
    Format("IQ4_NL", 11, 4, _IQ4, 32, 32, _SCALE, 18, _split_q4_0),
    Format("IQ4_XS", 12, 4, _IQ4, 256, 32, (*_SCALE, (_I8, 8)), 136, _split_iq4_xs),
    Format("MXFP4", 13, 4, _MXFP4, 32, 32, ((_U8, 1),), 17, _split_mxfp4),
)
FORMATS = {entry.name: entry for entry in _ALL_FORMATS}

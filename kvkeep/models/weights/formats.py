"""The GGUF formats that kvkeep multiplies by without unpacking them first.

A weight is `table[code] * scale + minimum`. 16 or 32 columns of a row share a scale and, in some
formats, a minimum; `Format.scales` computes both from what is stored. Blocks of a file are split
without loss; their layouts are those of GGML (`ggml-quants.c`, and `gguf/quants.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

GROUP_COLUMNS = 32  # columns that the kernels unpack together
_F16, _U8, _I8 = torch.float16, torch.uint8, torch.int8
_BIT_SHIFTS = torch.arange(8, dtype=_U8, device="cpu")
_BIT_PAIR_SHIFTS = _BIT_SHIFTS[::2]

# Codes `[rows, tiles, tile_width]` uint8, and the stored parts of scales, each `[rows, tiles, n]`.
CodesAndScaleParts: TypeAlias = tuple[Tensor, tuple[Tensor, ...]]


@dataclass(frozen=True)
class Format:
    """A GGUF quantisation format.

    Attributes:
        name: in GGML.
        kernel_id: in the compiled kernels (`Format` in src/formats.h).
        bits: the number of bits of a code.
        table: the float32 value of each code; None if a code is its value, as int8.
        tile_width: the columns of a tile, whose scales are stored together: those of a GGUF block.
        scale_columns: the number of columns that share a scale.
        scale_parts: dtype and count of each stored part of a row's scales in a tile.
        block_bytes: the bytes of a GGUF block, which is one row of a tile.
        split_block: maps blocks `[rows, tiles, block_bytes]` uint8 to codes and scale parts.
    """

    name: str
    kernel_id: int
    bits: int
    table: Tensor | None
    tile_width: int
    scale_columns: int
    scale_parts: tuple[tuple[torch.dtype, int], ...]
    block_bytes: int
    split_block: Callable[[Tensor], CodesAndScaleParts]

    @property
    def group_code_bytes(self) -> int:
        """Bytes of the codes of a group in 16 rows."""
        return 16 * GROUP_COLUMNS * self.bits // 8

    @property
    def tile_scale_bytes(self) -> int:
        """Bytes of the scales of a tile in 16 rows."""
        return 16 * sum(dtype.itemsize * count for dtype, count in self.scale_parts)

    def scales_and_minima(self, scale_parts: tuple[Tensor, ...]) -> tuple[Tensor, Tensor | None]:
        """Return scales and minima, `[rows, columns / scale_columns]` float32, of stored parts."""
        first, *others = scale_parts
        scales, minima = first.float(), None
        if self.name == "MXFP4":  # a float32 exponent; 2 to the -127 becomes 0
            scales = (first.int() << 23).view(torch.float32)
        elif self.tile_width == GROUP_COLUMNS:  # a scale for each group, and perhaps a minimum
            minima = others[0].float() if others else None
        elif self.name in ("Q4_K", "Q5_K"):  # scales and minima are codes with scales themselves
            minimum_scale, scale_codes, minimum_codes = (part.float() for part in others)
            scales, minima = scales * scale_codes, -(minimum_scale * minimum_codes)
        else:
            scales = scales * others[0].float()
        return scales.flatten(1), None if minima is None else minima.flatten(1)

    def values(self, codes: Tensor, scale_parts: tuple[Tensor, ...]) -> Tensor:
        """Dequantise to `[rows, columns]` float32. codes: uint8 of the same shape."""
        scales, minima = self.scales_and_minima(scale_parts)
        values = torch.unflatten(self._unscaled_values(codes), -1, (-1, self.scale_columns))
        values = values * scales.unsqueeze(-1)
        if minima is not None:
            values = values + minima.unsqueeze(-1)
        return values.flatten(1)

    def _unscaled_values(self, codes: Tensor) -> Tensor:
        table: Tensor | None = self.table
        if table is None:
            return codes.view(torch.int8).float()
        first, second = table[:2].tolist()
        is_linear = second == first + 1  # consecutive integers: adding is faster than a lookup
        return codes.float() + first if is_linear else table[codes.int()]


def _as_float16(x: Tensor) -> Tensor:
    """Map bytes `[..., 2 n]` to the `[..., n]` float16 that they are."""
    return x.contiguous().view(torch.float16)


def _nibbles(x: Tensor) -> Tensor:
    """Map bytes `[..., n]` to nibbles `[..., 2 n]`: all low ones, then all high ones."""
    return torch.cat((x & 15, x >> 4), -1)


def _fifth_bits(x: Tensor) -> Tensor:
    """Map bytes `[..., 4]`, a bit for each of 32 columns, to `[..., 32]` with it as bit 4."""
    return ((x.unsqueeze(-1) >> _BIT_SHIFTS) & 1).flatten(-2) << 4


def _split_q4_or_q5(blocks: Tensor) -> CodesAndScaleParts:
    """Split blocks of a scale, a minimum in Q4_1 and Q5_1, fifth bits in Q5_0 and Q5_1, nibbles."""
    has_minimum, has_fifth_bits = blocks.shape[-1] in (20, 24), blocks.shape[-1] in (22, 24)
    codes, scale = _nibbles(blocks[..., -16:]), _as_float16(blocks[..., :2])
    if has_fifth_bits:
        codes = codes | _fifth_bits(blocks[..., -20:-16])
    return codes, (scale, _as_float16(blocks[..., 2:4])) if has_minimum else (scale,)


def _split_q8_0(blocks: Tensor) -> CodesAndScaleParts:
    return blocks[..., 2:], (_as_float16(blocks[..., :2]),)


def _split_mxfp4(blocks: Tensor) -> CodesAndScaleParts:
    return _nibbles(blocks[..., 1:]), (blocks[..., :1].contiguous(),)


def _split_q4_or_q5_k(blocks: Tensor) -> CodesAndScaleParts:
    """Split blocks of scale, minimum, codes of both, fifth bits in Q5_K, nibbles."""
    # Four bytes for scales, four for minima: codes 0 to 3, and above them bits 4 and 5 of codes 4
    # to 7. Then four bytes for both: bits 0 to 3 of those.
    scales, minima, both = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scale_codes = torch.cat((scales & 63, (both & 15) | ((scales >> 2) & 48)), -1)
    minimum_codes = torch.cat((minima & 63, (both >> 4) | ((minima >> 2) & 48)), -1)
    codes = _nibbles(torch.unflatten(blocks[..., -128:], -1, (4, 32)))
    codes = torch.unflatten(codes, -1, (2, 32)).flatten(-3, -2)  # [..., 8 groups, 32]
    if blocks.shape[-1] == 176:  # Q5_K
        fifth_bits = (blocks[..., 16:48].unsqueeze(-2) >> _BIT_SHIFTS.unsqueeze(-1)) & 1
        codes = codes | fifth_bits << 4
    scale, minimum = _as_float16(blocks[..., :2]), _as_float16(blocks[..., 2:4])
    return codes.flatten(-2), (scale, minimum, scale_codes, minimum_codes)


def _split_q6_k(blocks: Tensor) -> CodesAndScaleParts:
    """Split blocks of 128 bytes of nibbles, 64 of upper bits, a scale for each 16 columns, one."""
    nibbles = _nibbles(torch.unflatten(blocks[..., :128], -1, (2, 64)))  # [..., 2 halves, 128]
    upper_bytes = torch.unflatten(blocks[..., 128:192], -1, (2, 1, 32))
    upper_bits = (upper_bytes >> _BIT_PAIR_SHIFTS.unsqueeze(-1)) & 3
    codes = nibbles | upper_bits.flatten(-2) << 4
    scales = blocks[..., 192:208].contiguous().view(torch.int8)
    return codes.flatten(-2), (_as_float16(blocks[..., 208:]), scales)


def _split_iq4_xs(blocks: Tensor) -> CodesAndScaleParts:
    """Split blocks of a scale, the upper 2 and lower 4 bits of 8 group scales, and nibbles."""
    low_bytes = blocks[..., 4:8]
    low_bits = torch.stack((low_bytes & 15, low_bytes >> 4), -1).flatten(-2)
    high_bits = ((blocks[..., 2:4].unsqueeze(-1) >> _BIT_PAIR_SHIFTS) & 3).flatten(-2)
    scales = (low_bits | high_bits << 4).to(torch.int8) - 32
    codes = _nibbles(torch.unflatten(blocks[..., 8:], -1, (8, 16)))
    return codes.flatten(-2), (_as_float16(blocks[..., :2]), scales)


def _integers(first: int, bits: int) -> Tensor:
    """Return consecutive integers, as float32, one for each code of that many bits."""
    return torch.arange(first, first + (1 << bits), dtype=torch.float32, device="cpu")


def _float_table(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device="cpu")


_IQ4 = _float_table(-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)  # OCP Microscaling Formats 1.0
_MXFP4 = _float_table(*_E2M1, *(-x for x in _E2M1))
_SCALE = ((_F16, 1),)
_SCALE_MINIMUM = ((_F16, 1), (_F16, 1))
_K_PARTS = (*_SCALE_MINIMUM, (_U8, 8), (_U8, 8))

_ALL_FORMATS = (  # with the fields of `Format`, in order
    Format("Q8_0", 3, 8, None, 32, 32, _SCALE, 34, _split_q8_0),
    Format("Q4_0", 4, 4, _integers(-8, 4), 32, 32, _SCALE, 18, _split_q4_or_q5),
    Format("Q4_1", 5, 4, _integers(0, 4), 32, 32, _SCALE_MINIMUM, 20, _split_q4_or_q5),
    Format("Q5_0", 6, 5, _integers(-16, 5), 32, 32, _SCALE, 22, _split_q4_or_q5),
    Format("Q5_1", 7, 5, _integers(0, 5), 32, 32, _SCALE_MINIMUM, 24, _split_q4_or_q5),
    Format("Q4_K", 8, 4, _integers(0, 4), 256, 32, _K_PARTS, 144, _split_q4_or_q5_k),
    Format("Q5_K", 9, 5, _integers(0, 5), 256, 32, _K_PARTS, 176, _split_q4_or_q5_k),
    Format("Q6_K", 10, 6, _integers(-32, 6), 256, 16, (*_SCALE, (_I8, 16)), 210, _split_q6_k),
    Format("IQ4_NL", 11, 4, _IQ4, 32, 32, _SCALE, 18, _split_q4_or_q5),
    Format("IQ4_XS", 12, 4, _IQ4, 256, 32, (*_SCALE, (_I8, 8)), 136, _split_iq4_xs),
    Format("MXFP4", 13, 4, _MXFP4, 32, 32, ((_U8, 1),), 17, _split_mxfp4),
)
FORMATS = {entry.name: entry for entry in _ALL_FORMATS}

"""The formats in which GGUF files keep matrices, as far as kvkeep multiplies by them as they are.

A weight is `table[code] * scale + minimum`. 16 or 32 columns of a row share a scale and, where the
format has one, a minimum; how they are stored is in `_scales`. What a file's blocks hold is taken
over to the last bit; the layouts are those of GGML (`ggml-quants.c`, and `gguf/quants.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

GROUP = 32  # columns that are unpacked together
_F16, _U8, _I8 = torch.float16, torch.uint8, torch.int8

# Codes `[rows, tiles, span]` uint8 and what the scales are made of, each `[rows, tiles, n]`.
Parts: TypeAlias = tuple[Tensor, tuple[Tensor, ...]]


@dataclass(frozen=True)
class Format:
    """name: GGML's. number: of the compiled kernels (`Format` in src/formats.h).

    bits: of a code. table: what each code stands for, float32; None for signed bytes. span: columns
    whose scales lie together, a tile. shared: columns that share a scale. parts: dtype and number
    of what a row's scales in a tile are made of. block: bytes of a tile of a row in a GGUF file.
    """

    name: str
    number: int
    bits: int
    table: Tensor | None
    span: int
    shared: int
    parts: tuple[tuple[torch.dtype, int], ...]
    block: int
    taken: Callable[[Tensor], Parts]

    @property
    def group_bytes(self) -> int:
        """What the codes of 16 rows of a group take."""
        return 64 * self.bits

    @property
    def tile_bytes(self) -> int:
        """What the scales of 16 rows of a tile take."""
        return 16 * sum(dtype.itemsize * count for dtype, count in self.parts)

    def scales(self, parts: tuple[Tensor, ...]) -> tuple[Tensor, Tensor | None]:
        """Scales and minima, `[rows, columns / shared]` float32, from what they are made of."""
        scale, minimum = _scales(self, parts)
        return scale.flatten(1), None if minimum is None else minimum.flatten(1)

    def values(self, codes: Tensor, parts: tuple[Tensor, ...]) -> Tensor:
        """`[rows, columns]` float32, of codes of that shape, uint8."""
        scale, minimum = self.scales(parts)
        numbers = self._numbers(codes)
        grouped = apart(numbers, -1, self.shared) * scale.unsqueeze(-1)
        if minimum is not None:
            grouped = grouped + minimum.unsqueeze(-1)
        return grouped.flatten(1)

    def _numbers(self, codes: Tensor) -> Tensor:
        table: Tensor | None = self.table
        if table is None:
            return codes.view(torch.int8).float()
        first, second = table[:2].tolist()
        counts = second == first + 1  # and so on: that is faster than looking up
        return codes.float() + first if counts else table[codes.int()]


def _scales(kind: Format, parts: tuple[Tensor, ...]) -> tuple[Tensor, Tensor | None]:
    first, *others = parts
    if kind.name == "MXFP4":  # an exponent; 2 to the -127 is 0
        return (first.int() << 23).view(torch.float32), None
    scale = first.float()
    if kind.span == GROUP:  # one for each group, and as many minima
        return scale, others[0].float() if others else None
    if kind.name in ("Q4_K", "Q5_K"):
        least, steps, below = (part.float() for part in others)
        return scale * steps, -(least * below)
    return scale * others[0].float(), None


def apart(x: Tensor, *sizes: int) -> Tensor:
    """The last dimension as several."""
    return x.reshape(*x.shape[:-1], *sizes)


def _counted(first: int, end: int, step: int, dtype: torch.dtype) -> Tensor:
    return torch.arange(first, end, step, dtype=dtype, device="cpu")


def _half(two_bytes: Tensor) -> Tensor:
    return two_bytes.contiguous().view(torch.float16)


def _nibbles(x: Tensor) -> Tensor:
    """`[..., n]` bytes to `[..., 2 n]`: all low halves, then all high ones."""
    return torch.cat((x & 15, x >> 4), -1)


def _fifths(x: Tensor) -> Tensor:
    """Four bytes, one bit for each of 32 columns, as the fifth bit of each."""
    places = _counted(0, 8, 1, _U8)
    return ((x.unsqueeze(-1) >> places) & 1).flatten(-2) << 4


def _simple(minimum: bool, fifth: bool) -> Callable[[Tensor], Parts]:
    """Blocks of 32: a scale, a minimum, fifth bits, where there are any, and nibbles."""

    def taken(blocks: Tensor) -> Parts:
        codes, parts = _nibbles(blocks[..., -16:]), [_half(blocks[..., :2])]
        if minimum:
            parts.append(_half(blocks[..., 2:4]))
        if fifth:
            codes = codes | _fifths(blocks[..., -20:-16])
        return codes, tuple(parts)

    return taken


def _bytes(blocks: Tensor) -> Parts:
    return blocks[..., 2:], (_half(blocks[..., :2]),)


def _mxfp4(blocks: Tensor) -> Parts:
    return _nibbles(blocks[..., 1:]), (blocks[..., :1].contiguous(),)


def _k(fifth: bool) -> Callable[[Tensor], Parts]:
    """Q4_K, Q5_K: scale and minimum of all, 6 bits of both for each group, fifth bits, nibbles."""

    def taken(blocks: Tensor) -> Parts:
        low, high, both = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
        steps = torch.cat((low & 63, (both & 15) | ((low >> 2) & 48)), -1)
        below = torch.cat((high & 63, (both >> 4) | ((high >> 2) & 48)), -1)
        codes = _nibbles(apart(blocks[..., -128:], 4, 32))
        codes = apart(codes, 2, 32).flatten(-3, -2)  # [..., 8 groups, 32]
        if fifth:
            places = _counted(0, 8, 1, _U8).unsqueeze(-1)
            codes = codes | ((blocks[..., 16:48].unsqueeze(-2) >> places) & 1) << 4
        parts = (_half(blocks[..., :2]), _half(blocks[..., 2:4]), steps, below)
        return codes.flatten(-2), parts

    return taken


def _q6_k(blocks: Tensor) -> Parts:
    low = apart(blocks[..., :128], 2, 64)
    low = torch.stack((low & 15, low >> 4), -2).flatten(-2)  # [..., 2 halves, 128]
    places = _counted(0, 8, 2, _U8).unsqueeze(-1)
    high = (apart(blocks[..., 128:192], 2, 1, 32) >> places) & 3
    codes = low | high.flatten(-2) << 4
    scales = blocks[..., 192:208].contiguous().view(torch.int8)
    return codes.flatten(-2), (_half(blocks[..., 208:]), scales)


def _iq4_xs(blocks: Tensor) -> Parts:
    low, places = blocks[..., 4:8], _counted(0, 8, 2, _U8)
    low = torch.stack((low & 15, low >> 4), -1).flatten(-2)
    high = ((blocks[..., 2:4].unsqueeze(-1) >> places) & 3).flatten(-2)
    scales = (low | high << 4).to(torch.int8) - 32
    codes = _nibbles(apart(blocks[..., 8:], 8, 16))
    return codes.flatten(-2), (_half(blocks[..., :2]), scales)


_FINER = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)  # of the Open Compute Project's microscaling formats


def _from(first: int, bits: int) -> Tensor:
    return _counted(first, first + (1 << bits), 1, torch.float32)


def _table(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device="cpu")


def _k_parts() -> tuple[tuple[torch.dtype, int], ...]:
    return (_F16, 1), (_F16, 1), (_U8, 8), (_U8, 8)


_ALL = (
    Format("Q8_0", 3, 8, None, 32, 32, ((_F16, 1),), 34, _bytes),
    Format("Q4_0", 4, 4, _from(-8, 4), 32, 32, ((_F16, 1),), 18, _simple(False, False)),
    Format("Q4_1", 5, 4, _from(0, 4), 32, 32, ((_F16, 1), (_F16, 1)), 20, _simple(True, False)),
    Format("Q5_0", 6, 5, _from(-16, 5), 32, 32, ((_F16, 1),), 22, _simple(False, True)),
    Format("Q5_1", 7, 5, _from(0, 5), 32, 32, ((_F16, 1), (_F16, 1)), 24, _simple(True, True)),
    Format("Q4_K", 8, 4, _from(0, 4), 256, 32, _k_parts(), 144, _k(False)),
    Format("Q5_K", 9, 5, _from(0, 5), 256, 32, _k_parts(), 176, _k(True)),
    Format("Q6_K", 10, 6, _from(-32, 6), 256, 16, ((_F16, 1), (_I8, 16)), 210, _q6_k),
    Format("IQ4_NL", 11, 4, _table(*_FINER), 32, 32, ((_F16, 1),), 18,
           _simple(False, False)),
    Format("IQ4_XS", 12, 4, _table(*_FINER), 256, 32, ((_F16, 1), (_I8, 8)), 136,
           _iq4_xs),
    Format("MXFP4", 13, 4, _table(*_E2M1, *(-x for x in _E2M1)), 32, 32, ((_U8, 1),), 17,
           _mxfp4),
)  # fmt: skip
FORMATS = {each.name: each for each in _ALL}

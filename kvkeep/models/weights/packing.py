"""Weight matrices in few bits, in the order in which a product of one row reads them.

Sixteen rows are multiplied at once, one in each lane of a register. For each block of 16 rows and
each group of 32 columns there lie together: in 8 bits, for each pair of columns, the two codes of
row 0, the two of row 1 and so on. Of smaller codes the low 4 bits, the same in 16-bit words of four
pairs, four times 64 bytes: word j of a row has in its nibble s column `8 * part + 2 * s + j`. Then
what is above 4 bits, in words of 16 pairs, or of 8 and 8 where there are two bits of each. Pairs
are in such an order that the bits of one and of that two further are a byte apart, as their nibbles
are: 0 1 4 5 8 9 12 13 in the lower byte, 2 3 6 7 10 11 14 15 in the upper one. So products of bytes
find both in their places by one shift.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from kvkeep.models.weights.formats import FORMATS, GROUP, Format, apart

BLOCK = 16

MatrixBits = Literal[4, 8]
ROUNDED: dict[MatrixBits, str] = {4: "Q4_1", 8: "Q8_0"}  # what kvkeep itself rounds to


@dataclass(frozen=True)
class QuantisedMatrix:
    """A matrix in groups. codes: `[rows, columns]` uint8.

    parts: what the scales are made of, each `[rows, columns / span, n]`; see `Format`.
    """

    format: Format
    codes: Tensor
    parts: tuple[Tensor, ...]

    def values(self) -> Tensor:
        """`[rows, columns]` float32."""
        return self.format.values(self.codes, self.parts)


@dataclass(frozen=True)
class PackedMatrix:
    """data: uint8 `[blocks, columns / 32, group_bytes]`. scales: uint8
    `[blocks, columns / span, tile_bytes]`, part after part, each of all 16 rows.

    Rows past the last are zeros.
    """

    format: Format
    rows: int
    data: Tensor
    scales: Tensor

    @property
    def columns(self) -> int:
        return self.data.shape[1] * GROUP

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.scales.nbytes

    def unpacked(self) -> QuantisedMatrix:
        """The inverse of `packed`."""
        codes = _unpacked_codes(self.data, self.format.bits)
        parts, at = [], 0
        for dtype, count in self.format.parts:
            size = BLOCK * count * dtype.itemsize
            part = self.scales[..., at : at + size].contiguous().view(dtype)
            part = part.view(*self.scales.shape[:2], count, BLOCK).permute(0, 3, 1, 2)
            parts.append(part.flatten(0, 1)[: self.rows])
            at += size
        return QuantisedMatrix(self.format, codes[: self.rows], tuple(parts))

    def values(self) -> Tensor:
        """`[rows, columns]` float32."""
        return self.unpacked().values()


# As a model's file has it: a tensor is in bfloat16, float16 or float32.
Matrix: TypeAlias = Tensor | PackedMatrix


_PLAIN = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}


def name_of(matrix: Matrix) -> str:
    """The name of its format, or of its dtype."""
    return matrix.format.name if isinstance(matrix, PackedMatrix) else _PLAIN[matrix.dtype]


def as_tensor(matrix: Matrix, dtype: torch.dtype) -> Tensor:
    """`[rows, columns]`, rounded once where the dtype cannot hold what the matrix does."""
    values = matrix.values() if isinstance(matrix, PackedMatrix) else matrix
    return values.to(dtype)


_BLOCKS = 64  # unpacked at a time


def some_rows(matrix: Matrix) -> Iterator[Matrix]:
    """A matrix, some rows at a time where it is packed."""
    if not isinstance(matrix, PackedMatrix):
        yield matrix
        return
    for first in range(0, len(matrix.data), _BLOCKS):
        left = matrix.rows - first * BLOCK
        some = slice(first, first + _BLOCKS)
        yield PackedMatrix(
            matrix.format, min(left, _BLOCKS * BLOCK), matrix.data[some], matrix.scales[some]
        )


def packable(kind: Format, rows: int, columns: int) -> bool:
    """Whether a matrix of this shape can be packed."""
    return rows > 0 and columns > 0 and columns % kind.span == 0


def packed_shapes(kind: Format, rows: int, columns: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of `data` and `scales` for a matrix of this size."""
    blocks = -(-rows // BLOCK)
    return (blocks, columns // GROUP, kind.group_bytes), (
        blocks,
        columns // kind.span,
        kind.tile_bytes,
    )


def quantise(weights: Tensor, bits: MatrixBits) -> QuantisedMatrix:
    """The nearest values, group by group, to `weights: [rows, columns]`: as Q4_1 or Q8_0."""
    grouped = apart(weights.float(), -1, GROUP)
    kind = FORMATS[ROUNDED[bits]]
    if bits == 8:
        scales = (grouped.abs().amax(-1, keepdim=True) / 127).half()
        codes = _divided(grouped, scales).clamp(-127, 127).to(torch.int8).view(torch.uint8)
        return QuantisedMatrix(kind, codes.flatten(1), (scales,))
    low, high = grouped.aminmax(dim=-1, keepdim=True)
    minima = low.half()
    scales = ((high - minima.float()) / 15).half()
    codes = _divided(grouped - minima.float(), scales).clamp(0, 15).to(torch.uint8)
    return QuantisedMatrix(kind, codes.flatten(1), (scales, minima))


def _divided(grouped: Tensor, scales: Tensor) -> Tensor:
    return (grouped / torch.where(scales == 0, 1, scales).float()).round()


def from_gguf(kind: Format, data: Tensor) -> QuantisedMatrix:
    """What GGUF stores in a format, without loss.

    data: `[rows, bytes]` uint8, a row's blocks one behind the other.
    """
    codes, parts = kind.taken(apart(data, -1, kind.block))
    return QuantisedMatrix(kind, codes.flatten(1), parts)


def packed(matrix: QuantisedMatrix) -> PackedMatrix:
    """A matrix in the order in which it is read."""
    rows, columns = matrix.codes.shape
    blocks, kind = -(-rows // BLOCK), matrix.format
    codes = _filled(matrix.codes, blocks).view(blocks, BLOCK, columns // GROUP, GROUP)
    scales = [
        _filled(part, blocks)
        .view(blocks, BLOCK, columns // kind.span, count)
        .permute(0, 2, 3, 1)
        .contiguous()
        .view(torch.uint8)
        .flatten(2)
        for part, (_, count) in zip(matrix.parts, kind.parts, strict=True)
    ]
    return PackedMatrix(kind, rows, _packed_codes(codes, kind.bits), torch.cat(scales, -1))


def _packed_codes(codes: Tensor, bits: int) -> Tensor:
    """`[blocks, 16, groups, 32]` to `[blocks, groups, 64 * bits]`."""
    pairs = apart(codes, 16, 2).permute(0, 2, 3, 1, 4)  # block, group, pair, row, j
    if bits == 8:
        return pairs.flatten(2)
    # Of four pairs, 0 and 1 are the halves of a word's first byte, 2 and 3 of its second one.
    four = (pairs & 15).reshape(*pairs.shape[:2], 4, 2, 2, *pairs.shape[3:])
    words = (four[..., 0, :, :] | four[..., 1, :, :] << 4).permute(0, 1, 2, 4, 5, 3)
    planes, above = [words.flatten(2)], pairs >> 4
    held = 16 // (bits - 4) if bits > 4 else 16  # pairs whose upper bits make a word
    for first in range(0, 16 if bits > 4 else 0, held):
        places = _places(held)
        word = (above[:, :, first : first + held].int() << places).sum(2, dtype=torch.int32)
        planes.append(word.to(torch.int16).contiguous().view(torch.uint8).flatten(2))
    return torch.cat(planes, -1)


def _unpacked_codes(data: Tensor, bits: int) -> Tensor:
    """`[blocks, groups, 64 * bits]` to `[16 blocks, columns]`."""
    blocks, groups = data.shape[:2]
    if bits == 8:
        pairs = data.view(blocks, groups, 16, BLOCK, 2)
    else:
        words = data[..., :256].reshape(blocks, groups, 4, BLOCK, 2, 2)  # part, row, j, byte
        words = words.permute(0, 1, 2, 5, 3, 4).contiguous()
        four = torch.stack((words & 15, words >> 4), 4)
        pairs = four.view(blocks, groups, 16, BLOCK, 2)
        held = 16 // (bits - 4) if bits > 4 else 16
        planes = data[..., 256:].contiguous().view(torch.int16).int()
        for first in range(0, 16 if bits > 4 else 0, held):
            at = 32 * first // held
            word = planes[..., at : at + 32].view(blocks, groups, 1, BLOCK, 2)
            above = (word >> _places(held)) & ((1 << (bits - 4)) - 1)
            pairs[:, :, first : first + held] |= above.to(torch.uint8) << 4
    return pairs.permute(0, 3, 1, 2, 4).reshape(blocks * BLOCK, groups * GROUP)


def _places(held: int) -> Tensor:
    """Which bit of a word is the lowest of each of as many pairs. `[held, 1, 1]`."""
    pair = torch.arange(held, dtype=torch.int32, device="cpu").view(held, 1, 1)
    return 16 // held * (pair // 4 * 2 + pair % 2) + pair % 4 // 2 * 8


def _filled(x: Tensor, blocks: int) -> Tensor:
    missing = blocks * BLOCK - x.shape[0]
    if not missing:
        return x
    return torch.cat((x, x.new_zeros(missing, *x.shape[1:])))

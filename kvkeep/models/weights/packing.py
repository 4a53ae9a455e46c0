"""Packed weight matrices: few bits, in the order in which a one-row product reads them.

A product handles 16 rows at once, one in each lane of a vector register. The data of a matrix is
laid out by blocks of 16 rows and groups of 32 columns. Within one such tile:

- 8-bit codes: for each pair of columns, the two codes of row 0, the two of row 1, and so on.
- Smaller codes: first the low 4 bits of all, in 16-bit words of four pairs, four times 64 bytes.
  Word j (0 or 1) of a row has in nibble s of part p column 8 p + 2 s + j. Then the bits above the
  low 4: for 5-bit codes one word of 16 pairs, for 6-bit codes two words of 8 pairs, per row and j.
  Within a word the pairs are ordered 0 1 4 5 8 9 12 13 in the lower byte and 2 3 6 7 10 11 14 15 in
  the upper one: the bits of a pair and of the pair two further are a byte apart, as their nibbles
  are, so that the kernels' byte products align both with one shift.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from kvkeep.models.weights.formats import FORMATS, GROUP, Format, split_last

BLOCK = 16  # rows

MatrixBits = Literal[4, 8]
QUANTISED_FORMATS: dict[MatrixBits, str] = {4: "Q4_1", 8: "Q8_0"}  # that kvkeep quantises to
_BLOCKS_PER_CHUNK = 64  # of `row_chunks`
_DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}


@dataclass(frozen=True)
class QuantisedMatrix:
    """A quantised matrix in row order.

    codes: `[rows, columns]` uint8. scale_parts: the stored parts of the scales, each
    `[rows, columns / tile_width, n]`; see `Format`.
    """

    format: Format
    codes: Tensor
    scale_parts: tuple[Tensor, ...]

    def values(self) -> Tensor:
        """Dequantise to `[rows, columns]` float32."""
        return self.format.values(self.codes, self.scale_parts)


@dataclass(frozen=True)
class PackedMatrix:
    """A quantised matrix in kernel order.

    data: `[blocks, columns / 32, group_bytes]` uint8. scales: `[blocks, columns /
    tile_width, tile_bytes]` uint8, part after part, with all 16 rows. Missing rows are zeros.
    """

    format: Format
    rows: int
    data: Tensor
    scales: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.data.shape[1] * GROUP

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.scales.nbytes

    def unpacked(self) -> QuantisedMatrix:
        """Return the matrix in row order: the inverse of `pack`."""
        codes = _unpack_codes(self.data, self.format.bits)
        scale_parts, offset = [], 0
        for dtype, count in self.format.scale_parts:
            part_bytes = BLOCK * count * dtype.itemsize
            part = self.scales[..., offset : offset + part_bytes].contiguous().view(dtype)
            part = part.view(*self.scales.shape[:2], count, BLOCK).permute(0, 3, 1, 2)
            scale_parts.append(part.flatten(0, 1)[: self.rows])
            offset += part_bytes
        return QuantisedMatrix(self.format, codes[: self.rows], tuple(scale_parts))

    def values(self) -> Tensor:
        """Dequantise to `[rows, columns]` float32."""
        return self.unpacked().values()


# A matrix as a model's file has it; a tensor is bfloat16, float16 or float32.
Matrix: TypeAlias = Tensor | PackedMatrix


def format_name(matrix: Matrix) -> str:
    return matrix.format.name if isinstance(matrix, PackedMatrix) else _DTYPE_NAMES[matrix.dtype]


def as_tensor(matrix: Matrix, dtype: torch.dtype) -> Tensor:
    """Return `[rows, columns]`, rounded once if the dtype cannot hold the values."""
    return (matrix.values() if isinstance(matrix, PackedMatrix) else matrix).to(dtype)


def row_chunks(matrix: Matrix) -> Iterator[Matrix]:
    """Yield a packed matrix some rows at a time, and a tensor as a whole."""
    if not isinstance(matrix, PackedMatrix):
        yield matrix
        return
    for first in range(0, len(matrix.data), _BLOCKS_PER_CHUNK):
        rows = min(matrix.rows - first * BLOCK, _BLOCKS_PER_CHUNK * BLOCK)
        blocks = slice(first, first + _BLOCKS_PER_CHUNK)
        yield PackedMatrix(matrix.format, rows, matrix.data[blocks], matrix.scales[blocks])


def is_packable(weight_format: Format, rows: int, columns: int) -> bool:
    return rows > 0 and columns > 0 and columns % weight_format.tile_width == 0


def packed_shapes(
    weight_format: Format, rows: int, columns: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of `data` and `scales`."""
    blocks = -(-rows // BLOCK)
    data = (blocks, columns // GROUP, weight_format.group_bytes)
    return data, (blocks, columns // weight_format.tile_width, weight_format.tile_bytes)


def quantise(weights: Tensor, bits: MatrixBits) -> QuantisedMatrix:
    """Quantise `weights: [rows, columns]` to the nearest values, group by group: Q4_1 or Q8_0."""
    groups = split_last(weights.float(), -1, GROUP)
    weight_format = FORMATS[QUANTISED_FORMATS[bits]]
    if bits == 8:
        scales = (groups.abs().amax(-1, keepdim=True) / 127).half()
        codes = _rounded_quotient(groups, scales).clamp(-127, 127).to(torch.int8).view(torch.uint8)
        return QuantisedMatrix(weight_format, codes.flatten(1), (scales,))
    low, high = groups.aminmax(dim=-1, keepdim=True)
    minima = low.half()
    scales = ((high - minima.float()) / 15).half()
    codes = _rounded_quotient(groups - minima.float(), scales).clamp(0, 15).to(torch.uint8)
    return QuantisedMatrix(weight_format, codes.flatten(1), (scales, minima))


def _rounded_quotient(groups: Tensor, scales: Tensor) -> Tensor:
    return (groups / torch.where(scales == 0, 1, scales).float()).round()


def from_gguf(weight_format: Format, data: Tensor) -> QuantisedMatrix:
    """Return a matrix of GGUF blocks without loss. data: `[rows, bytes]` uint8."""
    codes, parts = weight_format.split_block(split_last(data, -1, weight_format.block_bytes))
    return QuantisedMatrix(weight_format, codes.flatten(1), parts)


def pack(matrix: QuantisedMatrix) -> PackedMatrix:
    """Return a matrix in kernel order."""
    rows, columns = matrix.codes.shape
    blocks, weight_format = -(-rows // BLOCK), matrix.format
    codes = _pad_rows(matrix.codes, blocks).view(blocks, BLOCK, columns // GROUP, GROUP)
    scales = [
        _pad_rows(part, blocks)
        .view(blocks, BLOCK, columns // weight_format.tile_width, count)
        .permute(0, 2, 3, 1)
        .contiguous()
        .view(torch.uint8)
        .flatten(2)
        for part, (_, count) in zip(matrix.scale_parts, weight_format.scale_parts, strict=True)
    ]
    return PackedMatrix(
        weight_format, rows, _pack_codes(codes, weight_format.bits), torch.cat(scales, -1)
    )


def _pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Map `[blocks, 16, groups, 32]` to `[blocks, groups, 64 * bits]`."""
    pairs = split_last(codes, 16, 2).permute(0, 2, 3, 1, 4)  # block, group, pair, row, j
    if bits == 8:
        return pairs.flatten(2)
    # Four pairs make a word: pairs 0 and 1 are the nibbles of its first byte, 2 and 3 of its
    # second.
    quads = (pairs & 15).reshape(*pairs.shape[:2], 4, 2, 2, *pairs.shape[3:])
    words = (quads[..., 0, :, :] | quads[..., 1, :, :] << 4).permute(0, 1, 2, 4, 5, 3)
    planes, upper = [words.flatten(2)], pairs >> 4
    per_word = 16 // (bits - 4) if bits > 4 else 16  # pairs whose upper bits share a word
    for first in range(0, 16 if bits > 4 else 0, per_word):
        shifts = _upper_bit_shifts(per_word)
        word = (upper[:, :, first : first + per_word].int() << shifts).sum(2, dtype=torch.int32)
        planes.append(word.to(torch.int16).contiguous().view(torch.uint8).flatten(2))
    return torch.cat(planes, -1)


def _unpack_codes(data: Tensor, bits: int) -> Tensor:
    """Map `[blocks, groups, 64 * bits]` to `[16 * blocks, columns]`."""
    blocks, groups = data.shape[:2]
    if bits == 8:
        pairs = data.view(blocks, groups, 16, BLOCK, 2)
    else:
        words = data[..., :256].reshape(blocks, groups, 4, BLOCK, 2, 2)  # part, row, j, byte
        words = words.permute(0, 1, 2, 5, 3, 4).contiguous()
        quads = torch.stack((words & 15, words >> 4), 4)
        pairs = quads.view(blocks, groups, 16, BLOCK, 2)
        per_word = 16 // (bits - 4) if bits > 4 else 16
        planes = data[..., 256:].contiguous().view(torch.int16).int()
        for first in range(0, 16 if bits > 4 else 0, per_word):
            start = 32 * first // per_word
            word = planes[..., start : start + 32].view(blocks, groups, 1, BLOCK, 2)
            upper = (word >> _upper_bit_shifts(per_word)) & ((1 << (bits - 4)) - 1)
            pairs[:, :, first : first + per_word] |= upper.to(torch.uint8) << 4
    return pairs.permute(0, 3, 1, 2, 4).reshape(blocks * BLOCK, groups * GROUP)


def _upper_bit_shifts(pairs: int) -> Tensor:
    """Return the lowest bit of each pair in a word that holds so many pairs, `[pairs, 1, 1]`."""
    pair = torch.arange(pairs, dtype=torch.int32, device="cpu").view(pairs, 1, 1)
    return 16 // pairs * (pair // 4 * 2 + pair % 2) + pair % 4 // 2 * 8


def _pad_rows(x: Tensor, blocks: int) -> Tensor:
    missing_rows = blocks * BLOCK - x.shape[0]
    if not missing_rows:
        return x
    return torch.cat((x, x.new_zeros(missing_rows, *x.shape[1:])))

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

from kvkeep.models.weights.formats import FORMATS, GROUP_COLUMNS, Format

BLOCK_ROWS = 16

MatrixBits = Literal[4, 8]
QUANTISED_FORMATS: dict[MatrixBits, str] = {4: "Q4_1", 8: "Q8_0"}  # that kvkeep quantises to
# How many weights are packed or unpacked at a time, which takes up to 17 bytes for each of them.
_CHUNK_WEIGHTS = 1 << 22
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

    data: the codes, `[blocks, columns / 32, group_code_bytes]` uint8. scales: `[blocks, columns /
    tile_width, tile_scale_bytes]` uint8, part after part. What is beyond `rows` is zeros.
    """

    format: Format
    rows: int
    data: Tensor
    scales: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.data.shape[1] * GROUP_COLUMNS

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.scales.nbytes

    def unpack(self) -> QuantisedMatrix:
        """Return the matrix in row order: the inverse of `pack`."""
        codes = _unpack_codes(self.data, self.format.bits)
        scale_parts, offset = [], 0
        for dtype, count in self.format.scale_parts:
            part_bytes = BLOCK_ROWS * count * dtype.itemsize
            part = self.scales[..., offset : offset + part_bytes].contiguous().view(dtype)
            part = part.view(*self.scales.shape[:2], count, BLOCK_ROWS).permute(0, 3, 1, 2)
            scale_parts.append(part.flatten(0, 1)[: self.rows])
            offset += part_bytes
        return QuantisedMatrix(self.format, codes[: self.rows], tuple(scale_parts))

    def values(self) -> Tensor:
        """Dequantise to `[rows, columns]` float32."""
        return self.unpack().values()


# A matrix as a model's file has it; a tensor is bfloat16, float16 or float32.
Matrix: TypeAlias = Tensor | PackedMatrix


def format_name(matrix: Matrix) -> str:
    """Return the name of a matrix's format, such as "Q4_K", or of its dtype, such as "bf16"."""
    return matrix.format.name if isinstance(matrix, PackedMatrix) else _DTYPE_NAMES[matrix.dtype]


def as_tensor(matrix: Matrix, dtype: torch.dtype) -> Tensor:
    """Return `[rows, columns]`, rounded once if the dtype cannot hold the values."""
    if isinstance(matrix, Tensor):
        return matrix.to(dtype)
    values = torch.empty(matrix.shape, dtype=dtype, device="cpu")
    for rows, chunk in zip(row_ranges(*matrix.shape), row_chunks(matrix), strict=True):
        values[rows] = chunk.values()
    return values


def row_ranges(rows: int, columns: int) -> Iterator[slice]:
    """Yield the rows of a matrix some at a time: whole blocks of 16, except the last."""
    count = max(BLOCK_ROWS, _CHUNK_WEIGHTS // max(1, columns) // BLOCK_ROWS * BLOCK_ROWS)
    return (slice(first, min(first + count, rows)) for first in range(0, rows, count))


def row_chunks(matrix: Matrix) -> Iterator[Matrix]:
    """Yield a packed matrix some rows at a time, and a tensor as a whole."""
    if isinstance(matrix, Tensor):
        yield matrix
        return
    for rows in row_ranges(*matrix.shape):
        blocks = slice(rows.start // BLOCK_ROWS, -(-rows.stop // BLOCK_ROWS))
        data, scales = matrix.data[blocks], matrix.scales[blocks]
        yield PackedMatrix(matrix.format, rows.stop - rows.start, data, scales)


def is_packable(weight_format: Format, rows: int, columns: int) -> bool:
    """Whether a matrix of this shape has whole tiles only. Rows are padded."""
    return rows > 0 and columns > 0 and columns % weight_format.tile_width == 0


def packed_shapes(
    weight_format: Format, rows: int, columns: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of `PackedMatrix.data` and `PackedMatrix.scales`."""
    blocks = -(-rows // BLOCK_ROWS)
    data = (blocks, columns // GROUP_COLUMNS, weight_format.group_code_bytes)
    return data, (blocks, columns // weight_format.tile_width, weight_format.tile_scale_bytes)


def quantise(weights: Tensor, bits: MatrixBits) -> QuantisedMatrix:
    """Quantise `weights: [rows, columns]` to the nearest values, group by group: Q4_1 or Q8_0."""
    groups = torch.unflatten(weights.float(), -1, (-1, GROUP_COLUMNS))
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
    """Divide by scales, and by 1 where a scale is 0, since all values of its group are equal."""
    return (groups / torch.where(scales == 0, 1, scales).float()).round()


def from_gguf(weight_format: Format, data: Tensor) -> QuantisedMatrix:
    """Return a matrix of a GGUF file without loss. data: its blocks, `[rows, bytes]` uint8."""
    blocks = torch.unflatten(data, -1, (-1, weight_format.block_bytes))
    codes, scale_parts = weight_format.split_block(blocks)
    return QuantisedMatrix(weight_format, codes.flatten(1), scale_parts)


def pack(matrix: QuantisedMatrix) -> PackedMatrix:
    """Return a matrix in kernel order."""
    rows, columns = matrix.codes.shape
    blocks, weight_format = -(-rows // BLOCK_ROWS), matrix.format
    codes = _pad_rows(matrix.codes, blocks).view(blocks, BLOCK_ROWS, -1, GROUP_COLUMNS)
    scales = [
        _pad_rows(part, blocks)
        .view(blocks, BLOCK_ROWS, columns // weight_format.tile_width, count)
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
    pairs = torch.unflatten(codes, -1, (16, 2)).permute(0, 2, 3, 1, 4)  # block, group, pair, row, j
    if bits == 8:
        return pairs.flatten(2)
    # Four pairs make a word: pairs 0 and 1 are the nibbles of its first byte, 2 and 3 of its
    # second.
    quads = (pairs & 15).reshape(*pairs.shape[:2], 4, 2, 2, *pairs.shape[3:])
    words = (quads[..., 0, :, :] | quads[..., 1, :, :] << 4).permute(0, 1, 2, 4, 5, 3)
    low_bits = words.flatten(2)
    if bits == 4:
        return low_bits
    upper_bits, pairs_per_word = [], 16 // (bits - 4)
    shifts = _upper_bit_shifts(pairs_per_word)
    for word_pairs in torch.split((pairs >> 4).int(), pairs_per_word, 2):
        word = (word_pairs << shifts).sum(2, dtype=torch.int32)
        upper_bits.append(word.to(torch.int16).contiguous().view(torch.uint8).flatten(2))
    return torch.cat((low_bits, *upper_bits), -1)


def _unpack_codes(data: Tensor, bits: int) -> Tensor:
    """Map `[blocks, groups, 64 * bits]` to `[16 * blocks, columns]`."""
    blocks, groups = data.shape[:2]
    if bits == 8:
        pairs = data.view(blocks, groups, 16, BLOCK_ROWS, 2)
    else:
        words = data[..., :256].reshape(blocks, groups, 4, BLOCK_ROWS, 2, 2)  # part, row, j, byte
        words = words.permute(0, 1, 2, 5, 3, 4).contiguous()
        quads = torch.stack((words & 15, words >> 4), 4)
        pairs = quads.view(blocks, groups, 16, BLOCK_ROWS, 2)
    if 4 < bits < 8:
        pairs_per_word, mask = 16 // (bits - 4), (1 << (bits - 4)) - 1
        words = data[..., 256:].contiguous().view(torch.int16).int()
        words = words.view(blocks, groups, -1, 1, BLOCK_ROWS, 2)
        upper_bits = (words >> _upper_bit_shifts(pairs_per_word)) & mask
        pairs |= upper_bits.to(torch.uint8).flatten(2, 3) << 4
    return pairs.permute(0, 3, 1, 2, 4).reshape(blocks * BLOCK_ROWS, groups * GROUP_COLUMNS)


def _upper_bit_shifts(pairs: int) -> Tensor:
    """Return the place of each pair's upper bits in a word of so many pairs, `[pairs, 1, 1]`."""
    pair = torch.arange(pairs, dtype=torch.int32, device="cpu").view(pairs, 1, 1)
    return 16 // pairs * (pair // 4 * 2 + pair % 2) + pair % 4 // 2 * 8


def _pad_rows(x: Tensor, blocks: int) -> Tensor:
    """Append rows of zeros, up to so many whole blocks."""
    missing_rows = blocks * BLOCK_ROWS - x.shape[0]
    if not missing_rows:
        return x
    return torch.cat((x, x.new_zeros(missing_rows, *x.shape[1:])))

"""Weight matrices in 4 or 8 bits, in the order in which a one-row product reads them.

Groups of 32 weights of a row share a float16 scale and, in 4 bits, a float16 minimum: the value is
`scale * q + minimum` with q in 0 ... 15, or `scale * q` with q in -127 ... 127. These are GGUF's
Q4_1 and Q8_0, so that such files are taken over without loss.

Sixteen rows are multiplied at once, one in each lane of a register. For each block of 16 rows and
each group of 32 columns there lie together: in 8 bits, for each pair of columns, the two of row 0,
the two of row 1 and so on; in 4 bits the same in 16-bit words of four pairs, four times 64 bytes:
word j of a row has in its nibble s column `8 * part + 2 * s + j`.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

GROUP, BLOCK = 32, 16

MatrixBits = Literal[4, 8]


@dataclass(frozen=True)
class QuantisedMatrix:
    """A matrix in groups. q: `[rows, columns]`, uint8 (4 bits) or int8 (8 bits).

    scales, minima: `[rows, columns / 32]` float16; no minima in 8 bits.
    """

    bits: MatrixBits
    q: Tensor
    scales: Tensor
    minima: Tensor | None

    def values(self) -> Tensor:
        """`[rows, columns]` float32."""
        grouped = _grouped(self.q.float(), GROUP) * self.scales.float().unsqueeze(-1)
        if self.minima is not None:
            grouped = grouped + self.minima.float().unsqueeze(-1)
        return grouped.flatten(1)


@dataclass(frozen=True)
class PackedMatrix:
    """data: uint8 `[blocks, columns / 32, 256 or 512]`. scales: float16
    `[blocks, columns / 32, 32 or 16]`, in 4 bits 16 scales and 16 minima.

    Rows past the last are zeros.
    """

    bits: MatrixBits
    rows: int
    data: Tensor
    scales: Tensor

    @property
    def columns(self) -> int:
        return self.data.shape[1] * GROUP

    def unpacked(self) -> QuantisedMatrix:
        """The inverse of `packed`."""
        blocks, groups = self.data.shape[:2]
        if self.bits == 4:
            words = self.data.view(blocks, groups, 4, BLOCK, 2, 2)  # part, row, j, byte
            q = torch.stack((words & 15, words >> 4), -1).flatten(-2).transpose(-1, -2)
        else:
            q = self.data.view(torch.int8).view(blocks, groups, 16, BLOCK, 1, 2)
        # [blocks, groups, part, row, s, j] to [blocks, row, groups, part, s, j]
        q = q.permute(0, 3, 1, 2, 4, 5).reshape(blocks * BLOCK, -1)[: self.rows]
        parts = self.scales.view(blocks, groups, -1, BLOCK).permute(2, 0, 3, 1)
        scales, *minima = (p.reshape(blocks * BLOCK, -1)[: self.rows] for p in parts)
        return QuantisedMatrix(self.bits, q, scales, minima[0] if minima else None)


def packable(rows: int, columns: int) -> bool:
    """Whether a matrix of this shape can be packed."""
    return rows > 0 and columns > 0 and columns % GROUP == 0


def packed_shapes(
    bits: MatrixBits, rows: int, columns: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of `data` and `scales` for a matrix of this size."""
    blocks, groups = -(-rows // BLOCK), columns // GROUP
    return (blocks, groups, 64 * bits), (blocks, groups, 32 if bits == 4 else 16)


def quantise(weights: Tensor, bits: MatrixBits) -> QuantisedMatrix:
    """The nearest values, group by group, to `weights: [rows, columns]`."""
    grouped = _grouped(weights.float(), GROUP)
    if bits == 8:
        scales = (grouped.abs().amax(-1) / 127).half()
        minima = None
        q = _divided(grouped, scales).clamp(-127, 127).to(torch.int8)
    else:
        low, high = grouped.aminmax(dim=-1)
        minima = low.half()
        scales = ((high - minima.float()) / 15).half()
        q = _divided(grouped - minima.float().unsqueeze(-1), scales).clamp(0, 15).to(torch.uint8)
    return QuantisedMatrix(bits, q.flatten(1), scales, minima)


def _grouped(x: Tensor, size: int) -> Tensor:
    """`[rows, columns]` as `[rows, columns / size, size]`."""
    return x.reshape(x.shape[0], -1, size)


def _divided(grouped: Tensor, scales: Tensor) -> Tensor:
    divisors = torch.where(scales == 0, 1, scales).float()
    return (grouped / divisors.unsqueeze(-1)).round()


def packed(matrix: QuantisedMatrix) -> PackedMatrix:
    """A matrix in the order in which it is read."""
    rows, columns = matrix.q.shape
    blocks, groups = -(-rows // BLOCK), columns // GROUP
    if matrix.bits == 4:
        q = _filled(matrix.q, blocks).view(blocks, BLOCK, groups, 4, 4, 2)
        nibbles = q.permute(0, 2, 3, 1, 5, 4)  # block, group, part, row, j, s
        data = nibbles[..., 0::2] | nibbles[..., 1::2] << 4
    else:
        q = _filled(matrix.q, blocks).view(blocks, BLOCK, groups, 16, 2)
        data = q.permute(0, 2, 3, 1, 4).contiguous().view(torch.uint8)
    parts = [matrix.scales] if matrix.minima is None else [matrix.scales, matrix.minima]
    scales = torch.stack([_filled(p, blocks).view(blocks, BLOCK, groups) for p in parts])
    return PackedMatrix(
        matrix.bits,
        rows,
        data.reshape(blocks, groups, -1).contiguous(),
        scales.permute(1, 3, 0, 2).reshape(blocks, groups, -1).contiguous(),
    )


def _filled(x: Tensor, blocks: int) -> Tensor:
    missing = blocks * BLOCK - x.shape[0]
    return torch.nn.functional.pad(x, (0, 0, 0, missing)) if missing else x


def from_gguf(quantisation: str, data: Tensor) -> QuantisedMatrix | None:
    """What GGUF stores as Q4_0, Q4_1 or Q8_0, without loss; None for other kinds.

    data: `[rows, bytes]` uint8, blocks of 32 weights one behind the other.
    """
    sizes = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}
    if quantisation not in sizes:
        return None
    blocks = _grouped(data, sizes[quantisation])
    scales = _half(blocks[..., 0:2])
    if quantisation == "Q8_0":
        return QuantisedMatrix(
            8, blocks[..., 2:].contiguous().view(torch.int8).flatten(1), scales, None
        )
    minima = _half(blocks[..., 2:4]) if quantisation == "Q4_1" else scales * -8
    nibbles = blocks[..., -16:]
    return QuantisedMatrix(
        4, torch.cat((nibbles & 15, nibbles >> 4), -1).flatten(1), scales, minima
    )


def _half(two_bytes: Tensor) -> Tensor:
    return two_bytes.contiguous().view(torch.float16).squeeze(-1)

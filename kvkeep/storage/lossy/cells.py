"""Coding of keys and values as whole multiples of a step in a basis, in blocks of 256 cells.

Each block is decoded by itself. Cells that differ much from all that the basis was measured on, as
attention sinks do, are stored beside the blocks as they are.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from kvkeep.cache.checks import require
from kvkeep.storage.lossy.basis import CellBasis, GroupBasis
from kvkeep.storage.lossy.packing import MAX_MAGNITUDE, pack, unpack

BLOCK_CELLS = 256
_SINK_POSITIONS = 4  # keys at positions 0 to 3 are stored exactly
_OUTLIER_ENERGY = 16  # times the median: cells of a larger sum of squares are stored exactly
# Added before a coefficient is rounded towards 0. Less than one half: most coefficients are small,
# and a 0 costs less than what it loses.
_ROUNDING = 0.4


@dataclass(frozen=True)
class CodedCells:
    """The keys, or the values, of some cells.

    frames: of each block, see `pack`. exact_cells: `[m]` int32, the indices of cells that are
    stored as they are, ascending. exact: those, `[layers, kv_heads, m, head_dim]`.
    """

    frames: tuple[bytes, ...]
    exact_cells: Tensor
    exact: Tensor


def encode_cells(
    cells: Tensor, positions: Tensor, basis: CellBasis, step: float, rotated: bool
) -> CodedCells:
    """Encode keys or values `[layers, kv_heads, n, head_dim]`.

    positions: `[n]`, of the keys. rotated: they are keys, rotated to their positions.
    """
    exact, groups = list[int](), basis.keys if rotated else basis.values
    with ThreadPoolExecutor(1) as packer:  # packs a block while the next one is multiplied
        futures = list[Future[bytes]]()
        for start in range(0, cells.shape[2], BLOCK_CELLS):
            block_positions = positions[start : start + BLOCK_CELLS]
            block = cells[:, :, start : start + BLOCK_CELLS]
            coefficients = _coefficients(block, block_positions, basis, groups, rotated)
            is_exact = _stored_exactly(coefficients, block_positions)
            coefficients[is_exact] = 0
            exact += (start + is_exact.nonzero().flatten()).tolist()
            integers = _quantise(coefficients, step).T.contiguous().numpy()
            futures.append(packer.submit(pack, integers))
        frames = [future.result() for future in futures]
    indices = torch.tensor(exact, dtype=torch.int32, device="cpu")
    return CodedCells(tuple(frames), indices, cells[:, :, indices.long()].contiguous())


def _stored_exactly(coefficients: Tensor, positions: Tensor) -> Tensor:
    """Return which cells of a block are stored as they are, `[n]` bool."""
    energies = coefficients.square().sum(1)
    is_exact = energies > _OUTLIER_ENERGY * energies.median()
    is_exact |= (positions >= 0) & (positions < _SINK_POSITIONS)
    is_exact |= ~energies.isfinite()
    return is_exact


def decode_cells(
    coded: CodedCells, positions: Tensor, basis: CellBasis, step: float, rotated: bool
) -> Tensor:
    """Return keys or values `[layers, kv_heads, n, head_dim]`. Raises ValueError for other data.

    positions: `[n]`, of the keys. Memory beside the result is that of a block.
    """
    layout, count = basis.layout, len(positions)
    groups = basis.keys if rotated else basis.values
    components = sum(group.components for group in groups)
    require(len(coded.frames) == -(-count // BLOCK_CELLS), f"{len(coded.frames)} blocks of cells")
    shape = layout.layers, layout.kv_heads, count, layout.head_dim
    cells = torch.empty(shape, dtype=layout.dtype, device="cpu")
    for index, frame in enumerate(coded.frames):
        block = slice(index * BLOCK_CELLS, min((index + 1) * BLOCK_CELLS, count))
        integers = unpack(frame, components, block.stop - block.start)
        multiples = torch.from_numpy(integers).T
        _decode_block(cells[:, :, block], multiples, positions[block], basis, step, rotated)
    exact = coded.exact_cells.long()
    if len(exact):
        in_order = bool((exact.diff() > 0).all()) and 0 <= int(exact[0]) <= int(exact[-1]) < count
        require(in_order, "the indices of exact cells are not those of cells")
        cells[:, :, exact] = coded.exact
    return cells


def _coefficients(
    cells: Tensor,
    positions: Tensor,
    basis: CellBasis,
    groups: Sequence[GroupBasis],
    rotated: bool,
) -> Tensor:
    """Return the coefficients of a block of cells, `[n, components]` float32."""
    parts = list[Tensor]()
    matrices = basis.matrices["keys" if rotated else "values"]
    for layers, group, (encode, _) in zip(basis.layer_groups(), groups, matrices, strict=True):
        vectors = cells[layers].float()
        if rotated:
            vectors = rotate(vectors, basis.frequencies[layers], -positions)
        rows = vectors.permute(2, 0, 1, 3).reshape(len(positions), -1)
        parts.append(((rows - group.mean).to(encode.dtype) @ encode).float())
    return torch.cat(parts, 1)


def _decode_block(
    out: Tensor,
    multiples: Tensor,
    positions: Tensor,
    basis: CellBasis,
    step: float,
    rotated: bool,
) -> None:
    """Write the cells of multiples `[n, components]` to `[layers, kv_heads, n, head_dim]`."""
    first, count = 0, len(positions)
    groups = basis.keys if rotated else basis.values
    matrices = basis.matrices["keys" if rotated else "values"]
    for layers, group, (_, decode) in zip(basis.layer_groups(), groups, matrices, strict=True):
        part = multiples[:, first : first + group.components]
        first += group.components
        used = _used_components(part)
        rows = (part[:, :used].to(decode.dtype) @ decode[:used]).float()
        rows = torch.add(group.mean, rows, alpha=step)
        num_layers, heads, _, head_dim = out[layers].shape
        vectors = rows.view(count, num_layers, heads, head_dim).permute(1, 2, 0, 3)
        if rotated:
            vectors = rotate(vectors, basis.frequencies[layers], positions)
        out[layers] = vectors


def _used_components(multiples: Tensor) -> int:
    """Return how many of the first components have all numbers that are not 0."""
    used = multiples.any(0).nonzero()
    return int(used[-1]) + 1 if len(used) else 0


def _quantise(coefficients: Tensor, step: float) -> Tensor:
    """Return the multiples of a step, int16."""
    magnitudes = (coefficients.abs() / step + _ROUNDING).floor_().clamp_(max=MAX_MAGNITUDE)
    return torch.copysign(magnitudes, coefficients).to(torch.int16)


def rotate(vectors: Tensor, frequencies: Tensor, positions: Tensor) -> Tensor:
    """Rotate `[layers, kv_heads, n, head_dim]` by positions `[n]`, as RoPE in the half layout."""
    angles = positions.double()[:, None] * frequencies[:, None, None]  # [layers, 1, n, pairs]
    cosine, sine = angles.cos().float(), angles.sin().float()
    first, second = vectors.chunk(2, -1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)

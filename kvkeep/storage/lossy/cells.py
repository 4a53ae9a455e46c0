"""Coding of keys and values as whole multiples of a step in a basis, in blocks of 256 cells.

Each block is decoded by itself. Cells that differ much from all that the basis was measured on, as
attention sinks do, are stored beside the blocks as they are.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from kvkeep.cache.checks import require
from kvkeep.runtime.cpu import compute_in_one_thread
from kvkeep.storage.lossy.basis import CellBasis, GroupBasis
from kvkeep.storage.lossy.packing import MAX_MAGNITUDE, pack, unpack

BLOCK_CELLS = 256
_TILE_CELLS = 4 * BLOCK_CELLS  # that are encoded together
# Each thread codes blocks of its own, with torch's operations in that thread alone: so the numbers
# of a block stay in its core's cache. Each takes some 30 MB.
_MOST_THREADS = 8
_SINK_POSITIONS = 4  # keys at positions 0 to 3 are stored exactly
_OUTLIER_ENERGY = 16  # times the median: cells of a larger sum of squares are stored exactly
# Added before a coefficient is rounded towards 0. Less than one half: most coefficients are small,
# and a 0 costs less than what it loses.
_ROUNDING = 0.4
# Components with a larger multiple are computed in float32 where others are in bfloat16: that would
# round them by up to a whole step, once more with each save of restored cells.
_MAX_BFLOAT16_MULTIPLE = 32


@dataclass(frozen=True)
class CodedCells:
    """The keys, or the values, of some cells.

    frames: of each block, see `pack`. exact_cells: `[m]` int32, the indices of cells that are
    stored as they are, ascending. exact: those, `[layers, kv_heads, m, head_dim]`.
    """

    frames: tuple[bytes, ...]
    exact_cells: Tensor
    exact: Tensor


@dataclass(frozen=True)
class _Rotation:
    """Rotations to positions, as RoPE in the half layout.

    cosine, sine: `[layers, 1, n, head_dim / 2]` float32; of one layer if all rotate alike.
    """

    cosine: Tensor
    sine: Tensor

    @classmethod
    def to(cls, positions: Tensor, frequencies: Tensor) -> "_Rotation":
        """frequencies: `[layers, head_dim / 2]`."""
        if bool((frequencies == frequencies[:1]).all()):
            frequencies = frequencies[:1]
        angles = positions.double()[:, None] * frequencies[:, None, None]
        return cls(angles.cos().float(), angles.sin().float())

    def of_layers(self, layers: slice) -> "_Rotation":
        if len(self.cosine) == 1:
            return self
        return _Rotation(self.cosine[layers], self.sine[layers])

    def turn(self, vectors: Tensor) -> Tensor:
        """Rotate `[layers, kv_heads, n, head_dim]`."""
        first, second = vectors.chunk(2, -1)
        turned = torch.empty_like(vectors)
        half = first.shape[-1]
        torch.mul(first, self.cosine, out=turned[..., :half]).addcmul_(second, self.sine, value=-1)
        torch.mul(second, self.cosine, out=turned[..., half:]).addcmul_(first, self.sine)
        return turned


def rotate(vectors: Tensor, frequencies: Tensor, positions: Tensor) -> Tensor:
    """Rotate `[layers, kv_heads, n, head_dim]` by positions `[n]`, as RoPE in the half layout."""
    return _Rotation.to(positions, frequencies).turn(vectors)


def encode_cells(
    cells: Tensor, positions: Tensor, basis: CellBasis, step: float, rotated: bool
) -> CodedCells:
    """Encode keys or values `[layers, kv_heads, n, head_dim]`.

    positions: `[n]`, of the keys. rotated: they are keys, rotated to their positions.
    """
    exact, frames = list[int](), list[bytes]()

    @torch.inference_mode()
    def encode_tile(start: int) -> tuple[list[int], list[bytes]]:
        tile = slice(start, start + _TILE_CELLS)
        parts = cells[:, :, tile], positions[tile]
        integers, is_exact = _quantised(*parts, basis, step, rotated)
        indices = start + is_exact.nonzero().flatten()
        return indices.tolist(), [pack(block.numpy()) for block in _blocks(integers)]

    with _threads() as threads:
        for indices, packed in threads.map(encode_tile, range(0, len(positions), _TILE_CELLS)):
            exact += indices
            frames += packed
    exact_cells = torch.tensor(exact, dtype=torch.int32, device="cpu")
    return CodedCells(tuple(frames), exact_cells, cells[:, :, exact_cells.long()].contiguous())


def _threads() -> ThreadPoolExecutor:
    count = min(torch.get_num_threads(), _MOST_THREADS)
    return ThreadPoolExecutor(count, "kvkeep-codec", initializer=compute_in_one_thread)


def _quantised(
    cells: Tensor, positions: Tensor, basis: CellBasis, step: float, rotated: bool
) -> tuple[Tensor, Tensor]:
    """Return a tile's multiples of a step, and which cells are to be stored as they are.

    Returns `[components, n]` int16, 0 for those cells, and `[n]` bool.
    """
    groups, count = basis.keys if rotated else basis.values, len(positions)
    rotation = _Rotation.to(-positions, basis.frequencies) if rotated else None
    energies = torch.zeros(count, dtype=torch.float32, device="cpu")
    components = sum(group.components for group in groups)
    integers = torch.empty(components, count, dtype=torch.int16, device="cpu")
    matrices, first = basis.matrices["keys" if rotated else "values"], 0
    for layers, group, (encode, _) in zip(basis.layer_groups(), groups, matrices, strict=True):
        vectors = cells[layers].float()
        if rotation is not None:
            vectors = rotation.of_layers(layers).turn(vectors)
        vectors = vectors - group.mean.view(*vectors.shape[:2], 1, -1)  # not in place: may be cells
        rows = torch.empty(count, encode.shape[1], dtype=encode.dtype, device="cpu")
        turned = vectors.permute(2, 0, 1, 3)
        rows.view(turned.shape).copy_(turned)
        # Transposed, since integers are packed component by component.
        multiples = (encode @ rows.T).float()
        if encode.dtype != torch.float32:
            magnitudes = torch.maximum(multiples.amax(1), -multiples.amin(1))
            large = magnitudes > _MAX_BFLOAT16_MULTIPLE * step
            multiples[large] = group.encode.T[large].float() @ turned.reshape(count, -1).T
        multiples *= 1 / step
        energies += multiples.square().sum(0)
        multiples.add_(multiples.sign(), alpha=_ROUNDING)
        multiples.clamp_(-MAX_MAGNITUDE, MAX_MAGNITUDE)
        integers[first : first + group.components] = multiples  # rounds towards 0
        first += group.components
    is_exact = _stored_exactly(energies, positions)
    integers[:, is_exact] = 0
    return integers, is_exact


def _blocks(integers: Tensor) -> list[Tensor]:
    """Return the blocks of a tile's integers `[components, n]`."""
    starts = range(0, integers.shape[1], BLOCK_CELLS)
    return [integers[:, start : start + BLOCK_CELLS] for start in starts]


def _stored_exactly(energies: Tensor, positions: Tensor) -> Tensor:
    """Return which cells of a tile are stored as they are, `[n]` bool."""
    is_exact = energies > _OUTLIER_ENERGY * energies.median()
    is_exact |= (positions >= 0) & (positions < _SINK_POSITIONS)
    is_exact |= ~energies.isfinite()
    return is_exact


def decode_cells(
    coded: CodedCells, positions: Tensor, basis: CellBasis, step: float, rotated: bool
) -> Tensor:
    """Return keys or values `[layers, kv_heads, n, head_dim]`. Raises ValueError for other data.

    positions: `[n]`, of the keys. Memory beside the result is that of a block for each thread.
    """
    layout, count = basis.layout, len(positions)
    groups = basis.keys if rotated else basis.values
    components = sum(group.components for group in groups)
    require(len(coded.frames) == -(-count // BLOCK_CELLS), f"{len(coded.frames)} blocks of cells")
    shape = layout.layers, layout.kv_heads, count, layout.head_dim
    cells = torch.empty(shape, dtype=layout.dtype, device="cpu")

    @torch.inference_mode()
    def decode_block(index: int) -> None:
        block = slice(index * BLOCK_CELLS, min((index + 1) * BLOCK_CELLS, count))
        integers = unpack(coded.frames[index], components, block.stop - block.start)
        parts = torch.from_numpy(integers), positions[block]
        _decode_block(cells[:, :, block], *parts, basis, step, rotated)

    with _threads() as threads:
        for _ in threads.map(decode_block, range(len(coded.frames))):
            pass  # raises what one raised
    exact = coded.exact_cells.long()
    if len(exact):
        in_order = bool((exact.diff() > 0).all()) and 0 <= int(exact[0]) <= int(exact[-1]) < count
        require(in_order, "the indices of exact cells are not those of cells")
        cells[:, :, exact] = coded.exact
    return cells


def _decode_block(
    out: Tensor,
    integers: Tensor,
    positions: Tensor,
    basis: CellBasis,
    step: float,
    rotated: bool,
) -> None:
    """Write the cells of integers `[components, n]` to `[layers, kv_heads, n, head_dim]`."""
    first, count = 0, len(positions)
    groups = basis.keys if rotated else basis.values
    rotation = _Rotation.to(positions, basis.frequencies) if rotated else None
    matrices = basis.matrices["keys" if rotated else "values"]
    for layers, group, (_, decode) in zip(basis.layer_groups(), groups, matrices, strict=True):
        part = integers[first : first + group.components]
        first += group.components
        rows = _decoded_rows(part, group, decode)
        num_layers, heads, _, head_dim = out[layers].shape
        vectors = rows.view(count, num_layers, heads, head_dim).permute(1, 2, 0, 3)
        means = group.mean.view(num_layers, heads, 1, head_dim)
        vectors = torch.add(means, vectors, alpha=step)
        if rotation is not None:
            vectors = rotation.of_layers(layers).turn(vectors)
        out[layers] = vectors


def _decoded_rows(integers: Tensor, group: GroupBasis, decode: Tensor) -> Tensor:
    """Return the vectors of integers `[components, n]` without the mean, in steps: `[n, width]`."""
    magnitudes = torch.maximum(integers.amax(1).int(), -integers.amin(1).int())
    count = _used_components(magnitudes)
    integers = integers[:count]
    if decode.dtype == torch.float32:
        return integers.float().T @ decode[:count]
    large = magnitudes[:count] > _MAX_BFLOAT16_MULTIPLE
    small = integers.to(decode.dtype).mul_((~large).to(decode.dtype).unsqueeze(1))
    rows = (small.T @ decode[:count]).float()
    return rows.addmm_(integers[large].float().T, group.decode[:count][large].float())


def _used_components(magnitudes: Tensor) -> int:
    """Return how many of the first components have all numbers that are not 0.

    magnitudes: the largest absolute value of each component.
    """
    used = magnitudes.nonzero()
    return int(used[-1]) + 1 if len(used) else 0

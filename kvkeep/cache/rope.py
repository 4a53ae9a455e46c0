"""Rotary position embedding (RoFormer, arXiv:2104.09864) at any position, and position maps.

Angles are computed in float64 for each step from the positions in it, so positions have no upper
limit and no table is computed ahead.
"""

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from kvkeep.cache.shallow_copy import shallow_copy


@dataclass(frozen=True)
class PositionMap:
    """The position `m(t)` that a query at time `t` takes towards the cells of a segment.

    RoPE attention depends only on the distance from the key's position to the query's. So keys keep
    the rotation with which they were written, and the distance of a segment is chosen by moving the
    query:

        m(t) = t // group + offset

    offset: negative if cells between the segment and the query were removed, positive if cells were
        inserted.
    group: times per position; above 1 for the far cells of self-extend, whose keys are rotated to
        their positions divided by it.
    """

    offset: int = 0
    group: int = 1

    def __call__(self, time: int) -> int:
        return time // self.group + self.offset

    def closer_by(self, removed_cells: int) -> "PositionMap":
        """Return the map after cells before the query were removed; negative if inserted."""
        return PositionMap(self.offset - removed_cells, self.group)


@dataclass(frozen=True)
class Rotation:
    """Cosines and sines for `n` positions; both `[..., n, 1, head_dim]`, float32.

    The sine of the first half is negated, so that rotating is two products and a sum.
    """

    cosine: Tensor
    sine: Tensor


class Rope:
    """A table of RoPE frequencies in the half layout: element i pairs with i + head_dim / 2.

    inverse_frequencies: radians per position for each pair, `[head_dim / 2]`; float64 on the CPU,
        because some devices lack float64.
    device: of the rotations that are returned.
    unrotated_layers: indices of the cache's layers without RoPE (NoPE, arXiv:2305.19466).
    """

    def __init__(
        self,
        inverse_frequencies: tuple[float, ...],
        device: torch.device,
        unrotated_layers: Collection[int] = (),
    ):
        self.unrotated_layers = frozenset(unrotated_layers)
        self.inverse_frequencies = torch.tensor(
            inverse_frequencies, dtype=torch.float64, device="cpu"
        )
        self._device = device

    def rotation_at(self, positions: list[int] | range | Tensor) -> Rotation:
        """Return the rotation to the given positions (of either sign), `[..., n]` of them."""
        float_positions = torch.as_tensor(positions, dtype=torch.float64, device="cpu")
        angles = float_positions[..., None, None] * self.inverse_frequencies
        cosine, sine = angles.cos().float(), angles.sin().float()
        cosine, sine = torch.cat((cosine, cosine), -1), torch.cat((-sine, sine), -1)
        return Rotation(cosine.to(self._device), sine.to(self._device))

    def shift(self, keys: Tensor, shifts: Tensor) -> Tensor:
        """Return keys `[layers, kv_heads, n, head_dim]` rotated by `shifts` further positions.

        shifts: `[n]` or `[layers, kv_heads, n]`; 0 in layers without RoPE, as from
        `Cells.key_shifts`.
        """
        return rotate(keys.unsqueeze(-2), self.rotation_at(shifts)).squeeze(-2)

    def for_layers(self, layers: range) -> "Rope":
        """Return the table for a cache that has only these layers."""
        rope = shallow_copy(self)
        unrotated = self.unrotated_layers
        rope.unrotated_layers = frozenset(i for i, layer in enumerate(layers) if layer in unrotated)
        return rope

    def rotate_layer(self, layer: int, x: Tensor, rotation: Rotation) -> Tensor:
        """Rotate one layer's queries or keys, `[..., n, heads, head_dim]`."""
        return x if layer in self.unrotated_layers else rotate(x, rotation)

    def rotate_layers(self, x: Tensor, rotation: Rotation) -> Tensor:
        """Rotate the queries or keys of all layers, `[layers, ..., n, heads, head_dim]`."""
        rotated = rotate(x, rotation)
        for layer in self.unrotated_layers:
            rotated[layer] = x[layer]
        return rotated


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate `x: [..., n, heads, head_dim]` in float32 and return it in its own dtype."""
    swapped = x.roll(x.shape[-1] // 2, -1)
    return torch.addcmul(x * rotation.cosine, swapped, rotation.sine).to(x.dtype)

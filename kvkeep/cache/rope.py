"""Rotary position embedding (RoFormer, arXiv:2104.09864): tables for any position.

Angles are computed in float64 for each step from the positions in it, so positions have no upper
limit and nothing is tabulated ahead.
"""

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from kvkeep.cache.shallow_copy import shallow_copy


@dataclass(frozen=True)
class Rotation:
    """Cosines and sines for `n` positions; both `[..., n, 1, head_dim]`, float32.

    The sine of the first half is negated, so that rotating is two products and a sum.
    """

    cosine: Tensor
    sine: Tensor


class Rope:
    """A fixed frequency table in the half layout: element i is paired with i + head_dim / 2.

    inverse_frequencies: radians per position for each pair, `[head_dim / 2]`; float64 on the CPU,
        since not every device has it. device: where rotations are wanted. unrotated: layers of
        the cache that rotate nothing (NoPE, arXiv:2305.19466), by their indices there.
    """

    def __init__(
        self,
        inverse_frequencies: tuple[float, ...],
        device: torch.device,
        unrotated: Collection[int] = (),
    ):
        self.unrotated = frozenset(unrotated)
        self.inverse_frequencies = torch.tensor(
            inverse_frequencies, dtype=torch.float64, device="cpu"
        )
        self._device = device

    def at(self, positions: list[int] | range | Tensor) -> Rotation:
        """The rotation for the given positions (of either sign), `[..., n]` of them."""
        where = torch.as_tensor(positions, dtype=torch.float64, device="cpu")
        angles = where[..., None, None] * self.inverse_frequencies
        cosine, sine = angles.cos().float(), angles.sin().float()
        return Rotation(
            torch.cat((cosine, cosine), -1).to(self._device),
            torch.cat((-sine, sine), -1).to(self._device),
        )

    def shifted(self, keys: Tensor, by: Tensor) -> Tensor:
        """Keys rotated on, in float32, by a number of positions each, in whichever layer they are.

        keys: `[layers, kv_heads, n, head_dim]`, by: `[n]` or `[layers, kv_heads, n]`; see
        `Cells.turns`.
        """
        return rotate(keys.unsqueeze(-2), self.at(by)).squeeze(-2)

    def of(self, layer: int) -> "Rope":
        """That of one layer alone."""
        alone = shallow_copy(self)
        alone.unrotated = frozenset([0] if layer in self.unrotated else [])
        return alone

    def rotate_layer(self, layer: int, x: Tensor, rotation: Rotation) -> Tensor:
        """`rotate` of one layer's queries or keys, `[..., n, heads, head_dim]`."""
        return x if layer in self.unrotated else rotate(x, rotation)

    def rotate_layers(self, x: Tensor, rotation: Rotation) -> Tensor:
        """The same of all layers at once: `[layers, ..., n, heads, head_dim]`."""
        found = rotate(x, rotation)
        for layer in self.unrotated:
            found[layer] = x[layer]
        return found


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotates `x: [..., n, heads, head_dim]` in float32 and returns it in its own dtype."""
    swapped = x.roll(x.shape[-1] // 2, -1)
    return torch.addcmul(x * rotation.cosine, swapped, rotation.sine).to(x.dtype)

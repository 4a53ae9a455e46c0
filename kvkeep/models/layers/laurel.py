"""A learned way past attention: LAuReL (arXiv:2411.07501), in the low rank that Gemma 3n has."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from kvkeep.models.layers.experts import Product
from kvkeep.models.layers.norms import Norm, norm_of
from kvkeep.models.spec.model_spec import ModelSpec

_PARTS = ("laurel.linear_left", "laurel.linear_right", "laurel.post_laurel_norm")


@dataclass(frozen=True)
class Laurel:
    """left: `[rank, hidden_size]`, right: `[hidden_size, rank]`."""

    left: Product
    right: Product
    norm: Norm

    def __call__(self, x: Tensor, read: Tensor) -> Tensor:
        """The residual stream behind attention, with what went past it.

        x: what attention has added to, read: what it has read; `[n, hidden_size]`.
        """
        past = read + self.norm(self.right(self.left(read)))
        return (x + past) * math.sqrt(0.5)


def laurel_of(
    spec: ModelSpec, layer: int, tensors: Mapping[str, Tensor], product: Callable[[str], Product]
) -> Laurel | None:
    """None where the model has none. product: of a matrix, by its name."""
    if not spec.laurel_rank:
        return None
    left, right, norm = (f"model.layers.{layer}.{name}.weight" for name in _PARTS)
    return Laurel(product(left), product(right), norm_of(spec, tensors[norm]))


def laurel_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Name and shape of what a layer has for it; none where the model has none."""
    rank, hidden = spec.laurel_rank, spec.hidden_size
    if not rank:
        return {}
    shapes = ((rank, hidden), (hidden, rank), (hidden,))
    return {f"{name}.weight": shape for name, shape in zip(_PARTS, shapes, strict=True)}

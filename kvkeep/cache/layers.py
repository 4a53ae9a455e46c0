"""Layers of two kinds in one forward: each attends in the step of the cache that has its cells."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class LayerAttention(Protocol):
    """The attention that a model's forward calls, once for each layer."""

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        """Attend as `Step.attend` does."""


@dataclass(frozen=True)
class LayerPlacement:
    """The cache and the layer in it whose cells a decoder layer reads.

    local: whether that is the cache of local layers. index: the layer's index in that cache.
    """

    local: bool
    index: int


class LayerDispatch:
    """Attention that passes each decoder layer on to the step of the cache that has its cells.

    placements: one for each decoder layer. whole, local: the steps of the two caches.
    """

    def __init__(
        self, placements: Sequence[LayerPlacement], whole: LayerAttention, local: LayerAttention
    ):
        self._placements = placements
        self._steps = whole, local

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        placement = self._placements[layer]
        return self._steps[placement.local].attend(placement.index, q, k, v)

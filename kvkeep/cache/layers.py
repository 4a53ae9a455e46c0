"""Layers of two kinds in one forward: each attends in the step of the cache that has its cells."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class LayerAttention(Protocol):
    """What a forward asks of a step."""

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        """As `Step.attend`."""


@dataclass(frozen=True)
class LayerPlacement:
    """Where a decoder's layer has its cells, or those that it looks at.

    local: in the cache of local layers. index: of the layer there.
    """

    local: bool
    index: int


class LayerDispatch:
    """A step that is told of a decoder's layers by their indices there.

    placements: of all layers. whole, local: the steps of the two caches.
    """

    def __init__(
        self, placements: Sequence[LayerPlacement], whole: LayerAttention, local: LayerAttention
    ):
        self._placements = placements
        self._steps = whole, local

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        place = self._placements[layer]
        return self._steps[place.local].attend(place.index, q, k, v)

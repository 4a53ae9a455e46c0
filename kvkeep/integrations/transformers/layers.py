"""What a model's layers do when they attend: how they were seen to do it, and where it goes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kvkeep.integrations.transformers.interface import Asked
from kvkeep.models.spec.model_spec import ModelSpec


@dataclass(frozen=True)
class Attends:
    """One call of attention in a forward; the i-th is that of the i-th layer of the spec.

    module: which makes it. layer: the index under which its keys were given to the cache. asked: as
    each call of it is. index: of its cells, in the step that the forward is in. own: whether the
    keys are its own, or those of a layer before it. order: of the numbers of a head; None for as
    they are. factor: on queries, where the layer's scale is not that of its group.
    """

    module: nn.Module
    layer: int
    asked: Asked
    index: int
    own: bool
    order: Tensor | None
    factor: float


@dataclass(frozen=True)
class Adapted:
    """What kvkeep must know of a model of transformers.

    spec: its layers that attend, as kvkeep counts them. calls: one for each of them. sinks:
    `[heads]` of each, where they have such. dtype, device: of keys and values.
    kinds: transformers' own layers of a cache, asked what they are and never written to.
    """

    spec: ModelSpec
    calls: Sequence[Attends]
    sinks: Sequence[Tensor]
    dtype: torch.dtype
    device: torch.device
    kinds: Sequence[Any]

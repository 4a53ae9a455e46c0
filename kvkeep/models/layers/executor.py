"""The interface of executors, which compute a step's forward pass, and the one in torch."""

from typing import Protocol

from torch import Tensor

from kvkeep.cache.group_step import GroupStep
from kvkeep.cache.step import ChunkStep, DecodeStep
from kvkeep.models.layers.network import Network
from kvkeep.models.layers.primitives import finite

AnyStep = DecodeStep | ChunkStep | GroupStep


class Executor(Protocol):
    """Computes a model's forward pass over the step that a cache, or a group of them, has opened.

    name: identifies how it computes; executors differ in where they round.
    """

    name: str

    def hidden(self, tokens: Tensor, step: AnyStep) -> Tensor:
        """Evaluate `tokens: [n]` into the step; return `[n, hidden_size]`, normed."""

    def chunk(self, tokens: Tensor, step: ChunkStep, norms: Tensor | None) -> Tensor:
        """Evaluate a chunk as `hidden` does. norms: see `Network.forward`."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Map `[n, hidden_size]` to `[n, vocab]`, float32. Raises NonFiniteLogits."""

    def unpacked(self, name: str) -> Tensor:
        """Return a matrix that is stored packed only, `[rows, columns]`. Raises KeyError."""


class TorchExecutor:
    """Computes every step in torch, on any device: the reference for the others."""

    name = "torch"

    def __init__(self, network: Network):
        self._network = network

    def hidden(self, tokens: Tensor, step: AnyStep) -> Tensor:
        return self._network.forward(tokens, step.layer_attention)

    def chunk(self, tokens: Tensor, step: ChunkStep, norms: Tensor | None) -> Tensor:
        return self._network.forward(tokens, step.layer_attention, norms)

    def logits(self, hidden: Tensor) -> Tensor:
        return finite(self._network.logits(hidden))

    def unpacked(self, name: str) -> Tensor:
        raise KeyError(name)  # everything is a tensor

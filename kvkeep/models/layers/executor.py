"""Who computes a step: chosen once, when a model is loaded."""

from typing import Protocol

from torch import Tensor

from kvkeep.cache import LayerAttention
from kvkeep.cache.group_step import GroupStep
from kvkeep.cache.step import ChunkStep, DecodeStep
from kvkeep.models.layers.finite import checked

AnyStep = DecodeStep | ChunkStep | GroupStep


class Executor(Protocol):
    """Runs a model's forward over the step that a cache, or a group of them, has opened.

    name: of the way in which it computes; others round in other places.
    """

    name: str

    def hidden(self, tokens: Tensor, step: AnyStep) -> Tensor:
        """Evaluates `tokens: [n]` into the step. Returns `[n, hidden_size]`, normed."""

    def chunk(self, tokens: Tensor, step: ChunkStep, lengths: Tensor | None) -> Tensor:
        """The same of a chunk. lengths: `[layers, n]` float32, see `Network.forward`."""

    def logits(self, hidden: Tensor) -> Tensor:
        """`[n, hidden_size]` to `[n, vocab]`, float32, all of them finite: else NonFiniteLogits."""

    def unpacked(self, name: str) -> Tensor:
        """A matrix that is held packed alone, `[rows, columns]`; KeyError if there is none."""


class Network(Protocol):
    """A family's layers in torch."""

    def forward(
        self, tokens: Tensor, step: LayerAttention, lengths: Tensor | None = None
    ) -> Tensor:
        """As `Executor.hidden`, layer by layer: each calls the step's `attend` once.

        lengths: `[layers, n]` float32, filled with the norm of what each layer reads, the residual
        stream, where it is wanted.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """`[n, hidden_size]` to `[n, vocab]`, float32, whatever they are."""


class TorchExecutor:
    """Every step by torch, on any device: the reference for the others."""

    name = "torch"

    def __init__(self, network: Network):
        self._network = network

    def hidden(self, tokens: Tensor, step: AnyStep) -> Tensor:
        return self._network.forward(tokens, step.layer_attention)

    def chunk(self, tokens: Tensor, step: ChunkStep, lengths: Tensor | None) -> Tensor:
        return self._network.forward(tokens, step.layer_attention, lengths)

    def logits(self, hidden: Tensor) -> Tensor:
        return checked(self._network.logits(hidden))

    def unpacked(self, name: str) -> Tensor:
        raise KeyError(name)  # all are tensors

"""Decoding on CUDA: the forward is recorded once and replayed for each token.

A small model's decode step is hundreds of small kernels, and launching them takes longer than
running them. Replayed as a CUDA graph they are launched at once.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from kvkeep.cache.static import Geometry, StaticStep, geometry
from kvkeep.cache.step import ChunkStep, DecodeStep
from kvkeep.models.layers.executor import AnyStep, Network
from kvkeep.models.layers.finite import checked

Forward = Callable[[Tensor, StaticStep], Tensor]


class GraphExecutor:
    """By torch, but for decode steps of a full ring, which are replayed."""

    name = "CUDA graphs"

    def __init__(self, network: Network):
        self._network = network
        self.graphs = DecodeGraphs(network.forward)

    def hidden(self, tokens: Tensor, step: AnyStep) -> Tensor:
        if isinstance(step, DecodeStep):
            replayed = self.graphs.hidden(tokens, step)
            if replayed is not None:
                return replayed
        return self._network.forward(tokens, step.layer_attention)

    def chunk(self, tokens: Tensor, step: ChunkStep, lengths: Tensor | None) -> Tensor:
        return self._network.forward(tokens, step.layer_attention, lengths)

    def logits(self, hidden: Tensor) -> Tensor:
        return checked(self._network.logits(hidden))

    def unpacked(self, name: str) -> Tensor:
        raise KeyError(name)  # all are tensors


class DecodeGraph:
    """One session's decode step, for as long as its geometry stays.

    forward: tokens `[1]` and what attends, to hidden states `[1, hidden_size]`.
    """

    def __init__(self, forward: Forward, step: DecodeStep, known: Geometry):
        self.geometry = known
        self._forward = forward
        self._static = StaticStep(step)
        device = step.newest.layout.device
        self._tokens = torch.zeros(1, dtype=torch.int64, device=device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._hidden: Tensor | None = None

    def hidden(self, tokens: Tensor, step: DecodeStep) -> Tensor:
        """Evaluates a token into the step, which must be of this geometry. `[1, hidden_size]`."""
        self._static.take(step)
        self._tokens.copy_(tokens)
        if self._tokens.device.type != "cuda":
            return self._run()  # the same code, without a graph to replay
        if self._graph is None:
            self._record()
        assert self._graph is not None
        assert self._hidden is not None
        self._graph.replay()
        return self._hidden.clone()

    def _run(self) -> Tensor:
        return self._forward(self._tokens, self._static)

    def _record(self) -> None:
        # Run once beforehand, off the recorded stream, so that libraries set themselves up. It
        # writes the very cell that the replay will write again.
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._run()
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._hidden = self._run()


class DecodeGraphs:
    """The graph of the session that decodes, made when its window has become a full ring.

    The last one is kept: sessions that take turns record theirs anew, and no session's memory is
    held for longer than until another one decodes.
    """

    def __init__(self, forward: Forward):
        self.forward = forward
        self._last: DecodeGraph | None = None
        self._seen: Geometry | None = None

    def hidden(self, tokens: Tensor, step: DecodeStep) -> Tensor | None:
        """As `DecodeGraph.hidden`; None where this step is not worth or not fit for a graph."""
        known, before = geometry(step), self._seen
        self._seen = known
        if known is None or known != before:
            self._last = None
            return None
        if self._last is None or self._last.geometry != known:
            self._last = DecodeGraph(self.forward, step, known)
        return self._last.hidden(tokens, step)

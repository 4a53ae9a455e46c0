"""CUDA graphs: the decode step's forward pass, recorded once and replayed for each token.

A small model's decode step is hundreds of small kernels, and launching them one by one takes longer
than running them. A CUDA graph launches all of them at once.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from kvkeep.cache.static import Geometry, StaticStep, geometry
from kvkeep.cache.step import DecodeStep
from kvkeep.models.layers.executor import AnyStep, TorchExecutor
from kvkeep.models.layers.network import Network

Forward = Callable[[Tensor, StaticStep], Tensor]


class GraphExecutor(TorchExecutor):
    """Computes in torch, and replays decode steps of a full ring."""

    name = "CUDA graphs"

    def __init__(self, network: Network):
        super().__init__(network)
        self.graphs = DecodeGraphs(network.forward)

    def hidden(self, tokens: Tensor, step: AnyStep) -> Tensor:
        if isinstance(step, DecodeStep):
            replayed = self.graphs.hidden(tokens, step)
            if replayed is not None:
                return replayed
        return super().hidden(tokens, step)


class DecodeGraph:
    """One session's decode step, valid while its geometry stays the same.

    forward: maps tokens `[1]` and the step to hidden states `[1, hidden_size]`.
    """

    def __init__(self, forward: Forward, step: DecodeStep, geometry: Geometry):
        self.geometry = geometry
        self._forward = forward
        self._static = StaticStep(step)
        device = step.newest.layout.device
        self._tokens = torch.zeros(1, dtype=torch.int64, device=device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._hidden: Tensor | None = None

    def hidden(self, tokens: Tensor, step: DecodeStep) -> Tensor:
        """Evaluate a token into a step of this geometry; return `[1, hidden_size]`."""
        self._static.load(step)
        self._tokens.copy_(tokens)
        if self._tokens.device.type != "cuda":
            return self._run()  # the same code without a graph
        if self._graph is None:
            self._record()
        assert self._graph is not None
        assert self._hidden is not None
        self._graph.replay()
        return self._hidden.clone()

    def _run(self) -> Tensor:
        return self._forward(self._tokens, self._static)

    def _record(self) -> None:
        # Run once beforehand on a side stream, so that libraries initialise outside the recording.
        # It writes the same cell that the replay writes again.
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._run()
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._hidden = self._run()


class DecodeGraphs:
    """The graph of the session that decodes, recorded once its window is a full ring.

    Only the last graph is kept: sessions that alternate record anew, and a session's memory is held
    until another one decodes.
    """

    def __init__(self, forward: Forward):
        self.forward = forward
        self._last: DecodeGraph | None = None
        self._last_geometry: Geometry | None = None

    def hidden(self, tokens: Tensor, step: DecodeStep) -> Tensor | None:
        """Return hidden states as `DecodeGraph.hidden` does; None if this step has no graph.

        A step gets a graph if its geometry is static and equals that of the step before.
        """
        current, previous = geometry(step), self._last_geometry
        self._last_geometry = current
        if current is None or current != previous:
            self._last = None
            return None
        if self._last is None or self._last.geometry != current:
            self._last = DecodeGraph(self.forward, step, current)
        return self._last.hidden(tokens, step)

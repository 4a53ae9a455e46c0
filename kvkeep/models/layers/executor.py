"""The interface of executors, which compute a step's forward pass, and those in torch.

A small model's decode step is hundreds of small kernels, and launching them one by one takes longer
than running them. A CUDA graph, recorded once and replayed for each token, launches all at once.
"""

from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from kvkeep.cache import LayerAttention
from kvkeep.cache.group_step import GroupStep
from kvkeep.cache.static import ReplayKey, StaticStep, replay_key
from kvkeep.cache.step import ChunkStep, DecodeStep
from kvkeep.models.layers.network import Network
from kvkeep.models.layers.primitives import require_finite
from kvkeep.models.layers.states import StateMixer, StepStates

AnyStep = DecodeStep | ChunkStep | GroupStep


class Executor(Protocol):
    """Computes a model's forward pass over a step, which a cache or a group of caches has opened.

    name: identifies how it computes; executors differ in where they round.
    row_limit: the most tokens of one cache that it evaluates as rows (`row_steps`), each to
        the bit as if it were alone; 0 if it does not.
    rounding: how it rounds a prompt's rows on request ("rows of 8 bits"), so that caches keep cells
        apart; "" if not.
    """

    name: str
    row_limit: int
    rounding: str

    def forward(self, tokens: Tensor, step: AnyStep, input_norms: Tensor | None = None) -> Tensor:
        """Evaluate `tokens: [n]` into the step; return their final hidden states.

        input_norms: for a chunk only, an output buffer, `[layers, n]` float32, which is filled with
            the norm of the residual stream that each layer reads.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """Map `[n, hidden_size]` to `[n, vocab]`, float32. Raises NonFiniteLogits."""

    def unpack_matrix(self, name: str) -> Tensor:
        """Return a matrix that is stored packed only, `[rows, columns]`. Raises KeyError."""


def run_network(
    network: Network,
    tokens: Tensor,
    step: AnyStep,
    attention: LayerAttention,
    input_norms: Tensor | None = None,
    mixer: StateMixer | None = None,
) -> Tensor:
    """Evaluate tokens in torch; see `Executor.forward`. attention: of the step's layers.

    mixer: for state layers, in the place of their modules; or None.
    """
    if network.spec.states is None:
        return network.forward(tokens, attention, input_norms)
    states = StepStates(network.spec.states, step, mixer)
    hidden = network.forward(tokens, attention, input_norms, states)
    states.finish()
    return hidden


class TorchExecutor:
    """Computes every step in torch, on any device: the reference for the others."""

    name = "torch"
    row_limit = 0
    rounding = ""

    def __init__(self, network: Network):
        self._network = network

    def forward(self, tokens: Tensor, step: AnyStep, input_norms: Tensor | None = None) -> Tensor:
        return run_network(self._network, tokens, step, step.layer_attention, input_norms)

    def logits(self, hidden: Tensor) -> Tensor:
        return require_finite(self._network.logits(hidden))

    def unpack_matrix(self, name: str) -> Tensor:
        raise KeyError(name)  # everything is a tensor


class GraphExecutor(TorchExecutor):
    """Computes in torch, and replays decode steps of a full ring by a CUDA graph.

    A step is replayed if its replay key (addresses and ranges of the cells that it reads) equals
    that of the step before. Only the last graph is kept: sessions that alternate record anew, and a
    session's memory is held until another one decodes.
    """

    name = "CUDA graphs"

    def __init__(self, network: Network):
        super().__init__(network)
        self._graph: DecodeGraph | None = None
        self._last_replay_key: ReplayKey | None = None

    def forward(self, tokens: Tensor, step: AnyStep, input_norms: Tensor | None = None) -> Tensor:
        replayed = self.replay(tokens, step) if isinstance(step, DecodeStep) else None
        return super().forward(tokens, step, input_norms) if replayed is None else replayed

    def replay(self, tokens: Tensor, step: DecodeStep) -> Tensor | None:
        """Return hidden states as `forward` does; None if there is no graph for this step."""
        current, previous = replay_key(step), self._last_replay_key
        self._last_replay_key = current
        if current is None or current != previous:
            self._graph = None
            return None
        if self._graph is None:
            self._graph = DecodeGraph(self._network, step)
        return self._graph.forward(tokens, step)


class DecodeGraph:
    """A CUDA graph of one session's decode step, valid while its replay key stays the same."""

    def __init__(self, network: Network, step: DecodeStep):
        self._static_step = StaticStep(step)
        device = step.newest_segment.layout.device
        self._tokens = torch.zeros(1, dtype=torch.int64, device=device)
        self._run_network = partial(network.forward, self._tokens, self._static_step)
        self._recording: tuple[torch.cuda.CUDAGraph, Tensor] | None = None  # and its output

    def forward(self, tokens: Tensor, step: DecodeStep) -> Tensor:
        """Evaluate a token into a step with this replay key; return `[1, hidden_size]`."""
        self._static_step.load(step)
        self._tokens.copy_(tokens)
        if self._tokens.device.type != "cuda":
            return self._run_network()  # the same code without a graph
        if self._recording is None:
            self._recording = self._record()
        graph, hidden = self._recording
        graph.replay()
        return hidden.clone()

    def _record(self) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Record a forward pass. Returns the graph and the tensor that each replay writes."""
        # Run once beforehand on a side stream, so that libraries initialise outside the recording.
        # It writes the same cell that the replay writes again.
        side_stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side_stream):
            self._run_network()
        torch.cuda.current_stream().wait_stream(side_stream)
        graph = torch.cuda.CUDAGraph()
        # Another thread may allocate memory meanwhile, which "global" would forbid to all threads.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            hidden = self._run_network()
        return graph, hidden

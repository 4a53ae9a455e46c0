"""Naive attention over the cells of each KV head, token by token."""

import math

import torch
from torch import Tensor

from kvkeep.cache import Cells, RaggedCells
from kvkeep.models.layers.decoder import Decoder
from kvkeep.models.layers.network import Network
from kvkeep.models.layers.states import StepStates
from kvkeep.session.session import Session


class ListedCells:
    """The cells of a session, listed for each layer and KV head with their biases.

    No code is shared with attention in `kvkeep.cache`: each query attends to all cells at once,
    from the position that each segment's map gives.
    """

    def __init__(self, session: Session, decoder: Decoder):
        cache = session.cache
        self.decoder = decoder
        self.network = Network(self.decoder.spec, self.decoder.tensors)
        self.spec, self.time, self.times = self.decoder.spec, cache.time, [cache.time]
        self.frequencies = torch.tensor(self.spec.rope.inverse_frequencies, dtype=torch.float64)
        self.keys: dict[tuple[int, int], Tensor] = {}
        self.values: dict[tuple[int, int], Tensor] = {}
        self.bias: dict[tuple[int, int], Tensor] = {}
        self.offsets: dict[tuple[int, int], Tensor] = {}
        self.recurrent_states = cache.recurrent_states
        self.cell_layers = self.spec.layers_with_cells(self.spec.groups[0])
        held = [segment.read(0, segment.length) for segment in cache.segments]
        for layer in range(len(self.cell_layers)):
            for head in range(self.spec.kv_heads):
                place = layer, head
                own = [of_head(cells, layer, head) for cells in held]
                self.keys[place] = torch.cat([keys for keys, _, _ in own])
                self.values[place] = torch.cat([values for _, values, _ in own])
                self.bias[place] = torch.cat([bias for _, _, bias in own])
                self.offsets[place] = torch.cat(
                    [
                        torch.full((len(keys),), segment.position_map(0))
                        for segment, (keys, _, _) in zip(cache.segments, own, strict=True)
                    ]
                )

    @torch.inference_mode()
    def feed(self, tokens: list[int]) -> Tensor:
        """Feed tokens; return the logits after the last one."""
        for token in tokens:
            states = None if self.spec.states is None else StepStates(self.spec.states, self)
            hidden = self.network.forward(torch.tensor([token]), self, None, states)
            if states is not None:
                states.finish()
            self.time += 1
        return self.decoder.logits(hidden)[0]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        groups, outs = self.spec.heads // self.spec.kv_heads, []
        for head in range(self.spec.kv_heads):
            place = self.cell_layers.index(layer), head
            key = self.rotate(k[0, head][None], torch.tensor([self.time]))
            self.keys[place] = torch.cat((self.keys[place], key))
            self.values[place] = torch.cat((self.values[place], v[0, head][None]))
            self.bias[place] = torch.cat((self.bias[place], torch.zeros(1)))
            self.offsets[place] = torch.cat((self.offsets[place], torch.zeros(1, dtype=int)))
            positions = self.time + self.offsets[place]
            for query in q[0, head * groups : (head + 1) * groups]:
                rotated_queries = self.rotate(query.expand(len(positions), -1), positions)
                logits = (rotated_queries * self.keys[place]).sum(-1) / math.sqrt(
                    self.spec.head_dim
                )
                weights = (logits + self.bias[place]).softmax(0)
                outs.append((weights[:, None] * self.values[place]).sum(0))
        return torch.cat(outs)[None]

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate `x: [n, head_dim]` as complex numbers in float64."""
        half = x.shape[-1] // 2
        turned = torch.complex(x[..., :half].double(), x[..., half:].double())
        angles = positions.double()[:, None] * self.frequencies
        turned = turned * torch.polar(torch.ones_like(angles), angles)
        return torch.cat((turned.real, turned.imag), -1).to(x.dtype)


def of_head(cells: Cells, layer: int, head: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return keys and values `[n, head_dim]` and biases `[n]` of one layer and KV head.

    For ragged cells, their rows follow from the counts of the heads before them.
    """
    if isinstance(cells, RaggedCells):
        counts, kv_heads = cells.counts.flatten().tolist(), cells.counts.shape[1]
        first = sum(counts[: layer * kv_heads + head])
        rows = slice(first, first + counts[layer * kv_heads + head])
        assert cells.bias is not None
        return cells.keys[rows], cells.values[rows], cells.bias[rows]
    keys, values = cells.keys[layer, head], cells.values[layer, head]
    return keys, values, torch.zeros(len(keys)) if cells.bias is None else cells.bias[layer, head]


def biased(session: Session, seed: int = 0) -> Session:
    """Set a random bias on each compressed cell of each layer and KV head; return the session."""
    random = torch.Generator().manual_seed(seed)
    with torch.inference_mode():
        for segment in session.cache.segments:
            bias = segment.block.slots.bias
            if bias is not None:
                bias.copy_(2 * torch.randn(bias.shape, generator=random))
    return session

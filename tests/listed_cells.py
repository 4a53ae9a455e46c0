"""Attention over cells that each KV head has of its own, written naively, token by token."""

import math

import torch
from torch import Tensor

from kvkeep.models.llama import Decoder, Llama
from kvkeep.session.session import Session


class ListedCells:
    """What a session holds, for each layer and KV head a list of cells with a bias each.

    It shares no code with attention in `kvkeep.cache`: each query looks at all cells at once, each
    from where its segment's map says.
    """

    def __init__(self, session: Session):
        cache = session.cache
        self.decoder: Decoder = session._model.decoder
        self.network = Llama(self.decoder.spec, self.decoder.tensors)
        self.spec, self.time, self.times = self.decoder.spec, cache.time, [cache.time]
        self.frequencies = torch.tensor(self.spec.rope.inverse_frequencies, dtype=torch.float64)
        self.keys: dict[tuple[int, int], Tensor] = {}
        self.values: dict[tuple[int, int], Tensor] = {}
        self.bias: dict[tuple[int, int], Tensor] = {}
        self.offsets: Tensor = torch.cat(
            [torch.full((s.length,), s.map(0)) for s in cache.segments]
        )
        held = [segment.read(0, segment.length) for segment in cache.segments]
        for layer in range(self.spec.layers):
            for head in range(self.spec.kv_heads):
                place = layer, head
                self.keys[place] = torch.cat([cells.keys[place] for cells in held])
                self.values[place] = torch.cat([cells.values[place] for cells in held])
                self.bias[place] = torch.cat(
                    [
                        torch.zeros(len(cells)) if cells.bias is None else cells.bias[place]
                        for cells in held
                    ]
                )

    @torch.inference_mode()
    def feed(self, tokens: list[int]) -> Tensor:
        """The logits after the last of them."""
        for token in tokens:
            hidden = self.network.forward(torch.tensor([token]), self)
            self.time += 1
            self.offsets = torch.cat((self.offsets, torch.zeros(1, dtype=torch.int64)))
        return self.decoder.logits(hidden)[0]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        groups, outs = self.spec.heads // self.spec.kv_heads, []
        where = self.time + torch.cat((self.offsets, torch.zeros(1, dtype=torch.int64)))
        for head in range(self.spec.kv_heads):
            place, key = (layer, head), self.turned(k[0, head][None], torch.tensor([self.time]))
            self.keys[place] = torch.cat((self.keys[place], key))
            self.values[place] = torch.cat((self.values[place], v[0, head][None]))
            self.bias[place] = torch.cat((self.bias[place], torch.zeros(1)))
            for query in q[0, head * groups : (head + 1) * groups]:
                looking = self.turned(query.expand(len(where), -1), where)
                logits = (looking * self.keys[place]).sum(-1) / math.sqrt(self.spec.head_dim)
                weights = (logits + self.bias[place]).softmax(0)
                outs.append((weights[:, None] * self.values[place]).sum(0))
        return torch.cat(outs)[None]

    def turned(self, x: Tensor, positions: Tensor) -> Tensor:
        """x: `[n, head_dim]`, turned as complex numbers in float64."""
        half = x.shape[-1] // 2
        turned = torch.complex(x[..., :half].double(), x[..., half:].double())
        angles = positions.double()[:, None] * self.frequencies
        turned = turned * torch.polar(torch.ones_like(angles), angles)
        return torch.cat((turned.real, turned.imag), -1).to(x.dtype)


def biased(session: Session, seed: int = 0) -> Session:
    """The session with another bias on each compressed cell of each layer and KV head."""
    random = torch.Generator().manual_seed(seed)
    with torch.inference_mode():
        for segment in session.cache.segments:
            bias = segment.block.slots.bias
            if bias is not None:
                bias.copy_(2 * torch.randn(bias.shape, generator=random))
    return session

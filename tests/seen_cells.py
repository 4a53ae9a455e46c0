"""What the newest token must have found, computed anew in float32 from the cells that it saw."""

import math

import torch
from torch import Tensor

from kvkeep.model import Model
from kvkeep.models.llama import Llama
from kvkeep.session.session import Session


class SeenCells:
    """All cells of a session, and a look of the newest token at them from where each segment says.

    It shares no code with attention in `kvkeep.cache`. The last call must have evaluated the last
    token alone, and compressed nothing after it.

    exact: the model in float32. keys, values: `[layers, kv_heads, n, head_dim]`, `bias` likewise.
    where: `[n]`, the position that the token takes towards each cell.
    """

    def __init__(self, session: Session, exact: Model):
        memory, cache = session._memory, session.cache
        self.spec, self.decoder = exact.spec, exact.decoder
        self.network = Llama(self.spec, self.decoder.tensors)
        self.frequencies = torch.tensor(self.spec.rope.inverse_frequencies, dtype=torch.float64)
        self.token, self.time = memory.tokens[-1], cache.time - 1
        held = [segment.read(0, segment.length) for segment in cache.segments]
        plain = [cells.restored(torch.float32) for cells in held]
        assert int(held[-1].serials[-1]) == memory.serials[-1]
        shape = (self.spec.layers, self.spec.kv_heads)
        biases = [torch.zeros(*shape, len(c)) if c.bias is None else c.bias for c in plain]
        self.keys = torch.cat([c.keys.float() for c in plain], 2)
        self.values = torch.cat([c.values.float() for c in plain], 2)
        self.bias = torch.cat(biases, 2)
        self.where = torch.cat([torch.full((s.length,), s.map(self.time)) for s in cache.segments])
        self.off = 0.0

    @torch.inference_mode()
    def logits(self) -> Tensor:
        """`[vocab]`; `off` is then how far its own keys and values are from these, at most."""
        hidden = self.network.forward(torch.tensor([self.token]), self)
        return self.decoder.logits(hidden)[0]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        key = self._turned(k, torch.full((1,), self.time))[0]
        for stored, evaluated in ((self.keys[layer], key), (self.values[layer], v[0])):
            self.off = max(self.off, float((stored[:, -1] - evaluated).abs().max()))
        groups = self.spec.heads // self.spec.kv_heads
        keys, values = (x[layer].repeat_interleave(groups, 0) for x in (self.keys, self.values))
        queries = self._turned(q.expand(len(self.where), -1, -1), self.where)
        scores = torch.einsum("nhd,hnd->hn", queries, keys) / math.sqrt(self.spec.head_dim)
        weights = (scores + self.bias[layer].repeat_interleave(groups, 0)).softmax(-1)
        return torch.einsum("hn,hnd->hd", weights, values).reshape(1, -1)

    def _turned(self, x: Tensor, positions: Tensor) -> Tensor:
        """x: `[n, heads, head_dim]`, turned as complex numbers in float64."""
        half = x.shape[-1] // 2
        turned = torch.complex(x[..., :half].double(), x[..., half:].double())
        angles = positions.double()[:, None] * self.frequencies
        turned = turned * torch.polar(torch.ones_like(angles), angles)[:, None]
        return torch.cat((turned.real, turned.imag), -1).float()

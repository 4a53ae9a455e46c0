"""The newest token's logits, computed again in float32 from the cells that it saw."""

import itertools
import math

import torch
from listed_cells import of_head
from torch import Tensor

from kvkeep.model import Model
from kvkeep.models.layers.network import Network
from kvkeep.session.session import Session


class SeenCells:
    """All cells of a session, to which the newest token attends by each segment's position map.

    No code is shared with attention in `kvkeep.cache`. The last call must have evaluated the last
    token alone, and compressed nothing after it.

    exact: the model in float32. For each layer and KV head, keys, values: `[n, head_dim]`; bias:
    `[n]`; where: `[n]`, the position that the token takes towards each cell.
    off: how far the token's own keys and values are from the stored ones at most.
    """

    def __init__(self, session: Session, exact: Model):
        memory, cache = session.core.memory, session.cache
        self.spec, self.decoder = exact.spec, exact.decoder
        self.network = Network(self.spec, self.decoder.tensors)
        self.frequencies = torch.tensor(self.spec.rope.inverse_frequencies, dtype=torch.float64)
        self.token, self.time = memory.tokens[-1], cache.time - 1
        held = [segment.read(0, segment.length) for segment in cache.segments]
        plain = [cells.dequantise(torch.float32) for cells in held]
        assert int(held[-1].serials[-1]) == memory.serials[-1]
        self.keys, self.values, self.bias, self.where = ({} for _ in range(4))
        for place in itertools.product(range(self.spec.layers), range(self.spec.kv_heads)):
            own = [of_head(cells, *place) for cells in plain]
            self.keys[place] = torch.cat([keys.float() for keys, _, _ in own])
            self.values[place] = torch.cat([values.float() for _, values, _ in own])
            self.bias[place] = torch.cat([bias for _, _, bias in own])
            seen = zip(cache.segments, own, strict=True)
            self.where[place] = torch.cat(
                [torch.full((len(keys),), s.position_map(self.time)) for s, (keys, _, _) in seen]
            )
        self.off = 0.0

    @torch.inference_mode()
    def logits(self) -> Tensor:
        """Return the logits, `[vocab]`, and set `off`."""
        hidden = self.network.forward(torch.tensor([self.token]), self)
        return self.decoder.logits(hidden)[0]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        key = self._rotate(k, torch.full((1,), self.time))[0]
        groups, outs = self.spec.heads // self.spec.kv_heads, []
        for head in range(self.spec.kv_heads):
            keys, values = self.keys[layer, head], self.values[layer, head]
            for stored, evaluated in ((keys, key[head]), (values, v[0, head])):
                self.off = max(self.off, float((stored[-1] - evaluated).abs().max()))
            positions, own = (
                self.where[layer, head],
                q[:, head * groups : (head + 1) * groups],
            )
            queries = self._rotate(own.expand(len(positions), -1, -1), positions)
            scores = torch.einsum("nhd,nd->hn", queries, keys) / math.sqrt(self.spec.head_dim)
            outs.append((scores + self.bias[layer, head]).softmax(-1) @ values)
        return torch.cat(outs).reshape(1, -1)

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate `x: [n, heads, head_dim]` as complex numbers in float64."""
        half = x.shape[-1] // 2
        pairs = torch.complex(x[..., :half].double(), x[..., half:].double())
        angles = positions.double()[:, None] * self.frequencies
        pairs = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
        return torch.cat((pairs.real, pairs.imag), -1).float()

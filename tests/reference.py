"""A naive StreamingLLM for comparison: raw keys, all rotated again at each token."""

import torch
from torch import Tensor

from kvkeep.models.layers.decoder import Decoder
from kvkeep.models.layers.executor import run_network
from kvkeep.models.layers.network import Network


class NaiveStreamingCache:
    """Raw keys of the first `keep` tokens and the newest; a cell's position is its index.

    A local layer keeps only the newest tokens of its window. Tokens are evaluated one at a time.
    No code is shared with `kvkeep.cache`: rotation uses complex numbers, attention an explicit
    softmax.
    """

    def __init__(self, decoder: Decoder, max_kv_size: int, keep: int):
        self.spec, self.tensors = decoder.spec, decoder.tensors
        self.max_kv_size, self.keep = max_kv_size, keep
        self.keys: list[list[Tensor]] = [[] for _ in range(self.spec.layers)]
        self.values: list[list[Tensor]] = [[] for _ in range(self.spec.layers)]
        self.recurrent_states: dict[str, Tensor] = {}  # of layers that keep one

    def rotated(self, layer: int, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate `x: [n, heads, head_dim]` to positions."""
        if layer in self.spec.unrotated_layers:
            return x
        frequencies = self.spec.group_of(layer).rope.inverse_frequencies
        half = x.shape[-1] // 2
        pairs = torch.complex(x[..., :half].double(), x[..., half:].double())
        angles = positions.double()[:, None] * torch.tensor(frequencies, dtype=torch.float64)
        pairs = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
        return torch.cat((pairs.real, pairs.imag), -1).to(x.dtype)

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        spec, group = self.spec, self.spec.group_of(layer)
        source = spec.kv_source(layer)
        keys, values = self.keys[source], self.values[source]
        if k is not None and v is not None:
            keys.append(k[0])
            values.append(v[0])
        size, keep = self.max_kv_size, self.keep
        if group.window is not None:
            size, keep = min(group.window, size), 0
        if len(keys) > size:
            del keys[keep], values[keep]
        n, groups = len(keys), spec.heads // group.kv_heads
        all_keys = self.rotated(layer, torch.stack(keys), torch.arange(n))
        query = self.rotated(layer, q, torch.tensor([n - 1]))[0]
        scores = torch.einsum("hd,nhd->hn", query, all_keys.repeat_interleave(groups, 1)).float()
        scores = scores * group.softmax_scale
        if spec.attention_softcap:
            scores = spec.attention_softcap * (scores / spec.attention_softcap).tanh()
        if spec.sinks:
            sinks = self.tensors[f"model.layers.{layer}.self_attn.sinks"].float()
            scores = torch.cat((scores, sinks[:, None]), 1)
        weights = scores.softmax(-1)[:, :n].to(q.dtype)
        all_values = torch.stack(values).repeat_interleave(groups, 1)
        return torch.einsum("hn,nhd->hd", weights, all_values).reshape(1, -1)


@torch.inference_mode()
def streaming_logits(
    decoder: Decoder, tokens: list[int], max_kv_size: int, keep: int, last: int
) -> Tensor:
    """Return the logits of the last tokens, `[last, vocab]`, evaluated token by token."""
    cache = NaiveStreamingCache(decoder, max_kv_size, keep)
    network = Network(decoder.spec, decoder.tensors)
    hidden = [run_network(network, torch.tensor([token]), cache, cache) for token in tokens]
    return decoder.logits(torch.cat(hidden[-last:]))

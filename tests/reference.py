"""StreamingLLM written naively, for comparison: raw keys, all rotated anew at each token."""

import torch
from torch import Tensor

from kvkeep.models.llama import Decoder, Llama


class NaiveStreamingCache:
    """Keeps raw keys of the first `keep` tokens and the newest; a cell's position is its place.

    It is handed one token at a time and shares no code with `kvkeep.cache`. Rotation is done with
    complex numbers, attention with an explicit softmax.
    """

    def __init__(self, decoder: Decoder, max_kv_size: int, keep: int):
        self.spec = decoder.spec
        self.max_kv_size, self.keep = max_kv_size, keep
        self.keys: list[list[Tensor]] = [[] for _ in range(self.spec.layers)]
        self.values: list[list[Tensor]] = [[] for _ in range(self.spec.layers)]
        self.frequencies = torch.tensor(self.spec.rope.inverse_frequencies, dtype=torch.float64)

    def rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        """x: `[n, heads, head_dim]`."""
        half = x.shape[-1] // 2
        turned = torch.complex(x[..., :half].double(), x[..., half:].double())
        angles = positions.double()[:, None] * self.frequencies
        turned = turned * torch.polar(torch.ones_like(angles), angles)[:, None]
        return torch.cat((turned.real, turned.imag), -1).to(x.dtype)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self.keys[layer], self.values[layer]
        keys.append(k[0])
        values.append(v[0])
        if len(keys) > self.max_kv_size:
            del keys[self.keep], values[self.keep]
        n, groups = len(keys), self.spec.heads // self.spec.kv_heads
        all_keys = self.rotated(torch.stack(keys), torch.arange(n))
        query = self.rotated(q, torch.tensor([n - 1]))[0]
        scores = torch.einsum("hd,nhd->hn", query, all_keys.repeat_interleave(groups, 1))
        scores = scores * self.spec.softmax_scale
        weights = scores.float().softmax(-1).to(v.dtype)
        values_all = torch.stack(values).repeat_interleave(groups, 1)
        return torch.einsum("hn,nhd->hd", weights, values_all).reshape(1, -1)


@torch.inference_mode()
def streaming_logits(
    decoder: Decoder, tokens: list[int], max_kv_size: int, keep: int, last: int
) -> Tensor:
    """`[last, vocab]`: logits for the last tokens, everything evaluated token by token."""
    cache = NaiveStreamingCache(decoder, max_kv_size, keep)
    network = Llama(decoder.spec, decoder.tensors)
    hidden = [network.forward(torch.tensor([token]), cache) for token in tokens]
    return decoder.logits(torch.cat(hidden[-last:]))

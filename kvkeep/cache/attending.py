"""How layers attend: what is the same for all layers of a cache."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvkeep.cache.attention import Part
from kvkeep.cache.rope import Rope


@dataclass(frozen=True)
class AttentionConfig:
    """How the layers of a cache attend, all of them alike.

    heads: of the queries. scale: the factor on products of queries and keys. softcap: c in
    c * tanh(x / c), of which x is the scaled product (Gemma 2, arXiv:2408.00118); 0 for none.
    sinks: `[layers, heads]` float32, a learned logit of each head that takes its share of the
    softmax and gives nothing (gpt-oss, arXiv:2508.10925); None for none.
    """

    heads: int
    rope: Rope
    scale: float
    softcap: float = 0.0
    sinks: Tensor | None = None

    def with_sinks(self, layer: int, found: Part, n: int) -> Part:
        """What n queries found in all cells, as `attend_cells` gives it, beside a layer's sinks."""
        if self.sinks is None:
            return found
        kv_heads = found.log_sum.shape[1]
        sinks = self.sinks[layer].view(kv_heads, -1)  # [kv_heads, groups]
        sinks = sinks[None] if n == 1 else sinks.T.unsqueeze(-1)
        share = torch.sigmoid(found.log_sum - sinks).unsqueeze(-1)
        return Part(found.out * share, torch.logaddexp(found.log_sum, sinks))

"""StreamingLLM by a model's own attention: keys are rotated again at each eviction.

It is a cache of transformers that shares no code with kvkeep, for one token at a time.
"""

import sys
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel


class RerotatingCache(Cache):
    """The first `keep` and the newest tokens, `budget` in total; local layers have their window.

    Positions are those in the cache: a token comes at `position`, and when one is evicted, all
    after it move one position closer.
    """

    def __init__(self, model: PreTrainedModel, budget: int, keep: int):
        super().__init__(layers=[])
        self._model, self._budget, self._keep = model, budget, keep
        self._kinds = getattr(model.config, "layer_types", None) or []
        self._held: dict[int, tuple[Tensor, Tensor]] = {}
        self.seen = 0

    @property
    def position(self) -> int:
        return min(self.seen, self._budget - 1)

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any) -> tuple[Tensor, Tensor]:
        held = self._held.get(layer)
        if held is None:
            held = keys[:, :, :0], values[:, :, :0]
        held_keys, held_values = held
        limit, keep = self._budget, self._keep
        if self._kinds and self._kinds[layer] == "sliding_attention":
            limit, keep = min(self._model.config.sliding_window, self._budget), 0
        if held_keys.shape[2] == limit:
            held_keys = torch.cat((held_keys[:, :, :keep], held_keys[:, :, keep + 1 :]), 2)
            held_values = torch.cat((held_values[:, :, :keep], held_values[:, :, keep + 1 :]), 2)
        if self.seen >= self._budget:
            shifted = self._shift_back(held_keys[:, :, keep:], layer)
            held_keys = torch.cat((held_keys[:, :, :keep], shifted), 2)
        self._held[layer] = torch.cat((held_keys, keys), 2), torch.cat((held_values, values), 2)
        return self._held[layer]

    def _shift_back(self, keys: Tensor, layer: int) -> Tensor:
        """Return keys one position closer, rotated by the model's own code."""
        code = sys.modules[type(self._model).__module__]
        shift = torch.full((1, keys.shape[2]), -1)
        rotary = self._model.base_model.rotary_emb
        kinds = [self._kinds[layer]] if isinstance(rotary.rope_type, dict) else []
        cosine, sine = rotary(keys, shift, *kinds)
        return code.apply_rotary_pos_emb(keys, keys, cosine, sine)[1]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.position

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.position + query_length, 0


@torch.no_grad()
def streaming_logits(model: PreTrainedModel, ids: list[int], budget: int, keep: int) -> Tensor:
    """Return the logits after each token, `[n, vocab]`."""
    cache, logits = RerotatingCache(model, budget, keep), []
    nothing_hidden = torch.zeros(1, 1, 1, 1, dtype=model.dtype)
    for token in ids:
        out = model(
            input_ids=torch.tensor([[token]]),
            position_ids=torch.tensor([[cache.position]]),
            attention_mask=nothing_hidden,
            past_key_values=cache,
        )
        logits.append(out.logits[0, -1])
        cache.seen += 1
    return torch.stack(logits)

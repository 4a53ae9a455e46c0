"""The cache that a model of transformers is handed: it gives keys back as they come."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig

from kvkeep.errors import UnsupportedModel

Update = Callable[[Tensor, Tensor, int], None]


class StepCache(Cache):
    """Of one forward. Layers that keep states have transformers' own layers of a cache here.

    update: told of the keys and values of each layer, `[batch, kv_heads, n, head_dim]`, and its
    index. seen: tokens before this forward.
    """

    reading: Any = None  # whose forward it is, where it is not kvkeep's own

    def __init__(self, config: PreTrainedConfig, update: Update, seen: int = 0):
        super().__init__(layers=DynamicCache(config=config).layers)
        self._told = update
        self._seen = seen

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *given: Any, **others: Any
    ) -> tuple[Tensor, Tensor]:
        self._told(key_states, value_states, layer_idx)
        return key_states, value_states

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        raise UnsupportedModel(
            "the model chooses which tokens each layer attends to by an index of its own (sparse "
            "attention), which kvkeep does not know"
        )

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._seen

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self._seen + query_length, 0

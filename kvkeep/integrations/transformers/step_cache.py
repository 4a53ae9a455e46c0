"""The cache that a model of transformers is handed: it gives keys back as they come."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig

from kvkeep.errors import UnsupportedModel

Update = Callable[[Tensor, Tensor, int], None]


def layers_of(config: PreTrainedConfig) -> Sequence[Any]:
    """New ones, as transformers has them for such a model."""
    return DynamicCache(config=config).layers


class StepCache(Cache):
    """Of one forward. Layers that keep states have transformers' own layers of a cache here.

    layers: of transformers, one for each of the model's. update: told of the keys and values of
    each layer, `[batch, kv_heads, n, head_dim]`, and its index. seen: tokens before this forward.
    """

    reading: Any = None  # whose forward it is, where it is not kvkeep's own

    def __init__(self, layers: Sequence[Any], update: Update, seen: int = 0):
        super().__init__(layers=list(layers))
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

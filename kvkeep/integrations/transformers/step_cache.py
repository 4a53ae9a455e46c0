"""The transformers cache of one forward, and its recurrent states.

Keys and values pass through it unchanged to kvkeep's caches. Layers without cells (linear
attention, state spaces, convolutions) use transformers' cache layers. Between forwards each
sequence keeps their states as named tensors, which are never written to, so that forks share them.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig
from transformers.cache_utils import (
    DynamicIndexedLayer,
    DynamicLayer,
    LinearAttentionCacheLayerMixin,
)

from kvkeep.errors import InvalidSnapshot, UnsupportedModel

_STATE_KINDS = ("conv", "recurrent")


def new_cache_layers(config: PreTrainedConfig) -> Sequence[Any]:
    """Return new cache layers, as transformers creates them for a model with this config."""
    return DynamicCache(config=config).layers


class StepCache(Cache):
    """The cache of one forward.

    layers: of transformers' caches, one for each layer of the model. updates: this forward's keys
    and values by layer index, `[batch, kv_heads, n, head_dim]` each.
    """

    cache_forward: Any = None  # the `CacheForward` that it belongs to; None in kvkeep's own steps

    def __init__(self, layers: Sequence[Any], past_length: int = 0):
        """past_length: the number of tokens before this forward."""
        super().__init__(layers=list(layers))
        self.updates: dict[int, tuple[Tensor, Tensor]] = {}
        self._past_length = past_length

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.updates[layer_idx] = key_states, value_states
        return key_states, value_states

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        raise UnsupportedModel(
            "the model selects the tokens that each layer attends to by an index (sparse "
            "attention), which kvkeep does not support"
        )

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._past_length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self._past_length + query_length, 0


def has_recurrent_states(config: PreTrainedConfig) -> bool:
    """Whether some layers have states, not cells. Raises UnsupportedModel for any other memory."""
    has_states = False
    for layer in new_cache_layers(config):
        is_recurrent = isinstance(layer, LinearAttentionCacheLayerMixin)
        has_cells = isinstance(layer, DynamicLayer) and not isinstance(layer, DynamicIndexedLayer)
        is_dummy = type(layer).__name__ == "DummyLayer"  # exists in some releases only
        if not is_recurrent and not has_cells and not is_dummy:
            raise UnsupportedModel(
                f"its layers use a {type(layer).__name__} as cache, which kvkeep does not support"
            )
        has_states = has_states or is_recurrent
    return has_states


def load_states(row_states: Sequence[Mapping[str, Tensor]], cache: StepCache) -> None:
    """Copy recurrent states into the layers of a new cache. row_states: of each row, by name.

    Raises InvalidSnapshot if states of evaluated tokens are missing.
    """
    names = dict.fromkeys(name for row in row_states for name in row)
    if not names:
        if cache.get_seq_length():
            raise InvalidSnapshot("the states of the layers without cells are missing")
        return
    for name in names:
        layer_index, state_kind, state_index = name.split(".")
        layer, index = cache.layers[int(layer_index)], int(state_index)
        assert isinstance(layer, LinearAttentionCacheLayerMixin), "the model's own states"
        example = next(row[name] for row in row_states if name in row)
        # A copy, since the layer writes to it. The state of a row without tokens is 0.
        state = torch.cat([row.get(name, torch.zeros_like(example)) for row in row_states])
        layer.dtype, layer.device = state.dtype, state.device  # type: ignore[assignment]
        getattr(layer, f"{state_kind}_states")[index] = state
        getattr(layer, f"is_{state_kind}_states_initialized")[index] = True
        layer.has_previous_state[index] = True
        if state_kind == "conv":
            layer.conv_kernel_size[index] = state.shape[-1]


def read_states(cache: StepCache, num_rows: int) -> list[dict[str, Tensor]]:
    """Return the recurrent states of each row of a cache after a forward, by name."""
    states_by_row: list[dict[str, Tensor]] = [{} for _ in range(num_rows)]
    for name, batch_state in _named_states(cache):
        for states, state in zip(states_by_row, torch.split(batch_state, 1), strict=True):
            states[name] = state.clone() if num_rows > 1 else state
    return states_by_row


def _named_states(cache: StepCache) -> Iterator[tuple[str, Tensor]]:
    """Yield each state, `[batch, ...]`, under its name "layer.kind.index", as snapshots name it."""
    for layer_index, layer in enumerate(cache.layers):
        for state_kind in _STATE_KINDS if isinstance(layer, LinearAttentionCacheLayerMixin) else ():
            for index, state in getattr(layer, f"{state_kind}_states").items():
                if state is not None:
                    yield f"{layer_index}.{state_kind}.{index}", state

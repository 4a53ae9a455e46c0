"""The states of layers that have no cells: linear attention, state spaces, convolutions.

transformers' own layers of a cache compute with them. Between two forwards they are tensors under
names, of one sequence each, which nobody writes to: so forks share them.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import (
    DynamicIndexedLayer,
    DynamicLayer,
    LinearAttentionCacheLayerMixin,
)

from kvkeep.errors import InvalidSnapshot, UnsupportedModel
from kvkeep.integrations.transformers.step_cache import StepCache, layers_of

_KINDS = ("conv", "recurrent")


def keeps_states(config: PreTrainedConfig) -> bool:
    """Whether some layers do. Raises UnsupportedModel where they keep something else than that."""
    found = False
    for layer in layers_of(config):
        states = isinstance(layer, LinearAttentionCacheLayerMixin)
        cells = isinstance(layer, DynamicLayer) and not isinstance(layer, DynamicIndexedLayer)
        nothing = type(layer).__name__ == "DummyLayer"  # of releases that have it
        if not states and not cells and not nothing:
            raise UnsupportedModel(
                f"its layers keep their memory in a {type(layer).__name__}, of which kvkeep knows "
                "nothing"
            )
        found = found or states
    return found


def put_states(rows: Sequence[Mapping[str, Tensor]], cache: StepCache) -> None:
    """Puts the states of each row into the layers of a cache that is new."""
    names = dict.fromkeys(name for row in rows for name in row)
    if not names:
        if cache.get_seq_length():
            raise InvalidSnapshot("there are no states of the layers that have no cells")
        return
    for name in names:
        place, kind, index = name.split(".")
        layer, number = cache.layers[int(place)], int(index)
        assert isinstance(layer, LinearAttentionCacheLayerMixin), "the model's own states"
        some = next(row[name] for row in rows if name in row)
        # A copy, which the layer may write to. What a row has not begun yet is 0.
        state = torch.cat([row.get(name, torch.zeros_like(some)) for row in rows])
        layer.dtype, layer.device = state.dtype, state.device  # type: ignore[assignment]
        getattr(layer, f"{kind}_states")[number] = state
        getattr(layer, f"is_{kind}_states_initialized")[number] = True
        layer.has_previous_state[number] = True
        if kind == "conv":
            layer.conv_kernel_size[number] = state.shape[-1]


def states_of(cache: StepCache, rows: int) -> list[dict[str, Tensor]]:
    """What each of so many rows of a cache has come to."""
    found: list[dict[str, Tensor]] = [{} for _ in range(rows)]
    for name, state in _named(cache):
        for row, each in zip(found, torch.split(state, 1), strict=True):
            row[name] = each.clone() if rows > 1 else each
    return found


def _named(cache: StepCache) -> Iterator[tuple[str, Tensor]]:
    for place, layer in enumerate(cache.layers):
        for kind in _KINDS if isinstance(layer, LinearAttentionCacheLayerMixin) else ():
            for number, state in getattr(layer, f"{kind}_states").items():
                if state is not None:
                    yield f"{place}.{kind}.{number}", state

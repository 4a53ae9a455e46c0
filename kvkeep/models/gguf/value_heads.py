"""The order of Gated DeltaNet's value heads in GGUF files.

Several value heads read one key head. The hub's checkpoints have those of key head 0 first, then
those of key head 1; GGUF files the first value head of each key head, then the second of each. With
2 key heads and 6 value heads, GGUF has the hub's heads 0 3 1 4 2 5.
"""

import numpy as np
from numpy.typing import NDArray

from kvkeep.models.spec.state_layers import StateLayers

# Names after the layer's prefix: tensors with so many rows for each value head.
_ONE_ROW = ("in_proj_a.weight", "in_proj_b.weight", "dt_bias", "A_log")
_VALUE_ROWS = ("in_proj_z.weight",)
_KEYS_AND_VALUES = ("in_proj_qkv.weight", "conv1d.weight")


def delta_net_row_order(states: StateLayers, name: str) -> NDArray[np.int64] | None:
    """Return the row in the file of each row of a tensor; None if the order is the same."""
    module = name.partition(".linear_attn.")[2]
    if not states.tiled_output or not module:
        return None
    if module in _ONE_ROW:
        return _value_rows(states, 1)
    if module in _VALUE_ROWS:
        return _value_rows(states, states.value_dim)
    if module in _KEYS_AND_VALUES:
        key_rows = 2 * states.key_heads * states.key_dim
        value_rows = key_rows + _value_rows(states, states.value_dim)
        return np.concatenate((np.arange(key_rows, dtype=np.int64), value_rows))
    return None


def _value_rows(states: StateLayers, width: int) -> NDArray[np.int64]:
    """Return the row in the file of each row of all value heads. width: rows of a head."""
    rows = np.arange(states.value_heads * width, dtype=np.int64)
    return rows.reshape(-1, states.key_heads, width).swapaxes(0, 1).reshape(-1)

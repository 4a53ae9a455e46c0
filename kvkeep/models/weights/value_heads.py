"""The order of Gated DeltaNet's heads in GGUF files, and in Qwen3-Next's checkpoints.

Several value heads read one key head. The hub's checkpoints have those of key head 0 first, then
those of key head 1; GGUF files the first value head of each key head, then the second of each. With
2 key heads and 6 value heads, GGUF has the hub's heads 0 3 1 4 2 5.

Qwen3-Next has two fused matrices, in which all of a key head lies together: `in_proj_qkvz`, for
each key head a query, a key, and the values and gates of its value heads; and `in_proj_ba`, the
rates and decays of these.
"""

import numpy as np
from numpy.typing import NDArray

from kvkeep.models.spec.state_layers import StateLayers

# Names after the layer's prefix: tensors with so many rows for each value head.
_ONE_ROW = ("in_proj_a.weight", "in_proj_b.weight", "dt_bias", "A_log")
_VALUE_ROWS = ("in_proj_z.weight",)
_KEYS_AND_VALUES = ("in_proj_qkv.weight", "conv1d.weight")


def fused_row_order(states: StateLayers | None, name: str) -> NDArray[np.int64] | None:
    """Return the stored row of each row of the parts of a fused matrix, one part after another.

    name: of the fused matrix. None for any other matrix.
    """
    module = name.partition(".linear_attn.")[2]
    if states is None or module not in ("in_proj_qkvz.weight", "in_proj_ba.weight"):
        return None
    heads_per_key = states.value_heads // states.key_heads
    sizes = [heads_per_key, heads_per_key]
    if module.startswith("in_proj_qkvz"):
        value_rows = heads_per_key * states.value_dim
        sizes = [states.key_dim, states.key_dim, value_rows, value_rows]
    rows = np.arange(states.key_heads * sum(sizes), dtype=np.int64).reshape(states.key_heads, -1)
    parts = np.split(rows, np.cumsum(sizes)[:-1], axis=1)
    return np.concatenate([part.reshape(-1) for part in parts])


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

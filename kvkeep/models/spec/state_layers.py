"""Layers that keep a state: which they are, and the sizes of their states."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import prod
from typing import Literal

import torch
from torch import Tensor

from kvkeep.cache.checks import require, require_tensor

StateKind = Literal["convolution", "delta_net", "mamba2"]
# How Mamba-2's output is normed: after it is gated, before it, or not at all.
MambaNorm = Literal["after_gate", "before_gate", "none"]
_FLOAT32_ENDINGS = (
    *(".A_log", ".dt_bias", ".mamba.D", ".mixer.D", ".expert_bias", ".e_score_correction_bias"),
)


@dataclass(frozen=True)
class StateLayers:
    """The layers of a model that have a state in the place of attention or beside it; of one kind.

    A state summarises all tokens so far in a fixed number of values. Fields beyond the first four
    have a default, which is left out of fingerprints.

    kind: "convolution": a gated convolution over the newest tokens, as in LFM2. "delta_net": Gated
        DeltaNet, as in Qwen3.5. "mamba2": Mamba-2, as in Granite 4-H.
    layers: their indices, in order.
    channels: how many values of a token the convolution takes, each by itself.
    conv_width: how many tokens the convolution sees, the newest included.
    conv_bias: the convolution has a bias; of LFM2 also the projections around it.
    key_heads, value_heads, key_dim, value_dim: the heads of DeltaNet, and the widths of keys and
        values in each. Of Mamba-2 the groups of heads, the heads, the size of a state (of B and C),
        and the width of a head.
    proj_bias: the projections around Mamba-2 have biases.
    beside_attention: these layers have attention, too. Both read the same input, and their outputs
        are added.
    norm: of Mamba-2.
    input_multiplier, output_multiplier: factors on what Mamba-2 reads and on what it gives.
    part_multipliers: factors on Mamba-2's gates, values, B, C and steps; empty if all are 1.
    tiled_output: the columns of DeltaNet's output projection are those of the first value head of
        each key head, then those of the second, and so on (GGUF files).
    """

    kind: StateKind
    layers: tuple[int, ...]
    channels: int
    conv_width: int
    conv_bias: bool = False
    key_heads: int = 0
    value_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    tiled_output: bool = False
    proj_bias: bool = False
    beside_attention: bool = False
    norm: MambaNorm = "after_gate"
    input_multiplier: float = 1.0
    output_multiplier: float = 1.0
    part_multipliers: tuple[float, ...] = ()

    def shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        """Return the shape of each state of a layer, by its name among all states.

        The state of a convolution is its last inputs, the oldest first.
        """
        shapes: dict[str, tuple[int, ...]] = {
            conv_state_name(layer): (self.conv_width - 1, self.channels)
        }
        if self.value_heads:
            matrix_shape = (self.value_heads, self.key_dim, self.value_dim)
            shapes[recurrent_state_name(layer)] = matrix_shape
        return shapes

    def all_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each state of the model, by name."""
        return {name: shape for i in self.layers for name, shape in self.shapes(i).items()}

    def all_dtypes(self, dtype: torch.dtype) -> dict[str, torch.dtype]:
        """Return the dtype of each state: of convolutions that of the model, else float32."""
        recurrent_names = set(map(recurrent_state_name, self.layers))
        return {
            name: torch.float32 if name in recurrent_names else dtype for name in self.all_shapes()
        }

    def nbytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of all states of a sequence. dtype: of the model."""
        dtypes = self.all_dtypes(dtype)
        return sum(prod(x) * dtypes[name].itemsize for name, x in self.all_shapes().items())

    def check(self, states: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        """Raise ValueError unless these are the states of a sequence. dtype: of the model."""
        shapes, dtypes = self.all_shapes(), self.all_dtypes(dtype)
        require(states.keys() == shapes.keys(), "states of other layers than the model's")
        for name, shape in shapes.items():
            require_tensor(f"the state {name!r}", states[name], dtypes[name], *shape)

    def non_default_fields(self) -> dict[str, object]:
        """Return the fields that differ from their defaults."""
        values = {f.name: (getattr(self, f.name), f.default) for f in fields(self)}
        return {name: value for name, (value, default) in values.items() if value != default}


def conv_state_name(layer: int) -> str:
    """Return the name of the state of a layer's convolution."""
    return f"layers.{layer}.conv"


def recurrent_state_name(layer: int) -> str:
    """Return the name of a layer's matrices, `[heads, key_dim, value_dim]`."""
    return f"layers.{layer}.recurrent"


def is_float32_weight(name: str) -> bool:
    """Whether a weight stays in float32 whatever the model's dtype.

    Decays, and the numbers by which experts are chosen, depend on every bit.
    """
    return name.endswith(_FLOAT32_ENDINGS)

"""Layers that keep a state instead of cells: which they are, and the sizes of their states."""

from dataclasses import dataclass, fields
from math import prod
from typing import Literal

import torch

StateKind = Literal["convolution"]
KIND_NAMES: dict[StateKind, str] = {"convolution": "short convolutions"}


@dataclass(frozen=True)
class StateLayers:
    """The layers of a model that have a state in the place of attention; all of one kind.

    A state summarises all tokens so far in a fixed number of values. Fields beyond the first four
    need a default: it is left out of fingerprints.

    kind: "convolution": a gated convolution over the newest tokens, as in LFM2.
    layers: their indices, in order.
    channels: how many values of a token the convolution takes, each by itself.
    conv_width: how many tokens the convolution sees, the newest included.
    bias: the convolution and the projections around it have biases.
    """

    kind: StateKind
    layers: tuple[int, ...]
    channels: int
    conv_width: int
    bias: bool = False

    def shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        """Return the shape of each state of a layer, by its name among all states.

        States of a convolution are its last inputs, in the dtype of the model.
        """
        return {conv_state_name(layer): (self.conv_width - 1, self.channels)}

    def all_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each state of the model, by name."""
        return {name: shape for i in self.layers for name, shape in self.shapes(i).items()}

    def all_dtypes(self, dtype: torch.dtype) -> dict[str, torch.dtype]:
        """Return the dtype of each state of the model, by name. dtype: of the model."""
        return dict.fromkeys(self.all_shapes(), dtype)

    def nbytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of all states of a sequence. dtype: of the model."""
        dtypes = self.all_dtypes(dtype)
        return sum(prod(x) * dtypes[name].itemsize for name, x in self.all_shapes().items())

    def non_default_fields(self) -> dict[str, object]:
        """Return the fields that differ from their defaults."""
        values = {f.name: (getattr(self, f.name), f.default) for f in fields(self)}
        return {name: value for name, (value, default) in values.items() if value != default}


def conv_state_name(layer: int) -> str:
    """Return the name of the state of a layer's convolution."""
    return f"layers.{layer}.conv"

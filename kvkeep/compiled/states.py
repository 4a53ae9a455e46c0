"""Describes state layers and the states of sequences to the compiled kernels."""

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import pointer
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from kvkeep.cache.step import DecodeStep
from kvkeep.compiled import structures as c
from kvkeep.compiled.binding import raise_for_status
from kvkeep.compiled.operands import ModelOperands, address
from kvkeep.models.layers.delta_net import DELTA_NET_OUTPUT, GATED_NORM
from kvkeep.models.layers.mamba import part_factors
from kvkeep.models.spec.model_spec import ModelSpec
from kvkeep.models.spec.state_layers import (
    MambaNorm,
    StateKind,
    StateLayers,
    conv_state_name,
    recurrent_state_name,
)
from kvkeep.models.weights.packing import BLOCK_ROWS

# The kinds of state layers, in the order of `StateKind` in src/states.h.
_KINDS: tuple[StateKind, ...] = ("convolution", "delta_net", "mamba2")
# The same of `MambaNorm`.
_MAMBA_NORMS: tuple[MambaNorm, ...] = ("after_gate", "before_gate", "none")
# The names of a layer's matrices and tensors by kind, and their fields in CStateLayer.
_MATRICES: Mapping[StateKind, Mapping[str, str]] = {
    "convolution": {"input": "conv.in_proj"},
    "delta_net": {
        "input": "linear_attn.in_proj_qkv",
        "gate": "linear_attn.in_proj_z",
        "rate": "linear_attn.in_proj_b",
        "decay": "linear_attn.in_proj_a",
    },
    "mamba2": {"input": "mamba.in_proj"},
}
_OUTPUTS: Mapping[StateKind, str] = {
    "convolution": "conv.out_proj.weight",
    "delta_net": DELTA_NET_OUTPUT,
    "mamba2": "mamba.out_proj.weight",
}
_CONVOLUTIONS: Mapping[StateKind, str] = {
    "convolution": "conv.conv",
    "delta_net": "linear_attn.conv1d",
    "mamba2": "mamba.conv1d",
}
_NORMS: Mapping[StateKind, str] = {"delta_net": GATED_NORM, "mamba2": "mamba.norm.weight"}
_LANES = 16  # `kLanes` in src/lanes.h


def unsupported_states(layers: StateLayers) -> str:
    """Say why the kernels do not run state layers, as a predicate of "the kernels", or ""."""
    if layers.kind not in _KINDS:
        return f"compute no state layers of the kind {layers.kind}"
    widths = {"channels": layers.channels, "key_dim": layers.key_dim, "value_dim": layers.value_dim}
    found = ", ".join(f"{name} {width}" for name, width in widths.items() if width % _LANES)
    if found:
        return f"need state layers with widths that are multiples of {_LANES}; found {found}"
    if layers.key_heads and layers.value_heads % layers.key_heads:
        return "need the same number of value heads for each key head of state layers"
    return ""


def output_width(layers: StateLayers) -> int:
    """Return the number of columns of a state layer's output projection."""
    is_convolution = layers.kind == "convolution"
    return layers.channels if is_convolution else layers.value_heads * layers.value_dim


def state_shape(spec: ModelSpec, layers: StateLayers) -> c.CStateShape:
    """Describe the sizes that all state layers of a model have."""
    return c.CStateShape(
        kind=_KINDS.index(layers.kind),
        channels=layers.channels,
        conv_width=layers.conv_width,
        key_heads=layers.key_heads,
        value_heads=layers.value_heads,
        key_dim=layers.key_dim,
        value_dim=layers.value_dim,
        tiled_output=layers.tiled_output,
        mamba_norm=_MAMBA_NORMS.index(layers.norm),
        norm_eps=spec.norm_eps,
        output_multiplier=layers.output_multiplier,
    )


def input_factors(layers: StateLayers) -> list[float]:
    """Return factors on Mamba-2's input projection, up to a whole block of rows; empty for none."""
    multiplier, factors = layers.input_multiplier, part_factors(layers)
    if multiplier == 1 and not layers.part_multipliers:
        return []
    return [multiplier * factor for factor in factors] + [1.0] * (-len(factors) % BLOCK_ROWS)


def describe_state_layer(
    operands: ModelOperands, layers: StateLayers, index: int, sampled: bool
) -> c.CStateLayer:
    """Describe the weights of a state layer.

    Raises KernelMismatch for weights that the spec does not describe.
    """
    prefix, kind = f"model.layers.{index}.", layers.kind
    convolution = f"{prefix}{_CONVOLUTIONS[kind]}"
    taps = operands.tensors[f"{convolution}.weight"][:, 0].t()

    def floats(name: str) -> int | None:
        tensor = operands.tensors.get(f"{prefix}{name}")
        return None if tensor is None else operands.copy_address(tensor, torch.float32)

    module = {"delta_net": "linear_attn.", "mamba2": "mamba."}.get(kind, "")
    decay_log = operands.tensors.get(f"{prefix}{module}A_log")
    decay_rates = None if decay_log is None else -decay_log.float().exp()
    return c.CStateLayer(
        **{
            field: operands.describe_matrix(f"{prefix}{name}.weight", sampled)
            for field, name in _MATRICES[kind].items()
        },
        output=operands.describe_matrix(f"{prefix}{_OUTPUTS[kind]}", sampled),
        taps=operands.copy_address(taps, torch.bfloat16),
        conv_bias=operands.address_of(f"{convolution}.bias"),
        step_bias=floats(f"{module}dt_bias"),
        decay_rates=None
        if decay_rates is None
        else operands.copy_address(decay_rates, torch.float32),
        skip=floats(f"{module}D"),
        norm=floats(_NORMS[kind]) if kind in _NORMS else None,
        index=layers.layers.index(index),
    )


class DecodedStates:
    """The states of sequences before and after a decode step.

    The kernels read the old ones and write the new ones; `finish` gives these to the steps.
    Raises KernelMismatch for states of another shape.
    """

    def __init__(self, layers: StateLayers, steps: Sequence[DecodeStep]):
        self._steps = steps
        self._new_states: list[dict[str, Tensor]] = [{} for _ in steps]
        # [state layers, sequences], as the kernels take them.
        self.described = (c.CLayerStates * (len(layers.layers) * len(steps)))()
        described = iter(self.described)
        for named_states in _states_by_layer(layers):
            for index, step in enumerate(steps):
                pair, new_states = next(described), self._new_states[index]
                old_states, replaced = step.recurrent_states, dict[str, Tensor]()
                if step.follows:  # states after the token before, which may not be needed later
                    old_states = self._new_states[index - 1]
                    replaced = {} if steps[index - 1].keeps_states else old_states
                for state in named_states:
                    new = replaced.get(state.name)
                    new_states[state.name] = state.describe(old_states, pair, new)

    def finish(self) -> None:
        """Replace the steps' states by the new ones."""
        for step, new_states in zip(self._steps, self._new_states, strict=True):
            step.recurrent_states = new_states


class KernelMixer:
    """The kernels' computation of a state layer between its projections, in bfloat16."""

    def __init__(
        self, spec: ModelSpec, layers: StateLayers, operands: ModelOperands, kernels: ctypes.CDLL
    ):
        self._kernels, self._layers = kernels, layers
        self._shape, self._width = state_shape(spec, layers), output_width(layers)
        self._described = {
            index: describe_state_layer(operands, layers, index, sampled=False)
            for index in layers.layers
        }

    def __call__(
        self,
        layer: int,
        projections: Sequence[Tensor],
        old_states: Mapping[str, Tensor],
        new_states: dict[str, Tensor],
    ) -> Tensor:
        """Take the tokens of a sequence into a layer's states; see `StateMixer`."""
        described, n = self._described[layer], projections[0].shape[0]
        states = c.CLayerStates()
        for state in _states_by_layer(self._layers)[described.index]:
            new_states[state.name] = state.describe(old_states, states)
        out = torch.empty(n, self._width, dtype=torch.bfloat16, device="cpu")
        fields = _MATRICES[self._layers.kind]
        rows = {field: getattr(described, field).rows for field in fields}
        chunk = c.CStateChunk(
            shape=pointer(self._shape),
            layer=pointer(described),
            states=states,
            **{
                field: address(x, "projections", torch.bfloat16, (n, count))
                for (field, count), x in zip(rows.items(), projections, strict=True)
            },
            out=out.data_ptr(),
            tokens=n,
            threads=torch.get_num_threads(),
        )
        raise_for_status(self._kernels.kvkeep_state_chunk(chunk))
        return out


class _NamedState(NamedTuple):
    """A state of one layer, and its field in CLayerStates."""

    field: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def describe(
        self,
        old_states: Mapping[str, Tensor],
        states: c.CLayerStates,
        new: Tensor | None = None,
    ) -> Tensor:
        """Describe a sequence's old state, if it has one, and its new one, which is returned.

        new: the memory of the new one, which may be that of the old one; None for other memory.
        """
        if (old := old_states.get(self.name)) is not None:
            setattr(states, self.field, address(old, "a state", self.dtype, self.shape))
        if new is None:
            new = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        setattr(states, f"new_{self.field}", new.data_ptr())
        return new


@cache
def _states_by_layer(layers: StateLayers) -> list[list[_NamedState]]:
    """Return the states of each layer of a bfloat16 model."""
    shapes, dtypes = layers.all_shapes(), layers.all_dtypes(torch.bfloat16)
    return [
        [
            _NamedState(field, name, shapes[name], dtypes[name])
            for field, name in (
                ("inputs", conv_state_name(index)),
                ("matrices", recurrent_state_name(index)),
            )
            if name in shapes
        ]
        for index in layers.layers
    ]

"""Layers that keep a state instead of cells, and the states of the sequences of a step.

A state is replaced at each step and never written to, so that forks share it, and a step that
fails leaves it as it was. Convolutions sum in one order, whatever steps a text is cut into.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from kvkeep.cache.group_step import GroupStep
from kvkeep.cache.step import ChunkStep, DecodeStep
from kvkeep.models.layers.primitives import NamedWeights
from kvkeep.models.spec.state_layers import StateLayers, conv_state_name


class StateMixer(Protocol):
    """Computes what a state layer does between its projections, in the place of its module."""

    def __call__(
        self,
        layer: int,
        projections: Sequence[Tensor],
        old_states: Mapping[str, Tensor],
        new_states: dict[str, Tensor],
    ) -> Tensor:
        """Take the tokens of one sequence into the states of a layer, by its index in the model.

        projections: of the layer's input, `[n, rows]` each. new_states: takes the layer's states.
        Returns the input of the output projection, `[n, width]`.
        """


class StepStates:
    """The states of the sequences that a step evaluates: one, or each of a group.

    Layers read the states from before the step and write those after it; `finish` gives these to
    the step.
    """

    def __init__(
        self,
        layers: StateLayers,
        step: DecodeStep | ChunkStep | GroupStep,
        mixer: StateMixer | None = None,
    ):
        self._steps = step.steps if isinstance(step, GroupStep) else (step,)
        self._shapes = layers.all_shapes()
        self._mixer = mixer
        self._new_states: list[dict[str, Tensor]] = [{} for _ in self._steps]

    @property
    def sequence_count(self) -> int:
        return len(self._steps)

    def mix(self, layer: int, projections: Sequence[Tensor]) -> Tensor | None:
        """Take all tokens into a layer's states by the step's mixer, if it has one.

        Returns the input of the output projection, `[tokens, width]`; None without a mixer.
        """
        if self._mixer is None:
            return None
        parts = zip(*(torch.tensor_split(x, self.sequence_count) for x in projections), strict=True)
        outputs = [
            self._mixer(layer, part, step.recurrent_states, new_states)
            for step, part, new_states in zip(self._steps, parts, self._new_states, strict=True)
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def read(self, name: str, like: Tensor) -> Tensor:
        """Return a state of each sequence, `[sequences, ...]`; zeros before a first token.

        like: a tensor with the dtype and on the device of the state.
        """
        states = [step.recurrent_states.get(name) for step in self._steps]
        zeros = like.new_zeros(self._shapes[name])
        return torch.stack([zeros if state is None else state for state in states])

    def write(self, name: str, states: Tensor) -> None:
        """Set a state of each sequence. states: `[sequences, ...]`."""
        for new_states, state in zip(self._new_states, states, strict=True):
            new_states[name] = state.clone(memory_format=torch.contiguous_format)

    def finish(self) -> None:
        """Replace the step's states by those that the layers have written."""
        for step, new_states in zip(self._steps, self._new_states, strict=True):
            step.recurrent_states = new_states


class CausalConvolution:
    """A convolution over the newest tokens, channel by channel, which keeps its last inputs."""

    def __init__(self, weights: NamedWeights, name: str, layers: StateLayers, index: int):
        channels = layers.channels
        self._state_name = conv_state_name(index)
        self._kernel = weights.tensor(f"{name}.weight", channels, 1, layers.conv_width)
        self._bias = weights.tensor(f"{name}.bias", channels) if layers.conv_bias else None

    def __call__(self, x: Tensor, states: StepStates) -> Tensor:
        """Map `[tokens, channels]` to the same shape."""
        inputs = x.view(states.sequence_count, -1, x.shape[-1])
        inputs = torch.cat((states.read(self._state_name, inputs), inputs), dim=1)
        states.write(self._state_name, inputs[:, inputs.shape[1] - self._kernel.shape[-1] + 1 :])
        return causal_convolution(inputs, self._kernel, self._bias).flatten(0, 1)


class ShortConvolution:
    """A gated convolution over the newest tokens, in the place of attention (arXiv:2511.23404).

    For each token `b`, `c` and `x` are projected from the layer's input. The output is that of the
    convolution over `b * x`, times `c`, projected again.
    """

    def __init__(self, weights: NamedWeights, layers: StateLayers, index: int):
        hidden_size, channels, bias = weights.spec.hidden_size, layers.channels, layers.conv_bias
        self._index = index
        self._in_proj = weights.matrix("conv.in_proj.weight", 3 * channels, hidden_size, bias)
        self._convolution = CausalConvolution(weights, "conv.conv", layers, index)
        self._out_proj = weights.matrix("conv.out_proj.weight", hidden_size, channels, bias)

    def __call__(self, x: Tensor, states: StepStates) -> Tensor:
        """Map `[tokens, hidden_size]` to the same shape."""
        projected = self._in_proj(x)
        out = states.mix(self._index, [projected])
        return self._out_proj(self._mix(projected, states) if out is None else out)

    def _mix(self, projected: Tensor, states: StepStates) -> Tensor:
        b, c, values = projected.chunk(3, dim=-1)
        return c * self._convolution(b * values, states)


def causal_convolution(inputs: Tensor, kernel: Tensor, bias: Tensor | None) -> Tensor:
    """Convolve channel by channel, summing from the oldest token to the newest in float32.

    inputs: `[sequences, width - 1 + n, channels]`. kernel: `[channels, 1, width]`. bias:
    `[channels]` or None. Returns `[sequences, n, channels]` in the dtype of the inputs.
    """
    width, taps = kernel.shape[-1], kernel[:, 0].float().t()
    inputs32, count = inputs.float(), inputs.shape[1] - kernel.shape[-1] + 1
    output = inputs32[:, :count] * taps[0]
    for offset in range(1, width):
        output = output.addcmul(inputs32[:, offset : offset + count], taps[offset])
    if bias is not None:
        output = output + bias.float()
    return output.to(inputs.dtype)


def decays_within(log_decay: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return by how much states fade within a chunk of n tokens. log_decay: `[..., n]`.

    From each earlier token to each token, `[..., n, n]`, 0 from later ones; and from before the
    first token to each one, and from each one to the last, both `[..., n, 1]`.
    """
    n, sums = log_decay.shape[-1], log_decay.cumsum(-1)
    is_later = torch.ones(n, n, dtype=torch.bool, device=log_decay.device).triu(1)
    between = (sums.unsqueeze(-1) - sums.unsqueeze(-2)).masked_fill(is_later, -torch.inf).exp()
    to_end = (sums[..., -1:] - sums).exp().unsqueeze(-1)
    return between, sums.exp().unsqueeze(-1), to_end

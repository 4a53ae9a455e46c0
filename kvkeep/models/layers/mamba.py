"""Mamba-2: a state for each head that fades, and to which each token adds (arXiv:2405.21060).

With the token's step d, its value x, and the vectors B and C of its group of heads, a head's state
S, `[key_dim, value_dim]`, changes and is read so:

    S <- exp(d A) S + d B x^T;   out = S^T C + D x

Falcon-H1 also has factors on the layer's input, output, and what is projected from the input, and
norms the output before it is gated, or not at all.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kvkeep.models.layers.primitives import FINAL_NORM, NamedWeights, multiply
from kvkeep.models.layers.states import CausalConvolution, StepStates, decays_within
from kvkeep.models.spec.state_layers import StateLayers, recurrent_state_name

_CHUNK_TOKENS = 64


class Mamba2:
    """A layer's states, one for each head (Granite 4-H, Bamba, Falcon-H1).

    The heads of a group share B and C, and are normed together. All of it but the matrix products
    is computed in float32.
    """

    def __init__(self, weights: NamedWeights, layers: StateLayers, index: int):
        hidden_size, heads = weights.spec.hidden_size, layers.value_heads
        self._layers, self._index = layers, index
        self._state_name = recurrent_state_name(index)
        self._norm_eps = weights.spec.norm_eps
        self._key_width = layers.key_heads * layers.key_dim
        self._value_width = heads * layers.value_dim
        rows, bias = self._value_width + layers.channels + heads, layers.proj_bias
        # Rows: gates, values, B, C and steps.
        self._in_proj = weights.matrix("mamba.in_proj.weight", rows, hidden_size, bias)
        self._convolution = CausalConvolution(weights, "mamba.conv1d", layers, index)
        self._step_bias = weights.tensor("mamba.dt_bias", heads).float()
        self._decay_log = weights.tensor("mamba.A_log", heads).float()
        self._skip = weights.tensor("mamba.D", heads).float().unsqueeze(-1)
        self._part_multipliers: Tensor | None = None
        if layers.part_multipliers:
            factors = part_factors(layers)
            self._part_multipliers = weights.tensors[FINAL_NORM].new_tensor(factors)
        self._norm: Tensor | None = None
        if layers.norm != "none":
            self._norm = weights.tensor("mamba.norm.weight", self._value_width).float()
        out_proj = "mamba.out_proj.weight"
        self._out_proj = weights.matrix(out_proj, hidden_size, self._value_width, bias)

    def __call__(self, x: Tensor, states: StepStates) -> Tensor:
        """Map `[tokens, hidden_size]` to the same shape."""
        projected = self._in_proj(multiply(x, self._layers.input_multiplier))
        if self._part_multipliers is not None:
            projected = projected * self._part_multipliers
        out = states.mix(self._index, [projected])
        out = self._out_proj(self._mix(projected, states) if out is None else out)
        return multiply(out, self._layers.output_multiplier)

    def _mix(self, projected: Tensor, states: StepStates) -> Tensor:
        """Map a projection to the input of the output projection."""
        layers, sequences = self._layers, states.sequence_count
        widths = [self._value_width, layers.channels, layers.value_heads]
        gate, mixed, steps = torch.split(projected, widths, -1)
        mixed = F.silu(self._convolution(mixed, states).float())
        widths = [self._value_width, self._key_width, self._key_width]
        values, b, c = torch.split(mixed, widths, -1)
        values = torch.unflatten(values, -1, (layers.value_heads, -1))
        b, c = (torch.unflatten(part, -1, (layers.key_heads, -1)) for part in (b, c))
        heads_per_group = layers.value_heads // layers.key_heads
        b, c = (part.repeat_interleave(heads_per_group, -2) for part in (b, c))
        steps = F.softplus(steps.float() + self._step_bias)
        log_decay = -self._decay_log.exp() * steps
        # [tokens, heads, ...] to [sequences, heads, n, ...]
        c, b, added, log_decay = (
            part.view(sequences, -1, *part.shape[1:]).transpose(1, 2)
            for part in (c, b, values * steps.unsqueeze(-1), log_decay)
        )
        state = states.read(self._state_name, self._decay_log)
        out, state = _scan(c, b, added, log_decay, state)
        states.write(self._state_name, state)
        out = out.transpose(1, 2).reshape(values.shape) + values * self._skip
        return self._gated(out.flatten(1), F.silu(gate.float())).to(projected.dtype)

    def _gated(self, out: Tensor, gate: Tensor) -> Tensor:
        """Return the output gated and normed, by groups of heads. Both `[tokens, value_width]`."""
        if self._norm is None:
            return out * gate
        gates_first = self._layers.norm == "after_gate"
        groups = torch.unflatten(
            out * gate if gates_first else out, 1, (self._layers.key_heads, -1)
        )
        out = F.rms_norm(groups, groups.shape[-1:], None, self._norm_eps).flatten(1) * self._norm
        return out if gates_first else out * gate


def part_factors(layers: StateLayers) -> list[float]:
    """Return the factor on each row of the input projection: gates, values, B, C and steps."""
    value_width, key_width = (
        heads * width
        for heads, width in (
            (layers.value_heads, layers.value_dim),
            (layers.key_heads, layers.key_dim),
        )
    )
    widths = (value_width, value_width, key_width, key_width, layers.value_heads)
    multipliers = layers.part_multipliers or (1.0,) * len(widths)
    parts = zip(multipliers, widths, strict=True)
    return [factor for factor, width in parts for _ in range(width)]


def _scan(
    c: Tensor, b: Tensor, added: Tensor, log_decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Take n tokens into the state and read it. Returns the outputs and the new state.

    c, b: `[..., n, key_dim]`. added: `[..., n, value_dim]`, values times steps. log_decay:
    `[..., n]`. state: `[..., key_dim, value_dim]`.
    """
    if c.shape[-2] == 1:
        state = state * log_decay.exp().unsqueeze(-1) + b.transpose(-1, -2) * added
        return (state * c.transpose(-1, -2)).sum(-2, keepdim=True), state
    outputs = []
    for first in range(0, c.shape[-2], _CHUNK_TOKENS):
        tokens = slice(first, first + _CHUNK_TOKENS)
        out, state = _chunk(
            c[..., tokens, :],
            b[..., tokens, :],
            added[..., tokens, :],
            log_decay[..., tokens],
            state,
        )
        outputs.append(out)
    return torch.cat(outputs, -2), state


def _chunk(
    c: Tensor, b: Tensor, added: Tensor, log_decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Do what `_scan` does for some tokens by matrix products (the dual form, SSD)."""
    decays, from_start, to_end = decays_within(log_decay)
    out = (c * from_start) @ state + (c @ b.transpose(-1, -2) * decays) @ added
    state = state * from_start[..., -1:, :] + (b * to_end).transpose(-1, -2) @ added
    return out, state

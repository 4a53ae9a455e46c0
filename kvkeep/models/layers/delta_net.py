"""Gated DeltaNet: linear attention whose state forgets, and corrects what it holds for a key.

Each value head has a state S, `[key_dim, value_dim]`, which a token with decay a, rate b, key k,
value v and query q changes and reads (arXiv:2412.06464):

    S <- a S;   S <- S + b k (v - S^T k)^T;   out = S^T q
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kvkeep.models.layers.primitives import NamedWeights, WeightMatrix
from kvkeep.models.layers.states import CausalConvolution, StepStates, decays_within
from kvkeep.models.spec.state_layers import StateLayers, recurrent_state_name

_CHUNK_TOKENS = 64
DELTA_NET_OUTPUT = "linear_attn.out_proj.weight"  # the end of its name
GATED_NORM = "linear_attn.norm.weight"  # its name ends so; its weight is not stored less 1
_NORM_EPS = 1e-6  # of keys and queries


class GatedDeltaNet:
    """A layer with a state for each value head, in the place of attention (Qwen3-Next, Qwen3.5).

    A key head serves several value heads, which lie beside each other. All of it but the matrix
    products is computed in float32.
    """

    def __init__(self, weights: NamedWeights, layers: StateLayers, index: int):
        spec, heads = weights.spec, layers.value_heads
        hidden_size, self._norm_eps = spec.hidden_size, spec.norm_eps
        self._layers, self._index = layers, index
        self._state_name = recurrent_state_name(index)
        self._key_width = layers.key_heads * layers.key_dim
        value_width = heads * layers.value_dim

        def projection(name: str, rows: int) -> WeightMatrix:
            return weights.matrix(f"linear_attn.in_proj_{name}.weight", rows, hidden_size)

        self._qkv_proj = projection("qkv", layers.channels)
        self._gate_proj = projection("z", value_width)
        self._rate_proj = projection("b", heads)
        self._decay_proj = projection("a", heads)
        self._convolution = CausalConvolution(weights, "linear_attn.conv1d", layers, index)
        self._decay_bias = weights.tensor("linear_attn.dt_bias", heads).float()
        self._decay_log = weights.tensor("linear_attn.A_log", heads).float()
        self._norm = weights.tensor(GATED_NORM, layers.value_dim).float()
        self._out_proj = weights.matrix(DELTA_NET_OUTPUT, hidden_size, value_width)

    def __call__(self, x: Tensor, states: StepStates) -> Tensor:
        """Map `[tokens, hidden_size]` to the same shape."""
        qkv, gate, rate, decay = projections = [
            project(x)
            for project in (self._qkv_proj, self._gate_proj, self._rate_proj, self._decay_proj)
        ]
        out = states.mix(self._index, projections)
        return self._out_proj(self._mix(qkv, gate, rate, decay, states) if out is None else out)

    def _mix(
        self, qkv: Tensor, gate: Tensor, rate: Tensor, decay: Tensor, states: StepStates
    ) -> Tensor:
        """Map projections to the input of the output projection."""
        layers, sequences, dtype = self._layers, states.sequence_count, qkv.dtype
        qkv = F.silu(self._convolution(qkv, states).float())
        value_width = layers.channels - 2 * self._key_width
        q, k, v = torch.split(qkv, [self._key_width, self._key_width, value_width], -1)
        rate = rate.float().sigmoid()
        log_decay = -self._decay_log.exp() * F.softplus(decay.float() + self._decay_bias)
        q = _normed(torch.unflatten(q, -1, (layers.key_heads, -1))) * layers.key_dim**-0.5
        k = _normed(torch.unflatten(k, -1, (layers.key_heads, -1)))
        v = torch.unflatten(v, -1, (layers.value_heads, -1))
        heads_per_key = layers.value_heads // layers.key_heads
        q, k = (part.repeat_interleave(heads_per_key, -2) for part in (q, k))
        # [tokens, heads, ...] to [sequences, heads, n, ...]
        q, k, v, rate, log_decay = (
            part.view(sequences, -1, *part.shape[1:]).transpose(1, 2)
            for part in (q, k, v, rate, log_decay)
        )
        state = states.read(self._state_name, self._decay_log)
        out, state = delta_rule(q, k, v, rate, log_decay, state)
        states.write(self._state_name, state)
        out = out.transpose(1, 2).reshape(-1, layers.value_heads, layers.value_dim)
        gate = gate.float().view(out.shape)
        out = F.rms_norm(out, out.shape[-1:], self._norm, self._norm_eps) * F.silu(gate)
        if layers.tiled_output:  # the matrix has the first value head of each key head first
            out = torch.unflatten(out, 1, (layers.key_heads, -1)).transpose(1, 2)
        return out.reshape(out.shape[0], -1).to(dtype)


def output_columns(layers: StateLayers, rows: Tensor) -> Tensor:
    """Return rows of the output projection with columns in the order of value heads."""
    if not layers.tiled_output:
        return rows
    tiles = torch.unflatten(rows, 1, (-1, layers.key_heads, layers.value_dim))
    return tiles.transpose(1, 2).flatten(1).contiguous()


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, rate: Tensor, log_decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Apply the rule to n tokens. Returns the outputs, shaped as v, and the new state.

    q, k: `[..., n, key_dim]`. v: `[..., n, value_dim]`. rate, log_decay: `[..., n]`. state:
    `[..., key_dim, value_dim]`. All are float32.
    """
    if q.shape[-2] == 1:
        return _one_token(q, k, v, rate, log_decay, state)
    outputs = []
    for first in range(0, q.shape[-2], _CHUNK_TOKENS):
        tokens = slice(first, first + _CHUNK_TOKENS)
        out, state = _chunk(
            q[..., tokens, :],
            k[..., tokens, :],
            v[..., tokens, :],
            rate[..., tokens],
            log_decay[..., tokens],
            state,
        )
        outputs.append(out)
    return torch.cat(outputs, -2), state


def _one_token(
    q: Tensor, k: Tensor, v: Tensor, rate: Tensor, log_decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    state = state * log_decay.exp().unsqueeze(-1)
    key = k.transpose(-1, -2)
    correction = (v - (state * key).sum(-2, keepdim=True)) * rate.unsqueeze(-1)
    state = state + key * correction
    return (state * q.transpose(-1, -2)).sum(-2, keepdim=True), state


def _chunk(
    q: Tensor, k: Tensor, v: Tensor, rate: Tensor, log_decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Apply the rule to some tokens at once (its WY form, arXiv:2406.06484).

    What each token adds to the state depends on what earlier tokens have added: a system of
    equations with a triangular matrix.
    """
    decays, from_start, to_end = decays_within(log_decay)
    k_rated = k * rate.unsqueeze(-1)
    system = (k_rated @ k.transpose(-1, -2)) * decays  # the diagonal counts as 1
    targets = v * rate.unsqueeze(-1) - (k_rated * from_start) @ state
    added = _inverse(system) @ targets
    out = (q * from_start) @ state + (q @ k.transpose(-1, -2) * decays) @ added
    state = state * from_start[..., -1:, :] + (k * to_end).transpose(-1, -2) @ added
    return out, state


def _inverse(system: Tensor) -> Tensor:
    """Invert lower triangular matrices `[..., n, n]` whose diagonals count as 1.

    Blocks of the diagonal are inverted, of 1 row, then 2, 4 and so on: the inverse of two and of
    what lies below the first gives that of the next larger one. torch would solve matrix by matrix.
    """
    n = system.shape[-1]
    size = 1 << (n - 1).bit_length()
    padded = F.pad(system, (0, size - n, 0, size - n))
    inverse = torch.eye(size, dtype=system.dtype, device=system.device)
    inverse = inverse.repeat(*system.shape[:-2], 1, 1)
    width = 1
    while width < n:
        below, inverses = (_diagonal_blocks(x, 2 * width) for x in (padded, inverse))
        first, second = inverses[..., :width, :width], inverses[..., width:, width:]
        inverses[..., width:, :width] = -(second @ (below[..., width:, :width] @ first))
        width *= 2
    return inverse[..., :n, :n]


def _diagonal_blocks(x: Tensor, width: int) -> Tensor:
    """Return a view of the blocks of the diagonal, `[..., n / width, width, width]`."""
    blocks = torch.unflatten(torch.unflatten(x, -1, (-1, width)), -3, (-1, width))
    return blocks.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def _normed(x: Tensor) -> Tensor:
    """Scale vectors to a length of 1."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _NORM_EPS)

"""The attention of a layer: projections, norms of queries and keys, and the cache's step."""

import torch.nn.functional as F
from torch import Tensor

from kvkeep.cache import LayerAttention
from kvkeep.models.layers.primitives import (
    FINAL_NORM,
    NamedWeights,
    Norm,
    WeightMatrix,
    multiply,
)


class Attention:
    """Projects queries, keys and values, attends in the step, and projects the output.

    Projections are None for what the layer does not have.
    """

    def __init__(self, weights: NamedWeights, index: int):
        spec, hidden_size = weights.spec, weights.spec.hidden_size
        group = spec.group_of(index)
        self._spec, self._index, self._head_dim = spec, index, group.head_dim
        self._has_cells = spec.kv_source(index) == index
        # Without a value projection, values are the keys before key norm and rotation.
        has_values = self._has_cells and not (
            spec.keys_as_values and index not in spec.local_layers
        )
        self._q_width, self._kv_width = (n * group.head_dim for n in (spec.heads, group.kv_heads))

        def projection(name: str, rows: int) -> WeightMatrix:
            return weights.matrix(f"self_attn.{name}.weight", rows, hidden_size, spec.qkv_bias)

        # With gates, the rows of all heads' queries, then those of all heads' gates.
        self._q_proj = projection("q_proj", self._q_width * (1 + spec.gated_attention))
        self._k_proj = projection("k_proj", self._kv_width) if self._has_cells else None
        self._v_proj = projection("v_proj", self._kv_width) if has_values else None
        o_proj = "self_attn.o_proj.weight"
        self._o_proj = weights.matrix(o_proj, hidden_size, self._q_width, spec.output_bias)
        self._query_norm: Norm | None = None
        self._key_norm: Norm | None = None
        scale = group.query_scale(index)
        self._query_scale = weights.tensors[FINAL_NORM].new_tensor(scale) if scale else None

    def add_norms(self, weights: NamedWeights) -> None:
        """Add the norms of queries and keys, which come after the MLP in the tensors' order."""
        spec, widths = self._spec, (self._head_dim, self._head_dim)
        if spec.qk_norm_whole:  # as wide as all heads together
            widths = self._q_width, self._kv_width
        if spec.qk_norm:
            self._query_norm = weights.norm("self_attn.q_norm.weight", widths[0])
        if spec.qk_norm and self._has_cells:
            self._key_norm = weights.norm("self_attn.k_norm.weight", widths[1])
        if spec.sinks:  # only states the shape: the cache reads the tensor
            weights.tensor("self_attn.sinks", spec.heads)

    def __call__(self, x: Tensor, step: LayerAttention) -> Tensor:
        """Map `[n, hidden_size]` to the same shape."""
        output = self._attend(multiply(x, self._spec.attention_input_multiplier), step)
        return multiply(self._o_proj(output), self._spec.attention_output_multiplier)

    def _attend(self, x: Tensor, step: LayerAttention) -> Tensor:
        """Return the outputs of all heads, `[n, heads * head_dim]`."""
        n, head_dim = x.shape[0], self._head_dim
        q, gate = self._q_proj(x), None
        if self._spec.gated_attention:
            q, gate = q.chunk(2, dim=-1)
        q = _norm_heads(self._query_norm, q).reshape(n, -1, head_dim)
        if self._query_scale is not None:
            q = q * self._query_scale
        if self._k_proj is None:  # the layer attends to another layer's cells
            return step.attend(self._index, q, None, None)
        k = self._k_proj(x)
        v = (k if self._v_proj is None else self._v_proj(x)).view(n, -1, head_dim)
        if self._spec.values_normed:
            v = F.rms_norm(v, (head_dim,), None, self._spec.norm_eps)
        k = _norm_heads(self._key_norm, k).view(n, -1, head_dim)
        output = step.attend(self._index, q, k, v)
        return output if gate is None else output * gate.sigmoid()


def _norm_heads(norm: Norm | None, x: Tensor) -> Tensor:
    """Norm `[n, heads * head_dim]` in rows as wide as the norm: one head each, or all together."""
    return x if norm is None else norm(x.reshape(x.shape[0], -1, norm.weight.shape[0]))

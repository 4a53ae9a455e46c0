"""What a model is, in numbers: everything that the forward and the cache need to know of it."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

Activation = Literal["silu", "gelu_tanh"]
Gating = Literal["silu", "gelu_tanh", "clamped"]  # what becomes of an MLP's gate and up
GATINGS: tuple[Gating, ...] = get_args(Gating)


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding, resolved to a fixed table.

    inverse_frequencies: radians per position for each pair of a head, `[head_dim / 2]`, float64
        values; scaled kinds (linear, llama3, yarn, longrope) are already applied. 0 for pairs that
        are not rotated, behind those that are.
    attention_scaling: yarn's or longrope's factor on cosine and sine. It multiplies q and k alike,
        so its square is put on the softmax scale and rotations stay pure. Layers without RoPE, and
        numbers of a head that are not rotated, do not have it; see `LayerGroup.query_scale`.
    """

    kind: str
    inverse_frequencies: tuple[float, ...]
    attention_scaling: float = 1.0


@dataclass(frozen=True)
class ModelSpec:
    """A decoder.

    max_positions is the trained length in tokens; a model all of whose layers slide counts as
    trained to their window, since beyond it full attention is not what it learnt.

    What has a default is what Llama does not have; no digest names it where it is the default:

    norms_before, norms_after: whether attention and MLP norm what they read, and what they give
        before it is added to the residual stream.
    centred_norms: norms are LayerNorm (arXiv:1607.06450) without a bias, not RMSNorm.
    parallel: the MLP reads what attention reads, not what it has added to.
    qk_norm_whole: queries and keys are normed over all heads together, not head by head.
    embedding_multiplier, residual_multiplier, logits_multiplier: of embeddings, of what attention
        and MLP add to the residual stream, and of logits. Folded into weights they would round
        them, and change what a packed matrix says.
    embedding_multiplier_rounded: that of embeddings is rounded to the dtype of the weights first.
    attention_multiplier: in the place of 1 / sqrt(head_dim); None for that.
    experts, experts_per_token: of a mixture of experts, in the place of the MLP, and how many of
        them a token goes through; 0 for none. Its router scores them by a softmax over all.
    expert_size, shared_expert_size: as intermediate_size, of an expert and of the one that every
        token goes through beside them; 0 for none of that kind.
    norm_topk: the weights of the experts that a token goes through are made to add up to 1.
    experts_beside: they are not in the place of an MLP, but beside it, in every layer, with norms
        of their own (Gemma 4).
    clamped_experts: experts and their router have biases, and what an expert multiplies is clamped:
        (up + 1) * gate * sigmoid(1.702 gate), no gate above 7 and no up beyond 7 (gpt-oss).
    sparse_step, dense_layers: each so-manieth layer is a mixture, but for these, by their indices;
        the others have an MLP.
    local_layers, window: these layers, by their indices, see the newest `window` tokens alone, the
        one that looks included.
    local_rope, local_kv_heads, local_head_dim: of local layers, where they are not as the others.
    unrotated_layers: without RoPE (NoPE), though their group has one.
    shared_kv_layers: so many of the last layers keep no cells; they look at those of the last layer
        before them that is local, too, or not.
    wide_shared_mlp: the MLP of these is twice as wide.
    keys_as_values: layers that see everything have no projection of values: they are the keys,
        before these are normed and rotated.
    values_normed: values are normed head by head, without a weight.
    per_layer_size: of the vectors that each layer has of each token; 0 for none.
    layer_scales: a layer multiplies all that it gives on by a learned number.
    per_layer_vocab: tokens that have such vectors, where not all have; others have those of token
        0. 0 for all.
    altup_inputs, altup_active: residual streams (AltUp), and which of them the layers compute; 0
        inputs for the residual stream alone.
    laurel_rank: of the way past attention (LAuReL); 0 for none.
    activation_sparsity: of each layer, the share of its gate's numbers that are made nothing;
        empty where none has any.
    mlp_widths: of the MLP of each layer, where they differ; intermediate_size is the greatest.
    sinks: each head has a learned logit that takes its share of the softmax and gives nothing.
    attention_softcap, logits_softcap: c in c * tanh(x / c), of scaled products and of logits; 0 for
        none.
    recurrent: other layers, which are not counted here, keep states in the place of cells (linear
        attention, convolution).
    activation: of the MLP's gate.
    unit_norms: norms are computed in float32, and their weight is 1 more than what is stored: as
        checkpoints have it, in GGUF files less 1. Added in bfloat16 it would be rounded away.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    max_positions: int
    rope: RopeSpec
    tied_head: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    norms_before: bool = True
    norms_after: bool = False
    centred_norms: bool = False
    parallel: bool = False
    qk_norm_whole: bool = False
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_multiplier: float = 1.0
    attention_multiplier: float | None = None
    experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0
    shared_expert_size: int = 0
    norm_topk: bool = False
    sparse_step: int = 1
    dense_layers: tuple[int, ...] = ()
    local_layers: tuple[int, ...] = ()
    window: int = 0
    local_rope: RopeSpec | None = None
    local_kv_heads: int = 0
    local_head_dim: int = 0
    unrotated_layers: tuple[int, ...] = ()
    shared_kv_layers: int = 0
    sinks: bool = False
    attention_softcap: float = 0.0
    logits_softcap: float = 0.0
    activation: Activation = "silu"
    unit_norms: bool = False
    embedding_multiplier_rounded: bool = False
    clamped_experts: bool = False
    wide_shared_mlp: bool = False
    keys_as_values: bool = False
    values_normed: bool = False
    per_layer_size: int = 0
    layer_scales: bool = False
    per_layer_vocab: int = 0
    altup_inputs: int = 0
    altup_active: int = 0
    laurel_rank: int = 0
    activation_sparsity: tuple[float, ...] = ()
    mlp_widths: tuple[int, ...] = ()
    experts_beside: bool = False
    recurrent: bool = False

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer has a mixture of experts, in the place of its MLP or beside it."""
        return (
            self.experts > 0
            and (layer + 1) % self.sparse_step == 0
            and layer not in self.dense_layers
        )

    def mlp_width(self, layer: int) -> int:
        """What is between its MLP's matrices."""
        if self.mlp_widths:
            return self.mlp_widths[layer]
        twice = self.wide_shared_mlp and self.source_of(layer) != layer
        return self.intermediate_size * (2 if twice else 1)

    @property
    def gating(self) -> Gating:
        """Of all MLPs and experts."""
        return "clamped" if self.clamped_experts else self.activation

    @property
    def softmax_scale(self) -> float:
        """The factor on the products of queries and keys, of layers that are not local."""
        return self.groups[0].softmax_scale

    @cached_property
    def groups(self) -> tuple["LayerGroup", ...]:
        """The layers that see everything, and the local ones, where there are any."""
        every = range(self.layers)
        local = set(self.local_layers)
        scale = self.attention_multiplier
        whole = LayerGroup(
            tuple(layer for layer in every if layer not in local),
            self.kv_heads,
            self.head_dim,
            self.rope,
            scale,
            unrotated=self._unrotated(set(every) - local),
        )
        if not local:
            return (whole,)
        near = LayerGroup(
            tuple(layer for layer in every if layer in local),
            self.local_kv_heads or self.kv_heads,
            self.local_head_dim or self.head_dim,
            self.local_rope or self.rope,
            scale,
            self.window,
            unrotated=self._unrotated(local),
        )
        return whole, near

    def _unrotated(self, layers: set[int]) -> tuple[int, ...]:
        return tuple(layer for layer in self.unrotated_layers if layer in layers)

    def group_of(self, layer: int) -> "LayerGroup":
        """Those that attend as this layer does."""
        return self.groups[layer in self.local_layers]

    def keepers(self, group: "LayerGroup") -> list[int]:
        """Of a group's layers, by their indices, those that have cells of their own."""
        return [layer for layer in group.layers if self.source_of(layer) == layer]

    def source_of(self, layer: int) -> int:
        """The layer whose cells a layer looks at: itself, but for `shared_kv_layers`."""
        first = self.layers - self.shared_kv_layers
        if layer < first:
            return layer
        return max(other for other in self.group_of(layer).layers if other < first)


@dataclass(frozen=True)
class LayerGroup:
    """Layers of a decoder that attend alike.

    layers: their indices, in order. multiplier: on products of queries and keys, in the place of
    1 / sqrt(head_dim); None for that. window: how many of the newest tokens each sees, the one
    that looks included; None for all. unrotated: the layers among them without RoPE.
    """

    layers: tuple[int, ...]
    kv_heads: int
    head_dim: int
    rope: RopeSpec
    multiplier: float | None
    window: int | None = None
    unrotated: tuple[int, ...] = ()

    @property
    def softmax_scale(self) -> float:
        """The factor on the products of queries and keys, which all layers of the group share."""
        if self.multiplier is not None:
            return self._attention_scaling**2 * self.multiplier
        return self._attention_scaling**2 / math.sqrt(self.head_dim)

    def query_scale(self, layer: int) -> tuple[float, ...] | None:
        """The factors on each query of a layer, `[head_dim]`; None where all of them are 1.

        `attention_scaling` belongs to rotated numbers alone, and the softmax scale has its square
        for all of them: the queries of a layer without RoPE are divided by that square, and so are
        the numbers of a query that are not rotated where a part of each head is.
        """
        frequencies, scaling = self.rope.inverse_frequencies, self._attention_scaling
        if layer in self.unrotated:
            frequencies = (0.0,) * len(frequencies)
        if scaling == 1 or all(frequencies):
            return None
        half = tuple(1.0 if frequency else scaling**-2 for frequency in frequencies)
        return half + half

    @property
    def _attention_scaling(self) -> float:
        """The RoPE factor in the softmax scale: 1 where no layer of the group rotates."""
        return self.rope.attention_scaling if len(self.unrotated) < len(self.layers) else 1.0

"""The specification of a model in numbers: all that the forward and the cache depend on."""

import math
from collections.abc import Set
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

from kvkeep.models.spec.state_layers import StateLayers

Activation = Literal["silu", "gelu_tanh", "relu2"]
# How an MLP combines its gate and up projections; "relu2" squares the up projection's ReLU.
Gating = Literal["silu", "gelu_tanh", "clamped", "relu2"]
GATINGS: tuple[Gating, ...] = get_args(Gating)


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding, resolved to a fixed table.

    kind: the `rope_type` of the config, such as "default" or "yarn".
    inverse_frequencies: radians per position for each pair of a head, `[head_dim / 2]`, float64
        values, with scaling (linear, llama3, yarn, longrope) applied. Pairs that are not rotated
        come last and have 0.
    attention_scaling: yarn's or longrope's factor on cosine and sine. It multiplies q and k alike,
        so its square goes into the softmax scale and rotations stay pure. Layers without RoPE, and
        unrotated numbers of a head, do not have it; see `LayerGroup.query_scale`.
    """

    kind: str
    inverse_frequencies: tuple[float, ...]
    attention_scaling: float = 1.0


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only transformer.

    Fields without a default are those that Llama has, too. Snapshots carry a digest of the fields;
    one that has its default is left out of the digest, so the names cannot change.

    max_positions: the trained length in tokens. A model all of whose layers slide counts as trained
        to their window, since it never saw full attention beyond it.
    tied_head: the output projection to logits is the embedding.
    qkv_bias, output_bias, mlp_bias: the projections to queries, keys and values, the projection of
        attention's output, and all projections of the MLP have biases.
    norms_before, norms_after: attention and MLP normalise their input, and their output before it
        is added to the residual stream.
    qk_norm: queries and keys are normalised, head by head or as qk_norm_whole says.
    centred_norms: norms are LayerNorm (arXiv:1607.06450) without a bias, not RMSNorm.
    parallel: the MLP reads the same input as attention, not the sum with attention's output.
    qk_norm_whole: queries and keys are normalised over all heads together, not head by head.
    embedding_multiplier, residual_multiplier, logits_multiplier: factors on embeddings, on what
        attention and MLP add to the residual stream, and on logits.
    embedding_multiplier_rounded: that factor is first rounded to the dtype of the weights.
    attention_multiplier: replaces 1 / sqrt(head_dim) as the softmax scale; None for that scale.
    attention_input_multiplier, attention_output_multiplier, gate_multiplier,
        mlp_output_multiplier: factors on what attention reads and gives, on the gate values of
        MLPs, and on what MLPs give.
    experts, experts_per_token: for a mixture of experts in the place of the MLP, how many there are
        and how many the router chooses for a token, by a softmax over all; 0 without a mixture.
    expert_size, shared_expert_size: the intermediate_size of an expert, and of the shared expert
        that processes every token; 0 without one.
    ungated_shared_expert: the shared expert's output is added as it is, without a gate.
    norm_topk: the weights of the chosen experts are renormalised to a sum of 1.
    sigmoid_router: the weight of an expert is the sigmoid of its score, not its share of a softmax.
    router_bias: experts are chosen by their weights plus a learned number of each.
    routed_scale: a factor on the weights of chosen experts; with sigmoid_router only.
    experts_beside: every layer has experts beside its MLP, not in its place, with norms of their
        own (Gemma 4).
    clamped_experts: experts and their router have biases, and gate and up are clamped (gpt-oss).
    sparse_step, dense_layers: every sparse_step-th layer has experts, except the layers listed in
        dense_layers; the others have an MLP.
    local_layers, window: the layers listed see only the newest `window` tokens, the querying one
        included.
    local_rope, local_kv_heads, local_head_dim: those of local layers, where they differ; None or 0
        where they do not.
    unrotated_layers: layers without RoPE (NoPE), although their group has a RoPE table.
    shared_kv_layers: so many of the last layers have no cells of their own; each attends to those
        of the last earlier layer of its kind (local or global).
    wide_shared_mlp: the MLP of these layers is twice as wide.
    keys_as_values: global layers have no value projection: values are the keys before norm and
        rotation.
    values_normed: values are normalised head by head, without a weight.
    per_layer_size: the width of the embedding that each layer has of each token; 0 for none.
    layer_scales: each layer multiplies its output by a learned number.
    per_layer_vocab: how many tokens have such an embedding; the others have that of token 0. 0 if
        all tokens do.
    altup_inputs, altup_active: the number of residual streams (AltUp), and the index of the one
        that layers compute; 0 inputs for a single residual stream.
    laurel_rank: the rank of the low-rank path beside attention (LAuReL); 0 for none.
    activation_sparsity: for each layer, the share of gate values that are zeroed; empty if none
        are.
    mlp_widths: the width of each layer's MLP, where they differ; intermediate_size is the largest.
    sinks: each head has a learned logit that takes part in the softmax and contributes no value.
    attention_softcap, logits_softcap: c in c * tanh(x / c), applied to scaled products of queries
        and keys, and to logits; 0 for none.
    recurrent: further layers, not counted here, keep a state instead of cells (linear attention,
        convolution); their forward is transformers'.
    gated_attention: attention's output is multiplied by the sigmoid of gates, which the query
        projection gives, too.
    states: the layers, of those counted here, that keep a state; None if all have cells.
    activation: of the MLP's gate. With "relu2" MLPs and experts have no gate: their up projection
        goes through the square of a ReLU.
    mlp_layers: these layers have an MLP, or experts, and nothing else, and all others have none;
        None if every layer has one behind its attention or state.
    expert_latent_size: experts read and give so many numbers, projected from the hidden size and
        back; 0 if the hidden size.
    unit_norms: norms are computed in float32, and their factor is 1 more than the stored weight, as
        in Gemma's checkpoints (GGUF files store the sum).
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
    gated_attention: bool = False
    states: StateLayers | None = None
    sigmoid_router: bool = False
    router_bias: bool = False
    routed_scale: float = 1.0
    ungated_shared_expert: bool = False
    attention_input_multiplier: float = 1.0
    attention_output_multiplier: float = 1.0
    gate_multiplier: float = 1.0
    mlp_output_multiplier: float = 1.0
    mlp_layers: tuple[int, ...] | None = None
    expert_latent_size: int = 0

    @property
    def keeps_states(self) -> bool:
        """Whether some layers keep a state of all tokens so far instead of cells."""
        return self.recurrent or self.states is not None

    def is_state_layer(self, layer: int) -> bool:
        """Whether a layer keeps a state, in the place of attention or beside it."""
        return self.states is not None and layer in self.states.layers

    def has_attention(self, layer: int) -> bool:
        """Whether a layer attends to cells."""
        return layer in self._attention_layers

    @cached_property
    def _attention_layers(self) -> frozenset[int]:
        states = self.states
        replaced = states.layers if states is not None and not states.beside_attention else ()
        return (
            frozenset(range(self.layers)) - frozenset(replaced) - frozenset(self.mlp_layers or ())
        )

    def has_mlp(self, layer: int) -> bool:
        """Whether a layer has an MLP, or experts in its place."""
        return self.mlp_layers is None or layer in self.mlp_layers

    @property
    def gated_mlps(self) -> bool:
        """Whether MLPs and experts have a gate projection."""
        return self.activation != "relu2"

    def has_experts(self, layer: int) -> bool:
        """Whether a layer has a mixture of experts, in the place of its MLP or beside it."""
        return (
            self.experts > 0
            and self.has_mlp(layer)
            and (layer + 1) % self.sparse_step == 0
            and layer not in self.dense_layers
        )

    def mlp_width(self, layer: int) -> int:
        """Return the intermediate size of a layer's MLP."""
        if self.mlp_widths:
            return self.mlp_widths[layer]
        is_wide = self.wide_shared_mlp and self.kv_source(layer) != layer
        return self.intermediate_size * (2 if is_wide else 1)

    @property
    def gating(self) -> Gating:
        """The combination of gate and up projections in all MLPs and experts."""
        return "clamped" if self.clamped_experts else self.activation

    @property
    def softmax_scale(self) -> float:
        """The factor on products of queries and keys in global layers."""
        return self.groups[0].softmax_scale

    @cached_property
    def groups(self) -> tuple["LayerGroup", ...]:
        """The group of global layers, and that of local layers if there are any."""
        all_layers = self._attention_layers
        local_layers = set(self.local_layers)
        global_group = LayerGroup(
            tuple(sorted(all_layers - local_layers)),
            self.kv_heads,
            self.head_dim,
            self.rope,
            self.attention_multiplier,
            unrotated_layers=self._unrotated_among(all_layers - local_layers),
        )
        if not local_layers:
            return (global_group,)
        local_group = LayerGroup(
            tuple(sorted(all_layers & local_layers)),
            self.local_kv_heads or self.kv_heads,
            self.local_head_dim or self.head_dim,
            self.local_rope or self.rope,
            self.attention_multiplier,
            self.window,
            unrotated_layers=self._unrotated_among(local_layers),
        )
        return global_group, local_group

    def _unrotated_among(self, layers: Set[int]) -> tuple[int, ...]:
        return tuple(layer for layer in self.unrotated_layers if layer in layers)

    def group_of(self, layer: int) -> "LayerGroup":
        return self.groups[1 if layer in self.local_layers else 0]

    def layers_with_cells(self, group: "LayerGroup") -> list[int]:
        """Return the layers of a group, without those that attend to another layer's cells."""
        return [layer for layer in group.layers if self.kv_source(layer) == layer]

    def kv_source(self, layer: int) -> int:
        """Return the layer whose cells a layer attends to: itself, except in `shared_kv_layers`.

        With 6 layers, of which 2 and 5 are global and the last 2 share, layer 5 attends to the
        cells of layer 2, and layer 4 to those of layer 3.
        """
        first_shared = self.layers - self.shared_kv_layers
        if layer < first_shared:
            return layer
        return max(other for other in self.group_of(layer).layers if other < first_shared)


@dataclass(frozen=True)
class LayerGroup:
    """Layers with the same heads, rotation, softmax scale and window.

    layers: their indices, in order.
    attention_multiplier: as in ModelSpec.
    window: how many of the newest tokens each layer sees, the querying one included; None for all.
    unrotated_layers: the layers of the group without RoPE.
    """

    layers: tuple[int, ...]
    kv_heads: int
    head_dim: int
    rope: RopeSpec
    attention_multiplier: float | None
    window: int | None = None
    unrotated_layers: tuple[int, ...] = ()

    @property
    def softmax_scale(self) -> float:
        """The factor on products of queries and keys."""
        if self.attention_multiplier is not None:
            return self._attention_scaling**2 * self.attention_multiplier
        return self._attention_scaling**2 / math.sqrt(self.head_dim)

    def query_scale(self, layer: int) -> tuple[float, ...] | None:
        """Return the factors on each query of a layer, `[head_dim]`; None if all of them are 1.

        `attention_scaling` applies to rotated numbers only, but the softmax scale contains its
        square for all of them. So the queries of a layer without RoPE are divided by that square,
        and likewise the unrotated numbers of a head of which only a part is rotated.
        """
        frequencies, scaling = self.rope.inverse_frequencies, self._attention_scaling
        if layer in self.unrotated_layers:
            frequencies = (0.0,) * len(frequencies)
        if scaling == 1 or all(frequencies):
            return None
        half = tuple(1.0 if frequency else scaling**-2 for frequency in frequencies)
        return half + half

    @property
    def _attention_scaling(self) -> float:
        """The RoPE factor in the softmax scale; 1 if no layer of the group rotates."""
        return self.rope.attention_scaling if len(self.unrotated_layers) < len(self.layers) else 1.0

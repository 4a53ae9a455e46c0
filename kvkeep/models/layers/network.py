"""The forward pass of all families, in torch: Llama's, with what others do differently as data.

The differences are in the `ModelSpec`; `models/spec/families.py` has the table. Each layer passes
unrotated queries and keys to a cache's step, which stores cells (keys and values) and attends.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from kvkeep.cache import LayerAttention
from kvkeep.models.layers.attention import Attention
from kvkeep.models.layers.experts import Experts, Mlp, ParallelExperts
from kvkeep.models.layers.gemma import AltUp, AltUpStreams, Laurel, PerLayerEmbedding, PerLayerInput
from kvkeep.models.layers.primitives import (
    EMBEDDING,
    FINAL_NORM,
    LM_HEAD,
    DeclaredTensors,
    NamedWeights,
    Norm,
    WeightMatrix,
    multiply,
)
from kvkeep.models.layers.state_modules import STATE_MODULES
from kvkeep.models.layers.states import StepStates
from kvkeep.models.spec.model_spec import ModelSpec


class DecoderLayer:
    """One layer: its modules, None for what the family does not have, and their forward pass.

    Modules are made in the order of `tensor_shapes`.
    """

    def __init__(self, weights: NamedWeights, index: int):
        spec, hidden_size = weights.spec, weights.spec.hidden_size
        self._spec, self._index = spec, index

        def norm(name: str, exists: bool) -> Norm | None:
            return weights.norm(f"{name}.weight", hidden_size) if exists else None

        self._attention_norm = norm("input_layernorm", spec.norms_before)
        has_mlp_norm = spec.norms_before and not spec.parallel and spec.mlp_layers is None
        self._mlp_norm = norm("post_attention_layernorm", has_mlp_norm)
        self._attention_output_norm = norm("post_self_attn_layernorm", spec.norms_after)
        self._mlp_output_norm = norm("post_mlp_layernorm", spec.norms_after)
        self._state_module, self._attention = None, None
        if spec.states is not None and spec.is_state_layer(index):
            self._state_module = STATE_MODULES[spec.states.kind](weights, spec.states, index)
        if spec.has_attention(index):
            self._attention = Attention(weights, index)
        self._mlp: Mlp | Experts | None = None
        if spec.has_experts(index) and not spec.experts_beside:
            self._mlp = Experts(weights)
        elif spec.has_mlp(index):
            self._mlp = _dense_mlp(weights, index)
        parallel_experts = Experts(weights) if spec.experts_beside else None
        if self._attention is not None:
            self._attention.add_norms(weights)
        self._parallel_experts = (
            ParallelExperts(weights, parallel_experts) if parallel_experts else None
        )
        self._altup = AltUp(weights) if spec.altup_inputs else None
        applies_per_layer_input = spec.per_layer_size and not spec.altup_inputs  # AltUp applies it
        self._per_layer_input = PerLayerInput(weights) if applies_per_layer_input else None
        self._laurel = Laurel(weights) if spec.laurel_rank else None
        self._layer_scale = weights.tensor("layer_scalar", 1) if spec.layer_scales else None

    def __call__(
        self,
        x: Tensor,
        vectors: Sequence[Tensor],
        step: LayerAttention,
        input_norms: Tensor | None,
        states: StepStates | None,
    ) -> Tensor:
        """Apply the layer to the residual stream `[n, hidden_size]`, or to the streams of AltUp.

        vectors: of each layer (`PerLayerEmbedding`), or empty. The others: see `Network.forward`.
        """
        if self._altup:
            x = self._altup(
                x, partial(self._block, step, input_norms, states), vectors[self._index]
            )
        else:
            x = self._block(step, input_norms, states, x)
        if self._per_layer_input:
            x = self._add_residual(x, self._per_layer_input(x, vectors[self._index]))
        return x if self._layer_scale is None else x * self._layer_scale

    def _block(
        self,
        step: LayerAttention,
        input_norms: Tensor | None,
        states: StepStates | None,
        x: Tensor,
    ) -> Tensor:
        """Apply attention (or a state) and MLP to the residual stream x, `[n, hidden_size]`."""
        if input_norms is not None:
            input_norms[self._index] = x.float().norm(dim=-1)
        attention_input = _normed(self._attention_norm, x)
        if self._spec.mlp_layers is not None and self._mlp is not None:
            output = self._mlp(attention_input)
        else:
            output = self._mix_tokens(attention_input, step, states)
        x = self._add_residual(x, _normed(self._attention_output_norm, output))
        if self._laurel is not None:
            x = self._laurel(x, attention_input)
        if self._spec.mlp_layers is not None:
            return x
        assert self._mlp is not None
        output = self._mlp(attention_input if self._spec.parallel else _normed(self._mlp_norm, x))
        if self._parallel_experts is not None:
            output = self._parallel_experts(x, output)
        return self._add_residual(x, _normed(self._mlp_output_norm, output))

    def _mix_tokens(self, x: Tensor, step: LayerAttention, states: StepStates | None) -> Tensor:
        """Map `[n, hidden_size]` to the same shape, by the layer's state, attention, or both."""
        if self._state_module is None:
            assert self._attention is not None
            return self._attention(x, step)
        assert states is not None, "the executor passes the states of a model with state layers"
        output = self._state_module(x, states)
        return output if self._attention is None else output + self._attention(x, step)

    def _add_residual(self, x: Tensor, update: Tensor) -> Tensor:
        return x + multiply(update, self._spec.residual_multiplier)


def _dense_mlp(weights: NamedWeights, index: int) -> Mlp:
    """Return the MLP of a layer, as opposed to its experts."""
    spec = weights.spec
    sparsity = spec.activation_sparsity[index] if spec.activation_sparsity else 0
    return Mlp(weights, "mlp", spec.mlp_width(index), spec.mlp_bias, sparsity)


class Network:
    """A model's layers and their forward pass.

    Args:
        tensors: weights by Hugging Face name, all of one dtype and on one device.
        matrices: matrices that are not stored as tensors, by the same names.
    """

    def __init__(
        self,
        spec: ModelSpec,
        tensors: Mapping[str, Tensor],
        matrices: Mapping[str, WeightMatrix] | None = None,
    ):
        self.spec = spec
        weights, dtype = NamedWeights(spec, tensors, matrices or {}), tensors[FINAL_NORM].dtype
        self.embedding = weights.matrix(EMBEDDING, spec.vocab_size, spec.hidden_size)
        self.layers = [DecoderLayer(weights.for_layer(i), i) for i in range(spec.layers)]
        self.norm = weights.norm(FINAL_NORM, spec.hidden_size)
        self._embedding_multiplier = embedding_multiplier(spec, dtype)
        multiplier = per_layer_multiplier(spec, dtype)
        self._per_layer = PerLayerEmbedding(weights, multiplier) if spec.per_layer_size else None
        self._altup_streams = AltUpStreams(weights) if spec.altup_inputs else None
        self.lm_head = self.embedding
        if not spec.tied_head:
            self.lm_head = weights.matrix(LM_HEAD, spec.vocab_size, spec.hidden_size)

    def forward(
        self,
        tokens: Tensor,
        step: LayerAttention,
        input_norms: Tensor | None = None,
        states: StepStates | None = None,
    ) -> Tensor:
        """Evaluate `tokens: [n]`. Each layer calls `step.attend` once, unless it keeps a state.

        input_norms: an output buffer, `[layers, n]` float32, which is filled with the norm of the
            residual stream that each layer reads.
        states: of the step's sequences, for a model with state layers.

        Returns `[n, hidden_size]`, after the final norm.
        """
        x = multiply(self.embedding.take_rows(tokens), self._embedding_multiplier)
        vectors = self._per_layer(tokens, x) if self._per_layer else ()
        x = self._altup_streams.expand(x) if self._altup_streams else x
        for layer in self.layers:
            x = layer(x, vectors, step, input_norms, states)
        return self.norm(self._altup_streams.merge(x) if self._altup_streams else x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Map `[n, hidden_size]` to `[n, vocab]`, float32; not checked for NaN."""
        logits = multiply(self.lm_head(hidden).float(), self.spec.logits_multiplier)
        cap = self.spec.logits_softcap
        return cap * torch.tanh(logits / cap) if cap else logits


def embedding_multiplier(spec: ModelSpec, dtype: torch.dtype) -> float:
    """Return the multiplier of embeddings, rounded to their dtype if the family rounds it."""
    multiplier = spec.embedding_multiplier
    return _round_to_dtype(multiplier, dtype) if spec.embedding_multiplier_rounded else multiplier


def per_layer_multiplier(spec: ModelSpec, dtype: torch.dtype) -> float:
    """Return the multiplier of rows of the per-layer embedding table, rounded to their dtype."""
    return _round_to_dtype(math.sqrt(spec.per_layer_size), dtype)


def _round_to_dtype(multiplier: float, dtype: torch.dtype) -> float:
    return torch.tensor(multiplier, dtype=dtype, device="cpu").item()


def _normed(norm: Norm | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every tensor of a decoder. Checksums depend on their order."""
    declared = DeclaredTensors(spec)
    declared.tensor(EMBEDDING, spec.vocab_size, spec.hidden_size)
    shapes_by_kind: dict[tuple[object, ...], dict[str, tuple[int, ...]]] = {}
    for index in range(spec.layers):  # layers of a kind are alike
        is_local, has_cells = index in spec.local_layers, spec.kv_source(index) == index
        layer_kind = (
            spec.has_experts(index),
            is_local,
            has_cells,
            spec.mlp_width(index),
            spec.is_state_layer(index),
            spec.has_mlp(index),
        )
        if layer_kind not in shapes_by_kind:
            layer = DeclaredTensors(spec)
            DecoderLayer(layer, index)
            shapes_by_kind[layer_kind] = layer.shapes
        for name, shape in shapes_by_kind[layer_kind].items():
            declared.shapes[f"model.layers.{index}.{name}"] = shape
    declared.tensor(FINAL_NORM, spec.hidden_size)
    if spec.per_layer_size:
        PerLayerEmbedding(declared, table_multiplier=1.0)
    if spec.altup_inputs:
        AltUpStreams(declared)
    if not spec.tied_head:
        declared.tensor(LM_HEAD, spec.vocab_size, spec.hidden_size)
    return declared.shapes

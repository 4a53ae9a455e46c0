"""The forward pass of all families, in torch: Llama's, with what others do differently as data.

The differences are in the `ModelSpec`; `models/spec/families.py` has the table. Queries and keys go
unrotated to the step.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kvkeep.cache import LayerAttention
from kvkeep.models.layers.experts import (
    Experts,
    Mlp,
    ParallelExperts,
    make_experts,
    make_mlp,
    make_parallel_experts,
)
from kvkeep.models.layers.gemma import (
    AltUp,
    Laurel,
    PerLayerInput,
    make_altup,
    make_laurel,
    make_per_layer_embedding,
    make_per_layer_input,
    make_streams,
)
from kvkeep.models.layers.primitives import (
    EMBEDDING,
    HEAD,
    NORM,
    DeclaredTensors,
    NamedWeights,
    Norm,
    Product,
)
from kvkeep.models.spec.model_spec import ModelSpec


@dataclass(frozen=True)
class DecoderLayer:
    """One layer's modules; None for what the family does not have.

    Attributes:
        attention_norm, mlp_norm: norms of the inputs.
        attention_output_norm, mlp_output_norm: norms of the outputs, before they are added.
        query_norm, key_norm: as wide as one head, or as all heads together.
        key: None if the layer attends to another layer's cells.
        value: None in that case too, and if values are the keys before key norm and rotation.
        parallel_experts: read the residual stream beside the MLP.
        per_layer_input: None if AltUp applies it.
        scale: `[1]`, multiplies the layer's output.
    """

    attention_norm: Norm | None
    query: Product
    key: Product | None
    value: Product | None
    output: Product
    query_norm: Norm | None
    key_norm: Norm | None
    attention_output_norm: Norm | None
    mlp_norm: Norm | None
    mlp: Mlp | Experts
    parallel_experts: ParallelExperts | None
    mlp_output_norm: Norm | None
    per_layer_input: PerLayerInput | None
    scale: Tensor | None
    laurel: Laurel | None
    altup: AltUp | None


class Network:
    """A model's layers and their forward pass.

    Args:
        tensors: weights by Hugging Face name, all of one dtype and on one device.
        products: matrices that are not stored as tensors, by the same names.
    """

    def __init__(
        self,
        spec: ModelSpec,
        tensors: Mapping[str, Tensor],
        products: Mapping[str, Product] | None = None,
    ):
        self.spec = spec
        weights, dtype = NamedWeights(spec, tensors, products or {}), tensors[NORM].dtype
        self.embedding = weights.product(EMBEDDING, spec.vocab_size, spec.hidden_size)
        self.layers = [_make_layer(weights.layer(i), i) for i in range(spec.layers)]
        self.norm = weights.norm(NORM, spec.hidden_size)
        self._embedding_multiplier = embedding_multiplier(spec, dtype)
        self._per_layer = make_per_layer_embedding(weights, per_layer_multiplier(spec, dtype))
        self._streams = make_streams(weights)
        self._head_dims = [spec.group_of(i).head_dim for i in range(spec.layers)]
        scales = [spec.group_of(i).query_scale(i) for i in range(spec.layers)]
        self._query_scales = [tensors[NORM].new_tensor(x) if x else None for x in scales]
        self.head = self.embedding
        if not spec.tied_head:
            self.head = weights.product(HEAD, spec.vocab_size, spec.hidden_size)

    def forward(self, tokens: Tensor, step: LayerAttention, norms: Tensor | None = None) -> Tensor:
        """Evaluate `tokens: [n]`. Each layer calls `step.attend` once.

        norms: `[layers, n]` float32, filled with the norm of the residual stream that each layer
            reads.

        Returns `[n, hidden_size]`, after the final norm.
        """
        x = _scaled(self.embedding.take_rows(tokens), self._embedding_multiplier)
        vectors = self._per_layer(tokens, x) if self._per_layer else ()
        x = self._streams.open(x) if self._streams else x
        for index, layer in enumerate(self.layers):
            block = partial(self._attention_and_mlp, index, layer, step, norms)
            x = layer.altup(x, block, vectors[index]) if layer.altup else block(x)
            if layer.per_layer_input is not None:
                x = self._residual(x, layer.per_layer_input(x, vectors[index]))
            if layer.scale is not None:
                x = x * layer.scale
        return self.norm(self._streams.close(x) if self._streams else x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Map `[n, hidden_size]` to `[n, vocab]`, float32; not checked for NaN."""
        logits = _scaled(self.head(hidden).float(), self.spec.logits_multiplier)
        cap = self.spec.logits_softcap
        return cap * torch.tanh(logits / cap) if cap else logits

    def _attention_and_mlp(
        self, index: int, layer: DecoderLayer, step: LayerAttention, norms: Tensor | None, x: Tensor
    ) -> Tensor:
        """Apply a layer to the residual stream x, `[n, hidden_size]`."""
        if norms is not None:
            norms[index] = x.float().norm(dim=-1)
        attention_input = _normed(layer.attention_norm, x)
        output = self._attention(index, layer, attention_input, step)
        x = self._residual(x, _normed(layer.attention_output_norm, output))
        if layer.laurel is not None:
            x = layer.laurel(x, attention_input)
        mlp_input = attention_input if self.spec.parallel else _normed(layer.mlp_norm, x)
        output = layer.mlp(mlp_input)
        if layer.parallel_experts is not None:
            output = layer.parallel_experts(x, output)
        return self._residual(x, _normed(layer.mlp_output_norm, output))

    def _attention(
        self, index: int, layer: DecoderLayer, x: Tensor, step: LayerAttention
    ) -> Tensor:
        n, head_dim, query_scale = x.shape[0], self._head_dims[index], self._query_scales[index]
        q = _normed_heads(layer.query_norm, layer.query(x)).view(n, -1, head_dim)
        if query_scale is not None:
            q = q * query_scale
        if layer.key is None:
            return layer.output(step.attend(index, q, None, None))
        k = layer.key(x)
        v = (k if layer.value is None else layer.value(x)).view(n, -1, head_dim)
        if self.spec.values_normed:
            v = F.rms_norm(v, (head_dim,), None, self.spec.norm_eps)
        k = _normed_heads(layer.key_norm, k).view(n, -1, head_dim)
        return layer.output(step.attend(index, q, k, v))

    def _residual(self, x: Tensor, update: Tensor) -> Tensor:
        return x + _scaled(update, self.spec.residual_multiplier)


def embedding_multiplier(spec: ModelSpec, dtype: torch.dtype) -> float:
    """Return the factor on embeddings, rounded to their dtype if the family rounds it."""
    factor = spec.embedding_multiplier
    return _rounded(factor, dtype) if spec.embedding_multiplier_rounded else factor


def per_layer_multiplier(spec: ModelSpec, dtype: torch.dtype) -> float:
    """Return the factor on rows of the per-layer embedding table, rounded to their dtype."""
    return _rounded(math.sqrt(spec.per_layer_size), dtype)


def _rounded(factor: float, dtype: torch.dtype) -> float:
    return torch.tensor(factor, dtype=dtype, device="cpu").item()


def _scaled(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1 else x * factor


def _normed(norm: Norm | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)


def _normed_heads(norm: Norm | None, x: Tensor) -> Tensor:
    """Norm `[n, heads * head_dim]` in rows as wide as the norm: one head each, or all together."""
    return x if norm is None else norm(x.view(x.shape[0], -1, norm.weight.shape[0]))


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every tensor. Checksums depend on their order."""
    declared = DeclaredTensors(spec, {}, {})
    declared.tensor(EMBEDDING, spec.vocab_size, spec.hidden_size)
    shapes_by_kind: dict[tuple[object, ...], dict[str, tuple[int, ...]]] = {}
    for index in range(spec.layers):  # layers of a kind are alike
        local, has_cells = index in spec.local_layers, spec.kv_source(index) == index
        layer_kind = (spec.is_sparse(index), local, has_cells, spec.mlp_width(index))
        if layer_kind not in shapes_by_kind:
            layer = DeclaredTensors(spec, {}, {})
            _make_layer(layer, index)
            shapes_by_kind[layer_kind] = layer.shapes
        for name, shape in shapes_by_kind[layer_kind].items():
            declared.shapes[f"model.layers.{index}.{name}"] = shape
    declared.tensor(NORM, spec.hidden_size)
    make_per_layer_embedding(declared, factor=1.0)
    make_streams(declared)
    if not spec.tied_head:
        declared.tensor(HEAD, spec.vocab_size, spec.hidden_size)
    return declared.shapes


def _make_layer(weights: NamedWeights, index: int) -> DecoderLayer:
    """Build a layer. It takes its tensors in the order that `tensor_shapes` has."""
    spec, group, hidden = weights.spec, weights.spec.group_of(index), weights.spec.hidden_size
    has_cells = spec.kv_source(index) == index
    has_values = has_cells and not (spec.keys_as_values and index not in spec.local_layers)
    queries, keys = spec.heads * group.head_dim, group.kv_heads * group.head_dim

    def norm(name: str, exists: bool, width: int = hidden) -> Norm | None:
        return weights.norm(f"{name}.weight", width) if exists else None

    def projection(name: str, rows: int) -> Product:
        return weights.product(f"self_attn.{name}.weight", rows, hidden, spec.qkv_bias)

    norms = {
        "attention_norm": norm("input_layernorm", spec.norms_before),
        "mlp_norm": norm("post_attention_layernorm", spec.norms_before and not spec.parallel),
        "attention_output_norm": norm("post_self_attn_layernorm", spec.norms_after),
        "mlp_output_norm": norm("post_mlp_layernorm", spec.norms_after),
    }
    query = projection("q_proj", queries)
    key = projection("k_proj", keys) if has_cells else None
    value = projection("v_proj", keys) if has_values else None
    output = weights.product("self_attn.o_proj.weight", hidden, queries, spec.output_bias)
    replaces_mlp = spec.is_sparse(index) and not spec.experts_beside
    mlp = make_experts(weights) if replaces_mlp else make_mlp(weights, index)
    experts_beside = make_experts(weights) if spec.experts_beside else None
    widths = (queries, keys) if spec.qk_norm_whole else (group.head_dim, group.head_dim)
    norms["query_norm"] = norm("self_attn.q_norm", spec.qk_norm, widths[0])
    norms["key_norm"] = norm("self_attn.k_norm", spec.qk_norm and has_cells, widths[1])
    if spec.sinks:  # the cache has them
        weights.tensor("self_attn.sinks", spec.heads)
    parallel_experts = make_parallel_experts(weights, experts_beside) if experts_beside else None
    per_layer_input = make_per_layer_input(weights)
    altup = make_altup(weights, per_layer_input)
    return DecoderLayer(
        **norms,
        query=query,
        key=key,
        value=value,
        output=output,
        mlp=mlp,
        parallel_experts=parallel_experts,
        per_layer_input=None if altup else per_layer_input,
        altup=altup,
        laurel=make_laurel(weights),
        scale=weights.tensor("layer_scalar", 1) if spec.layer_scales else None,
    )

"""The forward of all families that there are: Llama's, and what others do in other ways.

Projections, norms and MLPs. What differs between families is in the `ModelSpec`
(`models/spec/families.py` has the table). Queries and keys go unrotated to the step.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kvkeep.cache import Bits, KVCache, LayerAttention
from kvkeep.cache.step import ChunkStep
from kvkeep.models.layers.altup import AltUp, altup_of, streams_of
from kvkeep.models.layers.executor import AnyStep, Executor, TorchExecutor
from kvkeep.models.layers.experts import Experts, Mlp, Product, mlp_of
from kvkeep.models.layers.laurel import Laurel, laurel_of
from kvkeep.models.layers.linear import Linear
from kvkeep.models.layers.norms import Norm, norm_of
from kvkeep.models.layers.parallel_experts import ExpertsBeside, experts_beside
from kvkeep.models.layers.per_layer import PerLayerInput, per_layer, per_layer_input
from kvkeep.models.layers.sparse_gate import with_sparse_gate
from kvkeep.models.spec.cells import new_cache
from kvkeep.models.spec.model_spec import ModelSpec
from kvkeep.models.weights.packing import Matrix
from kvkeep.models.weights.tensors import EMBEDDING, HEAD, NORM, tensor_shapes


@dataclass(frozen=True)
class Layer:
    """attention_norm, mlp_norm: of what is read. ..._output_norm: of what is given, before it is
    added. query_norm, key_norm: as wide as one head, or as all together. key: None where the cells
    of another layer are looked at. value: None there, too, and where values are keys, before these
    are normed and rotated. beside: experts that read the residual stream, as the MLP does. own: of
    the vectors that the layer has of each token, where altup has it not. scale: `[1]`, of all that
    the layer gives on.
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
    beside: ExpertsBeside | None
    mlp_output_norm: Norm | None
    own: PerLayerInput | None
    scale: Tensor | None
    laurel: Laurel | None
    altup: AltUp | None


class Llama:
    """The layers and their forward in torch.

    tensors: weights under their Hugging Face names, all of one dtype and on one device.
    products: of matrices that are no tensors, by the same names.
    """

    def __init__(
        self,
        spec: ModelSpec,
        tensors: Mapping[str, Tensor],
        products: Mapping[str, Product] | None = None,
    ):
        self.spec = spec
        product = partial(_product, tensors, products or {})
        self.embedding = product(EMBEDDING)
        self.layers = [_layer(spec, tensors, product, i) for i in range(spec.layers)]
        self.norm = norm_of(spec, tensors[NORM])
        self._dtype = tensors[NORM].dtype
        self._embedding_multiplier = embedding_multiplier(spec, self._dtype)
        self._per_layer = per_layer(spec, tensors, product, per_layer_multiplier(spec, self._dtype))
        self._streams = streams_of(spec, product)
        self._head_dims = [spec.group_of(i).head_dim for i in range(spec.layers)]
        self._query_scales = [self._query_scale(i) for i in range(spec.layers)]
        self.head = self.embedding if spec.tied_head else product(HEAD)

    def forward(
        self, tokens: Tensor, step: LayerAttention, lengths: Tensor | None = None
    ) -> Tensor:
        """Evaluates `tokens: [n]` into a step. Returns `[n, hidden_size]`, normed."""
        x = _times(self.embedding.chosen(tokens), self._embedding_multiplier)
        own = self._per_layer(tokens, x) if self._per_layer else ()
        x = self._streams.opened(x) if self._streams else x
        for index, layer in enumerate(self.layers):
            block = partial(self._block, index, layer, step, lengths)
            x = layer.altup(x, block, own[index]) if layer.altup else block(x)
            if layer.own is not None:
                x = self._sum(x, layer.own(x, own[index]))
            if layer.scale is not None:
                x = x * layer.scale
        return self.norm(self._streams.closed(x) if self._streams else x)

    def logits(self, hidden: Tensor) -> Tensor:
        """`[n, hidden_size]` to `[n, vocab]`, float32."""
        logits = _times(self.head(hidden).float(), self.spec.logits_multiplier)
        cap = self.spec.logits_softcap
        return cap * torch.tanh(logits / cap) if cap else logits

    def _block(
        self, index: int, layer: Layer, step: LayerAttention, lengths: Tensor | None, x: Tensor
    ) -> Tensor:
        """Attention and MLP, `[n, hidden_size]` to the same."""
        if lengths is not None:
            lengths[index] = x.float().norm(dim=-1)
        read = _normed(layer.attention_norm, x)
        given = self._attention(index, layer, read, step)
        x = self._sum(x, _normed(layer.attention_output_norm, given))
        if layer.laurel is not None:
            x = layer.laurel(x, read)
        if not self.spec.parallel:
            read = _normed(layer.mlp_norm, x)
        given = layer.mlp(read)
        if layer.beside is not None:
            given = layer.beside(x, given)
        return self._sum(x, _normed(layer.mlp_output_norm, given))

    def _attention(self, index: int, layer: Layer, x: Tensor, step: LayerAttention) -> Tensor:
        """`[n, hidden_size]` to the same."""
        n, width, query_scale = x.shape[0], self._head_dims[index], self._query_scales[index]
        q = _normed_heads(layer.query_norm, layer.query(x)).view(n, -1, width)
        if query_scale is not None:
            q = q * query_scale
        if layer.key is None:
            return layer.output(step.attend(index, q, None, None))
        k = layer.key(x)
        v = (k if layer.value is None else layer.value(x)).view(n, -1, width)
        if self.spec.values_normed:
            v = F.rms_norm(v, (width,), None, self.spec.norm_eps)
        k = _normed_heads(layer.key_norm, k).view(n, -1, width)
        return layer.output(step.attend(index, q, k, v))

    def _query_scale(self, layer: int) -> Tensor | None:
        scale = self.spec.group_of(layer).query_scale(layer)
        return self.norm.weight.new_tensor(scale, dtype=self._dtype) if scale else None

    def _sum(self, x: Tensor, given: Tensor) -> Tensor:
        return x + _times(given, self.spec.residual_multiplier)


class Decoder:
    """A model's weights, and who computes with them.

    tensors: weights under their Hugging Face names, all of one dtype and on one device.
    packed: matrices that a compiled decode step reads instead of tensors; may be empty. The
    executor can do without tensors of the same names.
    executor: chosen when the model is loaded (`kvkeep.executors`); by torch where none is given.
    """

    def __init__(
        self,
        spec: ModelSpec,
        tensors: Mapping[str, Tensor],
        packed: Mapping[str, Matrix] | None = None,
        executor: Executor | None = None,
    ):
        self.spec = spec
        self.tensors = tensors
        self.packed = packed or {}
        self.executor = executor or TorchExecutor(Llama(spec, tensors))

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """All weights as tensors; each that is packed alone is unpacked when it is asked for."""
        return _Weights(self)

    def hidden(self, tokens: Tensor, step: AnyStep) -> Tensor:
        """Evaluates `tokens: [n]` into a cache's step. Returns `[n, hidden_size]`, normed."""
        return self.executor.hidden(tokens, step)

    def chunk(self, tokens: Tensor, step: ChunkStep, lengths: Tensor | None = None) -> Tensor:
        """The same of a chunk. lengths: `[layers, n]` float32, filled with the norm of the
        residual stream that each layer reads, where it is wanted.
        """
        return self.executor.chunk(tokens, step, lengths)

    def value_norms(self, values: Tensor) -> Tensor:
        """`[layers, heads, n]` float32: the norm of what each value is once projected.

        values: `[layers, kv_heads, n, head_dim]` of the layers that see everything; each head
        projects those of its KV head by its own part of the layer's output projection.
        """
        spec, weights, found = self.spec, self.weights, []
        groups = spec.heads // spec.kv_heads
        for index, of_layer in zip(spec.keepers(spec.groups[0]), values, strict=True):
            weight = weights[f"model.layers.{index}.self_attn.o_proj.weight"]
            own = weight.view(-1, spec.heads, spec.head_dim).permute(1, 2, 0)
            projected = of_layer.to(weight.dtype).repeat_interleave(groups, 0) @ own
            found.append(projected.float().norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny))
        return torch.stack(found)

    def logits(self, hidden: Tensor) -> Tensor:
        """`[n, hidden_size]` to `[n, vocab]`, float32. Raises NonFiniteLogits."""
        return self.executor.logits(hidden)

    def new_cache(self, bits: Bits = Bits(), most: int | None = None) -> KVCache:  # noqa: B008
        """An empty cache for this model's cells; see `cells.new_cache`."""
        return new_cache(self.spec, self.tensors, bits, most)


class _Weights(Mapping[str, Tensor]):
    def __init__(self, decoder: Decoder):
        self._decoder = decoder
        tensors, packed = decoder.tensors, decoder.packed
        self._names = dict.fromkeys([*tensors, *(set(tensor_shapes(decoder.spec)) & set(packed))])

    def __getitem__(self, name: str) -> Tensor:
        found = self._decoder.tensors.get(name)
        return self._decoder.executor.unpacked(name) if found is None else found

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _times(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1 else x * factor


def _normed(norm: Norm | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)


def _normed_heads(norm: Norm | None, x: Tensor) -> Tensor:
    """x: `[n, heads * head_dim]`, of which so many make one as the norm is wide."""
    return x if norm is None else norm(x.view(x.shape[0], -1, norm.weight.shape[0]))


def embedding_multiplier(spec: ModelSpec, dtype: torch.dtype) -> float:
    """As embeddings of a dtype are multiplied by it."""
    factor = spec.embedding_multiplier
    return _rounded(factor, dtype) if spec.embedding_multiplier_rounded else factor


def per_layer_multiplier(spec: ModelSpec, dtype: torch.dtype) -> float:
    """As what the table of embeddings of each layer has, of a dtype, is multiplied by it."""
    return _rounded(math.sqrt(spec.per_layer_size), dtype)


def _rounded(factor: float, dtype: torch.dtype) -> float:
    return torch.tensor(factor, dtype=dtype, device="cpu").item()


def _product(tensors: Mapping[str, Tensor], products: Mapping[str, Product], name: str) -> Product:
    if name in products:
        return products[name]
    return Linear(tensors[name], tensors.get(f"{name.removesuffix('weight')}bias"))


def _layer(
    spec: ModelSpec, tensors: Mapping[str, Tensor], product: Callable[[str], Product], index: int
) -> Layer:
    prefix = f"model.layers.{index}."

    def linear(name: str) -> Product:
        return product(f"{prefix}{name}.weight")

    def norm(name: str, there: bool) -> Norm | None:
        return norm_of(spec, tensors[f"{prefix}{name}.weight"]) if there else None

    own, altup = spec.source_of(index) == index, altup_of(spec, index, tensors, product)
    values = own and not (spec.keys_as_values and index not in spec.local_layers)
    return Layer(
        attention_norm=norm("input_layernorm", spec.norms_before),
        query=linear("self_attn.q_proj"),
        key=linear("self_attn.k_proj") if own else None,
        value=linear("self_attn.v_proj") if values else None,
        output=linear("self_attn.o_proj"),
        query_norm=norm("self_attn.q_norm", spec.qk_norm),
        key_norm=norm("self_attn.k_norm", spec.qk_norm and own),
        attention_output_norm=norm("post_self_attn_layernorm", spec.norms_after),
        mlp_norm=norm("post_attention_layernorm", spec.norms_before and not spec.parallel),
        mlp=with_sparse_gate(spec, index, mlp_of(spec, index, tensors, product)),
        beside=experts_beside(spec, index, tensors, product),
        mlp_output_norm=norm("post_mlp_layernorm", spec.norms_after),
        own=None if altup else per_layer_input(spec, index, tensors, product),
        scale=tensors[f"{prefix}layer_scalar"] if spec.layer_scales else None,
        laurel=laurel_of(spec, index, tensors, product),
        altup=altup,
    )

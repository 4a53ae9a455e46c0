"""The forward of the Llama family: Llama, Mistral, Qwen2, Qwen3, Phi-3.

Projections, norms and MLPs. Positions are not its business: q and k go unrotated to the step.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kvkeep.cache import Bits, KVCache, Layout, Rope
from kvkeep.cache.step import ChunkStep
from kvkeep.models.executor import AnyStep, Attends, Executor, TorchExecutor
from kvkeep.models.linear import Linear
from kvkeep.models.packing import Matrix
from kvkeep.models.spec import ModelSpec
from kvkeep.models.weights import EMBEDDING, HEAD, NORM, tensor_shapes


@dataclass(frozen=True)
class Norm:
    """RMSNorm (arXiv:1910.07467) over the last dimension; weight: `[width]`."""

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Product(Protocol):
    """A matrix with rows of input, `[n, in]` to `[n, out]`, whatever it is kept as."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def chosen(self, rows: Tensor) -> Tensor:
        """Some rows of the matrix, `[n, in]`. rows: `[n]` int64."""


@dataclass(frozen=True)
class Layer:
    attention_norm: Norm
    query: Product
    key: Product
    value: Product
    output: Product
    query_norm: Norm | None
    key_norm: Norm | None
    mlp_norm: Norm
    gate: Product
    up: Product
    down: Product


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
        self.norm = Norm(tensors[NORM], spec.norm_eps)
        self.head = self.embedding if spec.tied_head else product(HEAD)

    def forward(self, tokens: Tensor, step: Attends, lengths: Tensor | None = None) -> Tensor:
        """Evaluates `tokens: [n]` into a step. Returns `[n, hidden_size]`, normed."""
        spec, n = self.spec, tokens.shape[0]
        x = self.embedding.chosen(tokens)
        for index, layer in enumerate(self.layers):
            if lengths is not None:
                lengths[index] = x.float().norm(dim=-1)
            normed = layer.attention_norm(x)
            q = layer.query(normed).view(n, spec.heads, spec.head_dim)
            k = layer.key(normed).view(n, spec.kv_heads, spec.head_dim)
            v = layer.value(normed).view(n, spec.kv_heads, spec.head_dim)
            if layer.query_norm and layer.key_norm:
                q, k = layer.query_norm(q), layer.key_norm(k)
            x = x + layer.output(step.attend(index, q, k, v))
            normed = layer.mlp_norm(x)
            x = x + layer.down(F.silu(layer.gate(normed)) * layer.up(normed))
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """`[n, hidden_size]` to `[n, vocab]`, float32."""
        return self.head(hidden).float()


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

        values: `[layers, kv_heads, n, head_dim]`; each head projects those of its KV head by its
        own part of the layer's output projection.
        """
        spec, found = self.spec, []
        groups = spec.heads // spec.kv_heads
        for index, of_layer in enumerate(values):
            weight = self.weights[f"model.layers.{index}.self_attn.o_proj.weight"]
            own = weight.view(-1, spec.heads, spec.head_dim).permute(1, 2, 0)
            projected = of_layer.to(weight.dtype).repeat_interleave(groups, 0) @ own
            found.append(projected.float().norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny))
        return torch.stack(found)

    def logits(self, hidden: Tensor) -> Tensor:
        """`[n, hidden_size]` to `[n, vocab]`, float32. Raises NonFiniteLogits."""
        return self.executor.logits(hidden)

    def new_cache(self, bits: Bits = Bits()) -> KVCache:  # noqa: B008 (frozen)
        """An empty cache for this model's cells."""
        layout = cell_layout(self.spec, self.tensors)
        near, far = bits.layouts(layout)
        rope = Rope(self.spec.rope.inverse_frequencies, layout.device)
        return KVCache(near, rope, self.spec.softmax_scale, self.spec.heads, far)


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


def cell_layout(spec: ModelSpec, tensors: Mapping[str, Tensor]) -> Layout:
    """Cells are of the weights' dtype, and where the weights are."""
    weight = tensors[NORM]
    return Layout(spec.layers, spec.kv_heads, spec.head_dim, weight.dtype, weight.device)


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

    def norm(name: str) -> Norm:
        return Norm(tensors[f"{prefix}{name}.weight"], spec.norm_eps)

    return Layer(
        attention_norm=norm("input_layernorm"),
        query=linear("self_attn.q_proj"),
        key=linear("self_attn.k_proj"),
        value=linear("self_attn.v_proj"),
        output=linear("self_attn.o_proj"),
        query_norm=norm("self_attn.q_norm") if spec.qk_norm else None,
        key_norm=norm("self_attn.k_norm") if spec.qk_norm else None,
        mlp_norm=norm("post_attention_layernorm"),
        gate=linear("mlp.gate_proj"),
        up=linear("mlp.up_proj"),
        down=linear("mlp.down_proj"),
    )

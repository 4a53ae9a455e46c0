"""The forward of the Llama family: Llama, Mistral, Qwen2, Qwen3.

Projections, norms and MLPs. Positions are not its business: q and k go unrotated to the cache.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from kvkeep.cache import Bits, KVCache, Layout, Rope
from kvkeep.cache.step import ChunkStep, DecodeStep
from kvkeep.compiled.decoder import CompiledDecoder, can_decode
from kvkeep.models.graph import DecodeGraphs
from kvkeep.models.packing import PackedMatrix
from kvkeep.models.spec import ModelSpec


@dataclass(frozen=True)
class Linear:
    """weight: `[out, in]`, bias: `[out]` or None."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True)
class Norm:
    """RMSNorm (arXiv:1910.07467) over the last dimension; weight: `[width]`."""

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


@dataclass(frozen=True)
class Layer:
    attention_norm: Norm
    query: Linear
    key: Linear
    value: Linear
    output: Linear
    query_norm: Norm | None
    key_norm: Norm | None
    mlp_norm: Norm
    gate: Linear
    up: Linear
    down: Linear


class Attends(Protocol):
    """What attends in a forward."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As `KVCache.attend`."""


class Remembers(Attends, Protocol):
    """What the decoder asks of its memory: a cache, or several that are stepped together."""

    @property
    def decoding(self) -> Sequence[DecodeStep]:
        """As `KVCache.decoding`."""

    @property
    def prefilling(self) -> ChunkStep | None:
        """As `KVCache.prefilling`."""


class Decoder:
    """A decoder whose memory is a cache that it is handed.

    tensors: weights under their Hugging Face names, all of one dtype and on one device.
    packed: matrices that a compiled decode step reads instead; for others they say the same.
    """

    def __init__(
        self,
        spec: ModelSpec,
        tensors: Mapping[str, Tensor],
        packed: Mapping[str, PackedMatrix] | None = None,
    ):
        self.spec = spec
        self.tensors = tensors
        self.embedding = tensors["model.embed_tokens.weight"]
        self.layers = [_layer(spec, tensors, i) for i in range(spec.layers)]
        self.norm = Norm(tensors["model.norm.weight"], spec.norm_eps)
        self.head = Linear(self.embedding if spec.tied_head else tensors["lm_head.weight"], None)
        self.compiled = self._compiled(packed or {})
        on_cuda = self.embedding.device.type == "cuda"
        self.graphs = DecodeGraphs(self.forward) if on_cuda else None

    def _compiled(self, packed: Mapping[str, PackedMatrix]) -> CompiledDecoder | None:
        """The compiled decode step, where there are kernels for this model on this machine."""
        cache = self.new_cache()
        if not can_decode(self.spec, cache.layout):
            return None
        return CompiledDecoder(self.spec, self.tensors, packed, cache.rope, cache.scale)

    def new_cache(self, bits: Bits = Bits()) -> KVCache:  # noqa: B008 (frozen)
        """An empty cache for this model's cells."""
        spec, layout = self.spec, cell_layout(self.spec, self.tensors)
        rope = Rope(spec.rope.inverse_frequencies, layout.device)
        scale = spec.rope.attention_scaling**2 / math.sqrt(spec.head_dim)
        near, far = bits.layouts(layout)
        return KVCache(near, rope, scale, spec.heads, far)

    def hidden(self, tokens: Tensor, cache: Remembers) -> Tensor:
        """Evaluates `tokens: [n]` into the cache's step. Returns `[n, hidden_size]`, normed."""
        decoding, prefilling = cache.decoding, cache.prefilling
        if self.compiled is not None and decoding:
            return self.compiled.hidden(tokens.tolist(), decoding)
        if self.compiled is not None and prefilling is not None:
            return self.forward(tokens, self.compiled.attention(prefilling))
        if self.graphs is not None and len(decoding) == 1:
            replayed = self.graphs.hidden(tokens, decoding[0])
            if replayed is not None:
                return replayed
        return self.forward(tokens, cache)

    def forward(self, tokens: Tensor, attends: Attends) -> Tensor:
        """As `hidden`, layer by layer in torch."""
        spec, n = self.spec, tokens.shape[0]
        x = F.embedding(tokens, self.embedding)
        for index, layer in enumerate(self.layers):
            normed = layer.attention_norm(x)
            q = layer.query(normed).view(n, spec.heads, spec.head_dim)
            k = layer.key(normed).view(n, spec.kv_heads, spec.head_dim)
            v = layer.value(normed).view(n, spec.kv_heads, spec.head_dim)
            if layer.query_norm and layer.key_norm:
                q, k = layer.query_norm(q), layer.key_norm(k)
            x = x + layer.output(attends.attend(index, q, k, v))
            normed = layer.mlp_norm(x)
            x = x + layer.down(F.silu(layer.gate(normed)) * layer.up(normed))
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """`[n, hidden_size]` to `[n, vocab]`, float32."""
        if self.compiled is not None:
            return self.compiled.logits(hidden)
        return self.head(hidden).float()


def cell_layout(spec: ModelSpec, tensors: Mapping[str, Tensor]) -> Layout:
    """Cells are of the weights' dtype, and where the weights are."""
    weight = tensors["model.embed_tokens.weight"]
    return Layout(spec.layers, spec.kv_heads, spec.head_dim, weight.dtype, weight.device)


def _layer(spec: ModelSpec, tensors: Mapping[str, Tensor], index: int) -> Layer:
    prefix = f"model.layers.{index}."

    def linear(name: str) -> Linear:
        return Linear(tensors[f"{prefix}{name}.weight"], tensors.get(f"{prefix}{name}.bias"))

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

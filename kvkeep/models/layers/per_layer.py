"""Embeddings that each layer has of its own, as Gemma 3n and 4 have them.

A token has a short vector for each layer: one from a table, to which the projection of its
embedding is added. Behind its MLP a layer adds to the residual stream what its vector lets through.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvkeep.models.layers.experts import GATED, Product
from kvkeep.models.layers.norms import Norm, norm_of
from kvkeep.models.spec.model_spec import Gating, ModelSpec

TABLE = "model.embed_tokens_per_layer.weight"
PROJECTION = "model.per_layer_model_projection.weight"
NORM = "model.per_layer_projection_norm.weight"
OF_A_LAYER = ("per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm")


@dataclass(frozen=True)
class PerLayer:
    """The vectors of all layers.

    size: of one. factor: of what the table has. known: its rows; other tokens have the first one.
    """

    table: Product
    projection: Product
    norm: Norm
    size: int
    factor: float
    known: int

    def __call__(self, tokens: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        """`[n, size]` for each layer. tokens: `[n]`, x: their embeddings `[n, hidden_size]`."""
        shape = (len(tokens), -1, self.size)
        rows = torch.where(tokens < self.known, tokens, 0)
        own = (self.table.chosen(rows) * self.factor).view(shape)
        projected = (self.projection(x) * x.shape[-1] ** -0.5).view(shape)
        return ((self.norm(projected) + own) * math.sqrt(0.5)).unbind(1)


@dataclass(frozen=True)
class PerLayerInput:
    """What a layer does with its own vectors. gating: as that of its MLP."""

    gate: Product
    projection: Product
    norm: Norm
    gating: Gating

    def __call__(self, x: Tensor, own: Tensor) -> Tensor:
        """What is added to the residual stream x, `[n, hidden_size]`."""
        return self.norm(self.projection(GATED[self.gating](self.gate(x), own)))


def per_layer(
    spec: ModelSpec,
    tensors: Mapping[str, Tensor],
    product: Callable[[str], Product],
    factor: float,
) -> PerLayer | None:
    """None where the model has none."""
    if not spec.per_layer_size:
        return None
    norm = norm_of(spec, tensors[NORM])
    size, known = spec.per_layer_size, _known(spec)
    return PerLayer(product(TABLE), product(PROJECTION), norm, size, factor, known)


def per_layer_input(
    spec: ModelSpec, layer: int, tensors: Mapping[str, Tensor], product: Callable[[str], Product]
) -> PerLayerInput | None:
    """None where the model has none."""
    if not spec.per_layer_size:
        return None
    gate, projection, norm = (f"model.layers.{layer}.{name}.weight" for name in OF_A_LAYER)
    of_vectors = norm_of(spec, tensors[norm])
    return PerLayerInput(product(gate), product(projection), of_vectors, spec.gating)


def per_layer_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Name and shape of what is not of a layer; none where the model has none."""
    size, all_layers = spec.per_layer_size, spec.layers * spec.per_layer_size
    if not size:
        return {}
    return {
        TABLE: (_known(spec), all_layers),
        PROJECTION: (all_layers, spec.hidden_size),
        NORM: (size,),
    }


def _known(spec: ModelSpec) -> int:
    return spec.per_layer_vocab or spec.vocab_size


def per_layer_input_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Name and shape of what a layer has for its own vectors."""
    size, hidden = spec.per_layer_size, spec.hidden_size
    if not size:
        return {}
    shapes = ((size, hidden), (hidden, size), (hidden,))
    return {f"{name}.weight": shape for name, shape in zip(OF_A_LAYER, shapes, strict=True)}

"""Per-layer embeddings, as Gemma 3n and 4 have them.

A token has a short vector for each layer: a row of a table plus a projection of its embedding.
After its MLP a layer adds its vector, gated by the residual stream, to the residual stream.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kvkeep.models.layers.experts import GATED
from kvkeep.models.layers.primitives import NamedWeights, Norm, Product
from kvkeep.models.spec.model_spec import Gating, ModelSpec

TABLE = "model.embed_tokens_per_layer.weight"
PROJECTION = "model.per_layer_model_projection.weight"
NORM = "model.per_layer_projection_norm.weight"
# Tensor names behind a layer's prefix: gate, projection and norm of `PerLayerInput`.
LAYER_PARTS = ("per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm")


@dataclass(frozen=True)
class PerLayerEmbedding:
    """The vectors of all layers.

    Attributes:
        size: elements of one vector.
        factor: multiplies the table's rows.
        rows: of the table; a token id beyond them takes row 0.
    """

    table: Product
    projection: Product
    norm: Norm
    size: int
    factor: float
    rows: int

    def __call__(self, tokens: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        """Return `[n, size]` for each layer. tokens: `[n]`, x: embeddings `[n, hidden_size]`."""
        shape = (len(tokens), -1, self.size)
        indices = torch.where(tokens < self.rows, tokens, 0)
        looked_up = (self.table.take_rows(indices) * self.factor).view(shape)
        projected = (self.projection(x) * x.shape[-1] ** -0.5).view(shape)
        return ((self.norm(projected) + looked_up) * math.sqrt(0.5)).unbind(1)


@dataclass(frozen=True)
class PerLayerInput:
    """The part of a layer that reads its per-layer vectors. gating: as in its MLP."""

    gate: Product
    projection: Product
    norm: Norm
    gating: Gating

    def __call__(self, x: Tensor, vectors: Tensor) -> Tensor:
        """Return the update of the residual stream x, `[n, hidden_size]`. vectors: `[n, size]`."""
        return self.norm(self.projection(GATED[self.gating](self.gate(x), vectors)))


def make_per_layer_embedding(weights: NamedWeights, factor: float) -> PerLayerEmbedding | None:
    """Return the model's per-layer embedding; None if it has none."""
    size, rows = weights.spec.per_layer_size, _table_rows(weights.spec)
    if not size:
        return None
    table, projection = weights.product(TABLE), weights.product(PROJECTION)
    return PerLayerEmbedding(table, projection, weights.norm(NORM), size, factor, rows)


def make_per_layer_input(weights: NamedWeights) -> PerLayerInput | None:
    """Return a layer's per-layer input; None if the model has none."""
    if not weights.spec.per_layer_size:
        return None
    gate, projection, norm = (f"{name}.weight" for name in LAYER_PARTS)
    return PerLayerInput(
        weights.product(gate), weights.product(projection), weights.norm(norm), weights.spec.gating
    )


def per_layer_embedding_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors that belong to no layer, by name."""
    size, all_layers = spec.per_layer_size, spec.layers * spec.per_layer_size
    if not size:
        return {}
    return {
        TABLE: (_table_rows(spec), all_layers),
        PROJECTION: (all_layers, spec.hidden_size),
        NORM: (size,),
    }


def per_layer_input_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a layer's tensors, by name behind its prefix."""
    size, hidden = spec.per_layer_size, spec.hidden_size
    if not size:
        return {}
    shapes = ((size, hidden), (hidden, size), (hidden,))
    return {f"{name}.weight": shape for name, shape in zip(LAYER_PARTS, shapes, strict=True)}


def _table_rows(spec: ModelSpec) -> int:
    return spec.per_layer_vocab or spec.vocab_size

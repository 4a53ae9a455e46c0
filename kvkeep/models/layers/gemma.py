"""Parts of Gemma 3n and 4 alone: per-layer embeddings, and 3n's AltUp streams and LAuReL.

Per-layer embeddings: a token has a short vector for each layer: a row of a table plus a projection
of its embedding. After its MLP a layer adds its vector, gated by the residual stream, to the
residual stream.

AltUp (arXiv:2301.13310): a token has several residual streams, each as wide as its embedding, of
which each layer computes one. Before a layer all streams are predicted from all of them; the layer
transforms the active one; the difference from its prediction corrects all streams. The coefficients
of the prediction are computed from the active stream, those of the correction from the output:

    streams     [n, inputs, hidden_size]
    predicted   stream i + sum over j of coefficient[i, j] * stream j
    corrected   predicted i + (1 + coefficient[i]) * (layer output - predicted active stream)

Coefficients and sums are float32 whatever the weights are: they are few, and the error of each
layer passes through all later layers.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvkeep.models.layers.experts import GATED
from kvkeep.models.layers.primitives import Linear, NamedWeights, Norm, Product
from kvkeep.models.spec.model_spec import Gating

TABLE = "model.embed_tokens_per_layer.weight"
PROJECTION = "model.per_layer_model_projection.weight"
PROJECTION_NORM = "model.per_layer_projection_norm.weight"
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
        table_rows = (self.table.take_rows(indices) * self.factor).view(shape)
        projected = (self.projection(x) * x.shape[-1] ** -0.5).view(shape)
        return ((self.norm(projected) + table_rows) * math.sqrt(0.5)).unbind(1)


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


@dataclass(frozen=True)
class AltUpStreams:
    """The streams' entry before the first layer and their exit after the last.

    opening, closing: a projection for each stream but the first, `[hidden_size, hidden_size]`.
    """

    opening: tuple[Product, ...]
    closing: tuple[Product, ...]

    def open(self, x: Tensor) -> Tensor:
        """Map embeddings `[n, hidden_size]` to streams, all scaled to the embedding's norm."""
        others = [_scaled_to_norm(project(x), x) for project in self.opening]
        return torch.stack((x, *others), dim=1)

    def close(self, streams: Tensor) -> Tensor:
        """Map streams to the input of the final norm, `[n, hidden_size]`: their mean."""
        first, *others = streams.unbind(1)
        total = first.float()
        for project, other in zip(self.closing, others, strict=True):
            total = total + _scaled_to_norm(project(other), first).float()
        return (total / streams.shape[1]).to(streams.dtype)


@dataclass(frozen=True)
class AltUp:
    """Prediction and correction of the streams around one layer.

    active: index of the stream that the layer computes. norm, router, prediction, correction,
    output_scale: float32. per_layer_input: applied to the other streams after the correction.
    """

    active: int
    norm: Norm
    router: Linear
    prediction: Linear
    correction: Linear
    output_scale: Tensor
    per_layer_input: PerLayerInput

    def __call__(
        self, streams: Tensor, block: Callable[[Tensor], Tensor], vectors: Tensor
    ) -> Tensor:
        """Return the streams after a layer, whose attention and MLP are `block`."""
        predicted = self._predict(streams)
        output = block(predicted[:, self.active].contiguous())
        corrected = self._correct(predicted, output)
        scaled = corrected[:, self.active].float() * self.output_scale
        update = self.per_layer_input(scaled.to(streams.dtype), vectors)
        first, others = corrected[:, :1], corrected[:, 1:]  # the first even if it is not active
        return torch.cat((first, others + update[:, None]), dim=1)

    def _predict(self, streams: Tensor) -> Tensor:
        n, inputs, _ = streams.shape
        coefficients = self.prediction(self._route(streams[:, self.active]))
        streams32 = streams.float()
        predicted = streams32 + torch.bmm(coefficients.view(n, inputs, inputs), streams32)
        return predicted.to(streams.dtype)

    def _correct(self, predicted: Tensor, output: Tensor) -> Tensor:
        coefficients = self.correction(self._route(output)) + 1
        error = output.float() - predicted[:, self.active].float()
        corrected = predicted.float() + coefficients[:, :, None] * error[:, None]
        return corrected.to(predicted.dtype)

    def _route(self, x: Tensor) -> Tensor:
        """Map `[n, hidden_size]` to `[n, inputs]` float32, each from -1 to 1."""
        return torch.tanh(self.router(self.norm(x.float()) / x.shape[-1]))


@dataclass(frozen=True)
class Laurel:
    """A low-rank branch around attention (LAuReL, arXiv:2411.07501).

    left: `[rank, hidden_size]`, right: `[hidden_size, rank]`.
    """

    left: Product
    right: Product
    norm: Norm

    def __call__(self, x: Tensor, attention_input: Tensor) -> Tensor:
        """Return x, the residual stream after attention, plus the branch; `[n, hidden_size]`."""
        branch = attention_input + self.norm(self.right(self.left(attention_input)))
        return (x + branch) * math.sqrt(0.5)


def make_per_layer_embedding(weights: NamedWeights, factor: float) -> PerLayerEmbedding | None:
    spec = weights.spec
    size, total_size = spec.per_layer_size, spec.layers * spec.per_layer_size
    rows = spec.per_layer_vocab or spec.vocab_size
    if not size:
        return None
    return PerLayerEmbedding(
        weights.product(TABLE, rows, total_size),
        weights.product(PROJECTION, total_size, spec.hidden_size),
        weights.norm(PROJECTION_NORM, size),
        size,
        factor,
        rows,
    )


def make_per_layer_input(weights: NamedWeights) -> PerLayerInput | None:
    spec, size, hidden = weights.spec, weights.spec.per_layer_size, weights.spec.hidden_size
    if not size:
        return None
    gate, projection, norm = (f"{name}.weight" for name in LAYER_PARTS)
    return PerLayerInput(
        weights.product(gate, size, hidden),
        weights.product(projection, hidden, size),
        weights.norm(norm, hidden),
        spec.gating,
    )


def make_streams(weights: NamedWeights) -> AltUpStreams | None:
    inputs, hidden = weights.spec.altup_inputs, weights.spec.hidden_size
    if not inputs:
        return None
    opening, closing = (
        tuple(
            weights.product(f"model.{name}.{index}.weight", hidden, hidden)
            for index in range(inputs - 1)
        )
        for name in ("altup_projections", "altup_unembed_projections")
    )
    return AltUpStreams(opening, closing)


def make_altup(weights: NamedWeights, per_layer_input: PerLayerInput | None) -> AltUp | None:
    inputs, hidden = weights.spec.altup_inputs, weights.spec.hidden_size
    if not inputs:
        return None
    assert per_layer_input is not None, "the config reader requires per-layer embeddings"
    return AltUp(
        weights.spec.altup_active,
        router=weights.float32_linear("altup.modality_router.weight", inputs, hidden),
        prediction=weights.float32_linear("altup.prediction_coefs.weight", inputs**2, inputs),
        correction=weights.float32_linear("altup.correction_coefs.weight", inputs, inputs),
        norm=weights.norm("altup.router_norm.weight", hidden, torch.float32),
        output_scale=weights.tensor("altup.correct_output_scale", hidden).float(),
        per_layer_input=per_layer_input,
    )


def make_laurel(weights: NamedWeights) -> Laurel | None:
    rank, hidden = weights.spec.laurel_rank, weights.spec.hidden_size
    if not rank:
        return None
    return Laurel(
        weights.product("laurel.linear_left.weight", rank, hidden),
        weights.product("laurel.linear_right.weight", hidden, rank),
        weights.norm("laurel.post_laurel_norm.weight", hidden),
    )


def _scaled_to_norm(x: Tensor, reference: Tensor) -> Tensor:
    """Scale x row by row to the RMS of the reference; both `[n, hidden_size]`."""
    x32 = x.float()
    target = reference.float().pow(2).mean(-1, keepdim=True).sqrt()
    rms = x32.pow(2).mean(-1, keepdim=True).clamp_min(1e-5).sqrt()
    return (x32 * target / rms).to(reference.dtype)

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

import torch
from torch import Tensor

from kvkeep.models.layers.experts import GATING_FUNCTIONS
from kvkeep.models.layers.primitives import NamedWeights

PER_LAYER_TABLE = "model.embed_tokens_per_layer.weight"
PROJECTION = "model.per_layer_model_projection.weight"
PROJECTION_NORM = "model.per_layer_projection_norm.weight"
# Tensor names behind a layer's prefix: gate, projection and norm of `PerLayerInput`.
LAYER_PARTS = ("per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm")


class PerLayerEmbedding:
    """The vectors of all layers.

    factor: multiplies the table's rows.
    """

    def __init__(self, weights: NamedWeights, factor: float):
        spec, self._factor = weights.spec, factor
        self._size = spec.per_layer_size
        self._vocab_size = spec.per_layer_vocab or spec.vocab_size
        total_size = spec.layers * self._size
        self._table = weights.matrix(PER_LAYER_TABLE, self._vocab_size, total_size)
        self._projection = weights.matrix(PROJECTION, total_size, spec.hidden_size)
        self._norm = weights.norm(PROJECTION_NORM, self._size)

    def __call__(self, tokens: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        """Return `[n, size]` for each layer. tokens: `[n]`, x: embeddings `[n, hidden_size]`.

        A token id beyond the table's rows takes row 0.
        """
        shape = (len(tokens), -1, self._size)
        indices = torch.where(tokens < self._vocab_size, tokens, 0)
        table_rows = (self._table.take_rows(indices) * self._factor).view(shape)
        projected = (self._projection(x) * x.shape[-1] ** -0.5).view(shape)
        return ((self._norm(projected) + table_rows) * math.sqrt(0.5)).unbind(1)


class PerLayerInput:
    """The part of a layer that reads its per-layer vectors, gated as in its MLP."""

    def __init__(self, weights: NamedWeights):
        size, hidden = weights.spec.per_layer_size, weights.spec.hidden_size
        gate, projection, norm = (f"{name}.weight" for name in LAYER_PARTS)
        self._gate = weights.matrix(gate, size, hidden)
        self._projection = weights.matrix(projection, hidden, size)
        self._norm = weights.norm(norm, hidden)
        self._gating = GATING_FUNCTIONS[weights.spec.gating]

    def __call__(self, x: Tensor, vectors: Tensor) -> Tensor:
        """Return the update of the residual stream x, `[n, hidden_size]`. vectors: `[n, size]`."""
        return self._norm(self._projection(self._gating(self._gate(x), vectors)))


class AltUpStreams:
    """The streams' entry before the first layer and their exit after the last.

    Each has a projection for each stream but the first, `[hidden_size, hidden_size]`.
    """

    def __init__(self, weights: NamedWeights):
        hidden, projections = weights.spec.hidden_size, range(weights.spec.altup_inputs - 1)
        self._embed_projections, self._unembed_projections = (
            [weights.matrix(f"model.{name}.{i}.weight", hidden, hidden) for i in projections]
            for name in ("altup_projections", "altup_unembed_projections")
        )

    def expand(self, x: Tensor) -> Tensor:
        """Map embeddings `[n, hidden_size]` to streams, all scaled to the embedding's norm."""
        others = [_scale_to_rms(project(x), x) for project in self._embed_projections]
        return torch.stack((x, *others), dim=1)

    def merge(self, streams: Tensor) -> Tensor:
        """Map streams to the input of the final norm, `[n, hidden_size]`: their mean."""
        first, *others = streams.unbind(1)
        total = first.float()
        for project, other in zip(self._unembed_projections, others, strict=True):
            total = total + _scale_to_rms(project(other), first).float()
        return (total / streams.shape[1]).to(streams.dtype)


class AltUp:
    """Prediction and correction of the streams around one layer, with float32 coefficients.

    After the correction, all streams but the first read the layer's per-layer vectors.
    """

    def __init__(self, weights: NamedWeights):
        inputs, hidden = weights.spec.altup_inputs, weights.spec.hidden_size
        self._active_index = weights.spec.altup_active
        self._per_layer_input = PerLayerInput(weights)
        self._router = weights.float32_linear("altup.modality_router.weight", inputs, hidden)
        self._prediction = weights.float32_linear(
            "altup.prediction_coefs.weight", inputs**2, inputs
        )
        self._correction = weights.float32_linear("altup.correction_coefs.weight", inputs, inputs)
        self._norm = weights.norm("altup.router_norm.weight", hidden, torch.float32)
        self._output_scale = weights.tensor("altup.correct_output_scale", hidden).float()

    def __call__(
        self, streams: Tensor, block: Callable[[Tensor], Tensor], vectors: Tensor
    ) -> Tensor:
        """Return the streams after a layer, whose attention and MLP are `block`."""
        predicted = self._predict(streams)
        output = block(predicted[:, self._active_index].contiguous())
        corrected = self._correct(predicted, output)
        active_stream = corrected[:, self._active_index].float() * self._output_scale
        update = self._per_layer_input(active_stream.to(streams.dtype), vectors)
        first, others = corrected[:, :1], corrected[:, 1:]  # the first even if it is not active
        return torch.cat((first, others + update[:, None]), dim=1)

    def _predict(self, streams: Tensor) -> Tensor:
        n, inputs, _ = streams.shape
        coefficients = self._prediction(self._router_modalities(streams[:, self._active_index]))
        streams32 = streams.float()
        predicted = streams32 + torch.bmm(coefficients.view(n, inputs, inputs), streams32)
        return predicted.to(streams.dtype)

    def _correct(self, predicted: Tensor, output: Tensor) -> Tensor:
        coefficients = self._correction(self._router_modalities(output)) + 1
        error = output.float() - predicted[:, self._active_index].float()
        corrected = predicted.float() + coefficients[:, :, None] * error[:, None]
        return corrected.to(predicted.dtype)

    def _router_modalities(self, x: Tensor) -> Tensor:
        """Map `[n, hidden_size]` to `[n, inputs]` float32, each from -1 to 1."""
        return torch.tanh(self._router(self._norm(x.float()) / x.shape[-1]))


class Laurel:
    """A low-rank branch around attention (LAuReL, arXiv:2411.07501)."""

    def __init__(self, weights: NamedWeights):
        rank, hidden = weights.spec.laurel_rank, weights.spec.hidden_size
        self._left = weights.matrix("laurel.linear_left.weight", rank, hidden)
        self._right = weights.matrix("laurel.linear_right.weight", hidden, rank)
        self._norm = weights.norm("laurel.post_laurel_norm.weight", hidden)

    def __call__(self, x: Tensor, attention_input: Tensor) -> Tensor:
        """Return x, the residual stream after attention, plus the branch; `[n, hidden_size]`."""
        branch = attention_input + self._norm(self._right(self._left(attention_input)))
        return (x + branch) * math.sqrt(0.5)


def _scale_to_rms(x: Tensor, reference: Tensor) -> Tensor:
    """Scale x row by row to the RMS of the reference; both `[n, hidden_size]`."""
    x32 = x.float()
    target_rms = reference.float().pow(2).mean(-1, keepdim=True).sqrt()
    rms = x32.pow(2).mean(-1, keepdim=True).clamp_min(1e-5).sqrt()
    return (x32 * target_rms / rms).to(reference.dtype)

"""Parts of Gemma 3n and 4 alone: per-layer embeddings, and 3n's AltUp streams and LAuReL.

Per-layer embeddings: a token has a short vector for each layer: a row of a table plus a projection
of its embedding. After its MLP a layer adds its vector, gated by the residual stream, to the
residual stream.

AltUp (arXiv:2301.13310): a token has several residual streams, each as wide as its embedding, of
which each layer computes one. Before a layer all streams are predicted from all of them; the layer
transforms the active one; the difference from its prediction corrects all streams. The coefficients
of the prediction are computed from the active stream, those of the correction from the output:

    streams     [n, num_streams, hidden_size]
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

# Tensor names of `PerLayerEmbedding`.
PER_LAYER_TABLE = "model.embed_tokens_per_layer.weight"
PROJECTION = "model.per_layer_model_projection.weight"
PROJECTION_NORM = "model.per_layer_projection_norm.weight"
# Tensor names after a layer's prefix: gate, projection and norm of `PerLayerInput`.
LAYER_PARTS = ("per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm")


class PerLayerEmbedding:
    """Computes the per-layer embeddings of tokens, for all layers at once."""

    def __init__(self, weights: NamedWeights, table_multiplier: float):
        spec, self._table_multiplier = weights.spec, table_multiplier
        self._vector_size = spec.per_layer_size
        self._vocab_size = spec.per_layer_vocab or spec.vocab_size
        total_size = spec.layers * self._vector_size
        self._table = weights.matrix(PER_LAYER_TABLE, self._vocab_size, total_size)
        self._projection = weights.matrix(PROJECTION, total_size, spec.hidden_size)
        self._norm = weights.norm(PROJECTION_NORM, self._vector_size)

    def __call__(self, tokens: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        """Return `[n, per_layer_size]` for each layer. x: embeddings, `[n, hidden_size]`.

        tokens: ids, `[n]`; one beyond the table's rows takes row 0.
        """
        shape = (len(tokens), -1, self._vector_size)
        indices = torch.where(tokens < self._vocab_size, tokens, 0)
        table_rows = (self._table.take_rows(indices) * self._table_multiplier).view(shape)
        projected = (self._projection(x) * x.shape[-1] ** -0.5).view(shape)
        return ((self._norm(projected) + table_rows) * math.sqrt(0.5)).unbind(1)  # by layer


class PerLayerInput:
    """The part of a layer that reads its per-layer embeddings, gated as in its MLP."""

    def __init__(self, weights: NamedWeights):
        size, hidden_size = weights.spec.per_layer_size, weights.spec.hidden_size
        gate, projection, norm = (f"{name}.weight" for name in LAYER_PARTS)
        self._gate = weights.matrix(gate, size, hidden_size)
        self._projection = weights.matrix(projection, hidden_size, size)
        self._norm = weights.norm(norm, hidden_size)
        self._gating = GATING_FUNCTIONS[weights.spec.gating]

    def __call__(self, x: Tensor, vectors: Tensor) -> Tensor:
        """Return the update of the residual stream x. vectors: `[n, per_layer_size]`."""
        return self._norm(self._projection(self._gating(self._gate(x), vectors)))


class AltUpStreams:
    """Makes AltUp's streams before the first layer, and merges them after the last.

    Both have a projection for each stream but the first, `[hidden_size, hidden_size]`.
    """

    def __init__(self, weights: NamedWeights):
        shape, indices = 2 * (weights.spec.hidden_size,), range(weights.spec.altup_inputs - 1)
        self._embed_projections, self._unembed_projections = (
            [weights.matrix(f"model.{name}.{i}.weight", *shape) for i in indices]
            for name in ("altup_projections", "altup_unembed_projections")
        )

    def expand(self, x: Tensor) -> Tensor:
        """Map embeddings `[n, hidden_size]` to streams: these, and projections of equal RMS."""
        others = [_scale_to_rms(project(x), x) for project in self._embed_projections]
        return torch.stack((x, *others), dim=1)

    def merge(self, streams: Tensor) -> Tensor:
        """Map streams to the input of the final norm: the mean of their projections."""
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
        num_streams, hidden_size = weights.spec.altup_inputs, weights.spec.hidden_size
        self._active_index = weights.spec.altup_active
        self._per_layer_input = PerLayerInput(weights)
        linear = weights.float32_linear
        self._router = linear("altup.modality_router.weight", num_streams, hidden_size)
        self._prediction = linear("altup.prediction_coefs.weight", num_streams**2, num_streams)
        self._correction = linear("altup.correction_coefs.weight", num_streams, num_streams)
        self._norm = weights.norm("altup.router_norm.weight", hidden_size, torch.float32)
        self._output_scale = weights.tensor("altup.correct_output_scale", hidden_size).float()

    def __call__(
        self, streams: Tensor, block: Callable[[Tensor], Tensor], vectors: Tensor
    ) -> Tensor:
        """Return the streams after a layer. block: its attention and MLP. vectors: its input."""
        predicted = self._predict(streams)
        output = block(predicted[:, self._active_index].contiguous())
        corrected = self._correct(predicted, output)
        active_stream = corrected[:, self._active_index].float() * self._output_scale
        update = self._per_layer_input(active_stream.to(streams.dtype), vectors)
        first, others = corrected[:, :1], corrected[:, 1:]  # the first even if it is not active
        return torch.cat((first, others + update[:, None]), dim=1)

    def _predict(self, streams: Tensor) -> Tensor:
        """Return all streams as predicted for the end of the layer."""
        n, num_streams, _ = streams.shape
        coefficients = self._prediction(self._router_modalities(streams[:, self._active_index]))
        streams32 = streams.float()
        predicted = streams32 + torch.bmm(coefficients.view(n, num_streams, num_streams), streams32)
        return predicted.to(streams.dtype)

    def _correct(self, predicted: Tensor, output: Tensor) -> Tensor:
        """Return the streams corrected by the layer's output, `[n, hidden_size]`."""
        coefficients = self._correction(self._router_modalities(output)) + 1
        error = output.float() - predicted[:, self._active_index].float()
        corrected = predicted.float() + coefficients[:, :, None] * error[:, None]
        return corrected.to(predicted.dtype)

    def _router_modalities(self, x: Tensor) -> Tensor:
        """Map `[n, hidden_size]` to what coefficients are computed from, `[n, num_streams]`."""
        return torch.tanh(self._router(self._norm(x.float()) / x.shape[-1]))


class Laurel:
    """A low-rank branch around attention (LAuReL, arXiv:2411.07501)."""

    def __init__(self, weights: NamedWeights):
        rank, hidden_size = weights.spec.laurel_rank, weights.spec.hidden_size
        self._left = weights.matrix("laurel.linear_left.weight", rank, hidden_size)
        self._right = weights.matrix("laurel.linear_right.weight", hidden_size, rank)
        self._norm = weights.norm("laurel.post_laurel_norm.weight", hidden_size)

    def __call__(self, x: Tensor, attention_input: Tensor) -> Tensor:
        """Return the residual stream after attention, x, plus the branch. `[n, hidden_size]`."""
        branch = attention_input + self._norm(self._right(self._left(attention_input)))
        return (x + branch) * math.sqrt(0.5)


def _scale_to_rms(x: Tensor, reference: Tensor) -> Tensor:
    """Scale x row by row to the RMS of the reference; both `[n, hidden_size]`."""
    x32 = x.float()
    target_rms = reference.float().pow(2).mean(-1, keepdim=True).sqrt()
    rms = x32.pow(2).mean(-1, keepdim=True).clamp_min(1e-5).sqrt()
    return (x32 * target_rms / rms).to(reference.dtype)

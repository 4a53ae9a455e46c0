"""The parts of Gemma 3n that no other family has: AltUp streams, LAuReL, and sparse MLP gates.

AltUp (arXiv:2301.13310): a token has several residual streams, each as wide as its embedding, of
which each layer computes one. Before a layer all streams are predicted from all of them; the layer
transforms the active one; the difference from its prediction corrects all streams. The coefficients
of both steps are computed from the active stream:

    streams     [n, inputs, hidden_size]
    predicted   stream i + sum over j of coefficient[i, j] * stream j
    corrected   predicted i + (1 + coefficient[i]) * (layer output - predicted active stream)

Coefficients and sums are float32 whatever the weights are: they are few, and the error of each
layer passes through all later layers.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import NormalDist

import torch
import torch.nn.functional as F
from torch import Tensor

from kvkeep.models.layers.experts import Experts, Mlp
from kvkeep.models.layers.per_layer import PerLayerInput, make_per_layer_input
from kvkeep.models.layers.primitives import Linear, NamedWeights, Norm, Product
from kvkeep.models.spec.model_spec import ModelSpec

_OUTPUT_SCALE = "altup.correct_output_scale"
_LAUREL_PARTS = ("laurel.linear_left", "laurel.linear_right", "laurel.post_laurel_norm")


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
        """Return the streams after a layer.

        block: attention and MLP, `[n, hidden_size]` to the same. vectors: per-layer vectors.
        """
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
        wide = streams.float()
        predicted = wide + torch.bmm(coefficients.view(n, inputs, inputs), wide)
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
    """A learned residual branch around attention (LAuReL, arXiv:2411.07501), of low rank.

    left: `[rank, hidden_size]`, right: `[hidden_size, rank]`.
    """

    left: Product
    right: Product
    norm: Norm

    def __call__(self, x: Tensor, attention_input: Tensor) -> Tensor:
        """Return x, the residual stream after attention, plus the branch; `[n, hidden_size]`."""
        branch = attention_input + self.norm(self.right(self.left(attention_input)))
        return (x + branch) * math.sqrt(0.5)


@dataclass(frozen=True)
class SparseGate:
    """An MLP gate that keeps only values far above their mean (arXiv:2506.06644).

    The bound follows from a normal distribution, so that nothing is sorted: 5% of it lie above
    1.645 standard deviations, and a sparsity of 0.95 keeps these, less the bound.

    gate: `[intermediate_size, hidden_size]`. deviations: standard deviations from the mean of a
    token's values to the bound.
    """

    gate: Callable[[Tensor], Tensor]
    deviations: float

    def __call__(self, x: Tensor) -> Tensor:
        """Map `[n, hidden_size]` to `[n, intermediate_size]`."""
        values = self.gate(x)
        wide = values.float()  # few values are kept, and they depend on the bound's last bits
        spread = wide.std(dim=-1, correction=0, keepdim=True)
        bound = wide.mean(dim=-1, keepdim=True) + self.deviations * spread
        return F.relu(wide - bound).to(values.dtype)


def make_streams(weights: NamedWeights) -> AltUpStreams | None:
    """Return the model's streams; None if it has one residual stream."""
    names = _stream_projections(weights.spec)
    opening, closing = (tuple(map(weights.product, projections)) for projections in names)
    return AltUpStreams(opening, closing) if weights.spec.altup_inputs else None


def make_altup(weights: NamedWeights) -> AltUp | None:
    """Return a layer's AltUp; None if the model has one residual stream."""
    if not weights.spec.altup_inputs:
        return None

    def linear(name: str) -> Linear:
        return Linear(weights.tensor(f"altup.{name}.weight").float(), None)

    per_layer_input = make_per_layer_input(weights)
    assert per_layer_input is not None, "the config reader requires per-layer embeddings"
    return AltUp(
        active=weights.spec.altup_active,
        norm=weights.norm("altup.router_norm.weight", torch.float32),
        router=linear("modality_router"),
        prediction=linear("prediction_coefs"),
        correction=linear("correction_coefs"),
        output_scale=weights.tensor(_OUTPUT_SCALE).float(),
        per_layer_input=per_layer_input,
    )


def make_laurel(weights: NamedWeights) -> Laurel | None:
    """Return a layer's LAuReL branch; None if the model has none."""
    if not weights.spec.laurel_rank:
        return None
    left, right, norm = (f"{name}.weight" for name in _LAUREL_PARTS)
    return Laurel(weights.product(left), weights.product(right), weights.norm(norm))


def with_sparse_gate(spec: ModelSpec, layer: int, mlp: Mlp | Experts) -> Mlp | Experts:
    """Return a layer's MLP, with a sparse gate if the model has one in this layer."""
    sparsity = spec.activation_sparsity[layer] if spec.activation_sparsity else 0
    if not sparsity or isinstance(mlp, Experts):
        return mlp
    return replace(mlp, gate=SparseGate(mlp.gate, NormalDist().inv_cdf(sparsity)))


def streams_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return the shapes of AltUp tensors that belong to no layer, by name."""
    opening, closing = _stream_projections(spec)
    return dict.fromkeys((*opening, *closing), (spec.hidden_size, spec.hidden_size))


def _stream_projections(spec: ModelSpec) -> tuple[list[str], list[str]]:
    """Return names of the projections of streams 1 and on: from embeddings, and to outputs."""
    streams = range(1, spec.altup_inputs)
    return (
        [f"model.altup_projections.{stream - 1}.weight" for stream in streams],
        [f"model.altup_unembed_projections.{stream - 1}.weight" for stream in streams],
    )


def layer_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a layer's AltUp and LAuReL tensors, by name behind its prefix."""
    inputs, rank, hidden = spec.altup_inputs, spec.laurel_rank, spec.hidden_size
    shapes: dict[str, tuple[int, ...]] = {}
    if inputs:
        shapes |= {
            "altup.modality_router.weight": (inputs, hidden),
            "altup.prediction_coefs.weight": (inputs * inputs, inputs),
            "altup.correction_coefs.weight": (inputs, inputs),
            "altup.router_norm.weight": (hidden,),
            _OUTPUT_SCALE: (hidden,),
        }
    if rank:
        laurel = ((rank, hidden), (hidden, rank), (hidden,))
        shapes |= {f"{n}.weight": shape for n, shape in zip(_LAUREL_PARTS, laurel, strict=True)}
    return shapes


def _scaled_to_norm(x: Tensor, reference: Tensor) -> Tensor:
    """Return x scaled row by row to the RMS of the reference; both `[n, hidden_size]`."""
    wide = x.float()
    target = reference.float().pow(2).mean(-1, keepdim=True).sqrt()
    rms = wide.pow(2).mean(-1, keepdim=True).clamp_min(1e-5).sqrt()
    return (wide * target / rms).to(reference.dtype)

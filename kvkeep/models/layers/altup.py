"""Several residual streams, of which each layer computes one: AltUp (arXiv:2301.13310), as Gemma 3n
has it.

A token has a few streams, each as wide as its embedding. Before a layer, all are predicted from all
of them; the layer reads the active one and gives it on, changed; and by how much that is not what
was predicted, all are corrected. The coefficients of both follow from the active stream.

    streams     [n, inputs, hidden_size]
    predicted   stream i + sum over j of coefficient[i, j] * stream j
    corrected   predicted i + (1 + coefficient[i]) * (what the layer gave - predicted active)

Coefficients and sums are float32 whatever the weights are: they are few, and each layer's errors go
through those of all layers behind it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvkeep.models.layers.experts import Product
from kvkeep.models.layers.linear import Linear
from kvkeep.models.layers.norms import Norm, norm_of
from kvkeep.models.layers.per_layer import PerLayerInput, per_layer_input
from kvkeep.models.spec.model_spec import ModelSpec

# Of each stream but the first: what makes it of an embedding, and what makes one again of it.
OPENING, CLOSING = "model.altup_projections", "model.altup_unembed_projections"
_SCALE = "altup.correct_output_scale"


@dataclass(frozen=True)
class Streams:
    """What is before the first layer and behind the last.

    opening, closing: of each stream but the first, `[hidden_size, hidden_size]`.
    """

    opening: tuple[Product, ...]
    closing: tuple[Product, ...]

    def opened(self, x: Tensor) -> Tensor:
        """Embeddings, `[n, hidden_size]`, to streams: all are as long as the embedding."""
        others = [_as_long_as(x, project(x)) for project in self.opening]
        return torch.stack((x, *others), dim=1)

    def closed(self, streams: Tensor) -> Tensor:
        """Streams to what the last norm reads, `[n, hidden_size]`: their mean."""
        first, *others = streams.unbind(1)
        sum = first.float()
        for project, other in zip(self.closing, others, strict=True):
            sum = sum + _as_long_as(first, project(other)).float()
        return (sum / streams.shape[1]).to(streams.dtype)


@dataclass(frozen=True)
class AltUp:
    """What a layer does with streams.

    active: the one that it computes. norm, router, prediction, correction, scale: float32.
    own: what the layer does with its own vectors of each token.
    """

    active: int
    norm: Norm
    router: Linear
    prediction: Linear
    correction: Linear
    scale: Tensor
    own: PerLayerInput

    def __call__(
        self, streams: Tensor, block: Callable[[Tensor], Tensor], vectors: Tensor
    ) -> Tensor:
        """Streams before the layer to those behind it.

        block: attention and MLP, `[n, hidden_size]` to the same. vectors: the layer's own.
        """
        predicted = self._predicted(streams)
        given = block(predicted[:, self.active].contiguous())
        corrected = self._corrected(predicted, given)
        scaled = corrected[:, self.active].float() * self.scale
        added = self.own(scaled.to(streams.dtype), vectors)
        first, others = corrected[:, :1], corrected[:, 1:]  # whichever of them is active
        return torch.cat((first, others + added[:, None]), dim=1)

    def _predicted(self, streams: Tensor) -> Tensor:
        n, inputs, _ = streams.shape
        coefficients = self.prediction(self._routed(streams[:, self.active]))
        wide = streams.float()
        predicted = wide + torch.bmm(coefficients.view(n, inputs, inputs), wide)
        return predicted.to(streams.dtype)

    def _corrected(self, predicted: Tensor, given: Tensor) -> Tensor:
        coefficients = self.correction(self._routed(given)) + 1
        missed = given.float() - predicted[:, self.active].float()
        corrected = predicted.float() + coefficients[:, :, None] * missed[:, None]
        return corrected.to(predicted.dtype)

    def _routed(self, x: Tensor) -> Tensor:
        """`[n, hidden_size]` to `[n, inputs]` float32, each from -1 to 1."""
        return torch.tanh(self.router(self.norm(x.float()) / x.shape[-1]))


def _as_long_as(other: Tensor, x: Tensor) -> Tensor:
    """x, made as long as the other one; both `[n, hidden_size]`."""
    wide = x.float()
    length = other.float().pow(2).mean(-1, keepdim=True).sqrt()
    own = wide.pow(2).mean(-1, keepdim=True).clamp_min(1e-5).sqrt()
    return (wide * length / own).to(other.dtype)


def streams_of(spec: ModelSpec, product: Callable[[str], Product]) -> Streams | None:
    """None where the model has the residual stream alone. product: of a matrix, by its name."""
    if not spec.altup_inputs:
        return None
    each = range(spec.altup_inputs - 1)
    opening, closing = (
        tuple(product(f"{name}.{index}.weight") for index in each) for name in (OPENING, CLOSING)
    )
    return Streams(opening, closing)


def altup_of(
    spec: ModelSpec, layer: int, tensors: Mapping[str, Tensor], product: Callable[[str], Product]
) -> AltUp | None:
    """None where the model has the residual stream alone."""
    if not spec.altup_inputs:
        return None
    prefix = f"model.layers.{layer}."

    def linear(name: str) -> Linear:
        return Linear(tensors[f"{prefix}altup.{name}.weight"].float(), None)

    own = per_layer_input(spec, layer, tensors, product)
    assert own is not None, "config_gemma3n.py asks for some"
    return AltUp(
        active=spec.altup_active,
        norm=norm_of(spec, tensors[f"{prefix}altup.router_norm.weight"].float()),
        router=linear("modality_router"),
        prediction=linear("prediction_coefs"),
        correction=linear("correction_coefs"),
        scale=tensors[f"{prefix}{_SCALE}"].float(),
        own=own,
    )


def streams_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Name and shape of what is not of a layer; none where the model has one stream alone."""
    each, shape = range(spec.altup_inputs - 1), (spec.hidden_size, spec.hidden_size)
    return {f"{name}.{index}.weight": shape for name in (OPENING, CLOSING) for index in each}


def altup_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Name and shape of what a layer has for streams; none where the model has one alone."""
    inputs, hidden = spec.altup_inputs, spec.hidden_size
    if not inputs:
        return {}
    return {
        "altup.modality_router.weight": (inputs, hidden),
        "altup.prediction_coefs.weight": (inputs * inputs, inputs),
        "altup.correction_coefs.weight": (inputs, inputs),
        "altup.router_norm.weight": (hidden,),
        _SCALE: (hidden,),
    }

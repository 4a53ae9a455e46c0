"""The choice of who computes: made here, once, when a model is loaded."""

from collections.abc import Mapping

from torch import Tensor

from kvkeep.compiled.decoder import CompiledExecutor, can_decode
from kvkeep.models.layers.decoder import Decoder
from kvkeep.models.layers.graph import GraphExecutor
from kvkeep.models.layers.network import Network
from kvkeep.models.spec.cells import cell_layout
from kvkeep.models.spec.model_spec import ModelSpec
from kvkeep.models.weights.packing import Matrix


def new_decoder(
    spec: ModelSpec,
    tensors: Mapping[str, Tensor],
    packed: Mapping[str, Matrix] | None = None,
) -> Decoder:
    """A decoder with the fastest executor that there is for it on this machine.

    packed: matrices that a decode step reads instead of tensors, where there are kernels for them;
    where there are none, all must be tensors.
    """
    layout = cell_layout(spec, tensors)
    if can_decode(spec, layout):
        return Decoder(spec, tensors, packed, CompiledExecutor(spec, tensors, packed or {}))
    # A graph replays the same products: which experts a token goes through is not known before.
    if layout.device.type == "cuda" and not spec.experts:
        return Decoder(spec, tensors, executor=GraphExecutor(Network(spec, tensors)))
    return Decoder(spec, tensors)

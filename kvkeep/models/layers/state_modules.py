"""The module of each kind of state layer."""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from kvkeep.models.layers.delta_net import GatedDeltaNet
from kvkeep.models.layers.mamba import Mamba2
from kvkeep.models.layers.primitives import NamedWeights
from kvkeep.models.layers.states import ShortConvolution, StepStates
from kvkeep.models.spec.state_layers import StateKind, StateLayers


class StateModule(Protocol):
    """Maps a layer's input, as attention would, and replaces the layer's states."""

    def __call__(self, x: Tensor, states: StepStates) -> Tensor:
        """Map `[tokens, hidden_size]` to the same shape."""


class StateModuleClass(Protocol):
    """Makes the module of one layer."""

    def __call__(self, weights: NamedWeights, layers: StateLayers, index: int) -> StateModule: ...


STATE_MODULES: Mapping[StateKind, StateModuleClass] = {
    "convolution": ShortConvolution,
    "delta_net": GatedDeltaNet,
    "mamba2": Mamba2,
}

"""The choice of a model's executor on this machine, and the reason if it is not the fastest."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from kvkeep.cache import Layout
from kvkeep.compiled.decoder import CompiledExecutor, unsupported_reason
from kvkeep.compiled.instruction_sets import TORCH, runs_here, selected_set
from kvkeep.errors import SlowPathWarning
from kvkeep.models.layers.decoder import Decoder
from kvkeep.models.layers.executor import GraphExecutor
from kvkeep.models.layers.network import Network
from kvkeep.models.layers.primitives import FINAL_NORM
from kvkeep.models.spec.cells import group_layout
from kvkeep.models.spec.model_spec import ModelSpec
from kvkeep.models.weights.packing import Matrix

_HINT = "run `kvkeep doctor` for details"


def new_decoder(
    spec: ModelSpec, tensors: Mapping[str, Tensor], packed: Mapping[str, Matrix] | None = None
) -> Decoder:
    """Return a decoder with the fastest executor here; it reads `packed` matrices if it can."""
    norm = tensors[FINAL_NORM]  # of the dtype and device of all weights
    layout = group_layout(spec, spec.groups[0], norm.dtype, norm.device)
    if not unsupported_reason(spec, layout):
        return Decoder(spec, tensors, packed, CompiledExecutor(spec, tensors, packed or {}))
    # A graph replays the same products, but the experts of a token are not known in advance.
    if layout.device.type == "cuda" and not spec.experts:
        return Decoder(spec, tensors, executor=GraphExecutor(Network(spec, tensors)))
    return Decoder(spec, tensors)


@dataclass(frozen=True)
class ComputePath:
    """The executor of a model on this machine, and what speaks against faster ones.

    Attributes:
        name: the instruction set of the compiled kernels, or "torch".
        rejection_reasons: for each faster way, by its name.
        slow_reason: the first of these in words, unless the slower way was requested by an argument
            or the environment; then "".
    """

    name: str
    rejection_reasons: dict[str, str] = field(default_factory=dict)
    slow_reason: str = ""

    def __str__(self) -> str:
        reasons = "; ".join(f"{name} {why}" for name, why in self.rejection_reasons.items())
        if self.name == TORCH:
            return f"{TORCH}: {reasons}"
        return f"compiled kernels for {self.name}" + (f"; {reasons}" if reasons else "")


def compute_path_of(spec: ModelSpec, layout: Layout) -> ComputePath:
    """Return how a model with such cells and weights is computed here. Raises InvalidArgument."""
    selected, reason = selected_set(), unsupported_reason(spec, layout)
    if not reason:
        reasons = {f"the {name} kernels": why for name, why in selected.rejected.items()}
        usable = [] if selected.requested else list(filter(runs_here, selected.rejected))
        slow = f"the {usable[0]} kernels {selected.rejected[usable[0]]}" if usable else ""
        return ComputePath(selected.name, reasons, slow)
    for_kernels = layout.device.type == "cpu" and layout.dtype is torch.bfloat16
    slow = f"the compiled kernels {reason}" if for_kernels and not selected.requested else ""
    return ComputePath(TORCH, {"the compiled kernels": reason}, slow)


def slow_path_message(path: ComputePath) -> str:
    """Return the warning about a path that is slower than it could be; "" if it is not."""
    if not (reason := path.slow_reason):
        return ""
    executor = "torch" if path.name == TORCH else f"the {path.name} kernels"
    return f"the model runs on {executor}, slower than this machine allows: {reason}; {_HINT}"


@cache
def warn_of_slow_path(message: str) -> None:
    """Warn with SlowPathWarning, once per process and message; not for ""."""
    if message:
        warnings.warn(message, SlowPathWarning, stacklevel=3)  # the caller of kvkeep.load_model

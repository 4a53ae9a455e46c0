"""The choice of the executor, which computes a model's steps, and why no faster one is used."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from kvkeep.cache import Layout
from kvkeep.compiled.decoder import CompiledExecutor, unsupported_reason
from kvkeep.compiled.instruction_sets import TORCH, runs_here, selected_set
from kvkeep.compiled.products import ProductExecutor, products_reason
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
    """Return a model's weights with the fastest executor that this machine has for them.

    tensors: weights by name. packed: quantised matrices by name, which only the kernels read.
    """
    norm = tensors[FINAL_NORM]  # there in all models, in the dtype and on the device of all tensors
    layout = group_layout(spec, spec.groups[0], norm.dtype, norm.device)
    if not unsupported_reason(spec, layout):
        return Decoder(spec, tensors, packed, CompiledExecutor(spec, tensors, packed or {}))
    if not products_reason(spec, layout):
        return Decoder(spec, tensors, packed, ProductExecutor(spec, tensors, packed or {}))
    # A CUDA graph replays a fixed list of products on fixed addresses: neither experts nor states.
    if layout.device.type == "cuda" and not spec.experts and not spec.states:
        return Decoder(spec, tensors, executor=GraphExecutor(Network(spec, tensors)))
    return Decoder(spec, tensors)


@dataclass(frozen=True)
class ComputePath:
    """The executor of a model on this machine, and why faster ones are not used."""

    name: str  # the instruction set of the compiled kernels, or "torch"
    rejection_reasons: dict[str, str] = field(default_factory=dict)  # of faster executors, by name
    slow_reason: str = ""  # why the model is slower than need be; "" if not, or if requested

    def __str__(self) -> str:
        reasons = "; ".join(f"{name} {reason}" for name, reason in self.rejection_reasons.items())
        if self.name == TORCH:
            return f"{TORCH}: {reasons}"
        return f"compiled kernels for {self.name}" + (f"; {reasons}" if reasons else "")


def compute_path_of(spec: ModelSpec, layout: Layout) -> ComputePath:
    """Return how a model is computed here. layout: of its cells, with their dtype and device.

    Raises InvalidArgument if KVKEEP_ISA names kernels that are not available.
    """
    selected, torch_reason = selected_set(), unsupported_reason(spec, layout)
    if not torch_reason:
        reasons = {f"the {name} kernels": reason for name, reason in selected.rejected.items()}
        faster = [] if selected.requested else list(filter(runs_here, selected.rejected))
        slow_reason = f"the {faster[0]} kernels {selected.rejected[faster[0]]}" if faster else ""
        return ComputePath(selected.name, reasons, slow_reason)
    kernels_expected = layout.device.type == "cpu" and layout.dtype is torch.bfloat16
    is_slow = kernels_expected and not selected.requested
    slow_reason = f"the compiled kernels {torch_reason}" if is_slow else ""
    return ComputePath(TORCH, {"the compiled kernels": torch_reason}, slow_reason)


def slow_path_message(path: ComputePath) -> str:
    """Return the warning about a path that is slower than it could be; "" if it is not."""
    if not (reason := path.slow_reason):
        return ""
    executor = "torch" if path.name == TORCH else f"the {path.name} kernels"
    return f"the model runs on {executor}, slower than this machine allows: {reason}; {_HINT}"


@cache
def warn_of_slow_path(message: str) -> None:
    """Warn with SlowPathWarning, once per process and message. An empty message is ignored."""
    if message:
        warnings.warn(message, SlowPathWarning, stacklevel=3)  # the caller of kvkeep.load_model

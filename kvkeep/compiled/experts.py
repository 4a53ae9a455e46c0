"""What a layer has behind attention, as the kernels read it: an MLP, or a mixture of experts."""

import ctypes
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch

from kvkeep.compiled.binding import CBeside, CMatrix, CMixture, CMlp
from kvkeep.compiled.held import Held
from kvkeep.compiled.operands import require
from kvkeep.models.layers.experts import EXPERT_SCALES, PARALLEL_NORMS, ROUTER_SCALE
from kvkeep.models.spec.model_spec import ModelSpec

# A matrix by its name, checked.
_Matrix: TypeAlias = Callable[[str], CMatrix]


def mlp(prefix: str, matrix: _Matrix) -> CMlp:
    return CMlp(*(matrix(f"{prefix}.{name}_proj.weight") for name in ("gate", "up", "down")))


def mixture(spec: ModelSpec, held: Held, layer: str, sampled: bool) -> CMixture:
    """layer: how the names of a layer's tensors begin.

    Raises KernelMismatch for more experts of a token than there are, which no kernel looks at.
    """
    chosen, there = spec.experts_per_token, spec.experts
    require(0 < chosen <= there, f"1 to {there} experts for each token", chosen)
    matrix, prefix = partial(held.matrix, sampled=sampled), f"{layer}mlp"
    found = CMixture(router=matrix(f"{prefix}.gate.weight"))
    if spec.shared_expert_size:
        found.shared_router = matrix(f"{prefix}.shared_expert_gate.weight")
        found.shared = mlp(f"{prefix}.shared_expert", matrix)
    each = (CMlp * there)(*(mlp(f"{prefix}.experts.{i}", matrix) for i in range(there)))
    found.expert = ctypes.cast(each, ctypes.POINTER(CMlp))
    if spec.experts_beside:
        found.scales = held.kept(held.tensors[f"{layer}{EXPERT_SCALES}"], torch.float32)
        found.beside = ctypes.pointer(_beside(held, layer))
    return found


def _beside(held: Held, layer: str) -> CBeside:
    norms = {role: held.pointer(f"{layer}{name}.weight") for role, name in PARALLEL_NORMS.items()}
    return CBeside(**norms, router_scale=held.pointer(f"{layer}{ROUTER_SCALE}"))

"""What a layer has behind attention, as the kernels read it: an MLP, or a mixture of experts."""

import ctypes
from collections.abc import Callable
from typing import TypeAlias

from kvkeep.compiled.binding import CMatrix, CMixture, CMlp
from kvkeep.compiled.operands import require
from kvkeep.models.spec import ModelSpec

# A matrix by its name, checked.
_Matrix: TypeAlias = Callable[[str], CMatrix]


def mlp(prefix: str, matrix: _Matrix) -> CMlp:
    return CMlp(*(matrix(f"{prefix}.{name}_proj.weight") for name in ("gate", "up", "down")))


def mixture(spec: ModelSpec, prefix: str, matrix: _Matrix) -> CMixture:
    """prefix: of the names of a layer's matrices.

    Raises KernelMismatch for more experts of a token than there are, which no kernel looks at.
    """
    chosen, there = spec.experts_per_token, spec.experts
    require(0 < chosen <= there, f"1 to {there} experts for each token", chosen)
    found = CMixture(router=matrix(f"{prefix}.gate.weight"))
    if spec.shared_expert_size:
        found.shared_router = matrix(f"{prefix}.shared_expert_gate.weight")
        found.shared = mlp(f"{prefix}.shared_expert", matrix)
    each = (CMlp * there)(*(mlp(f"{prefix}.experts.{i}", matrix) for i in range(there)))
    found.expert = ctypes.cast(each, ctypes.POINTER(CMlp))
    return found

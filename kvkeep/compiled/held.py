"""What kernels are handed of a model: matrices and vectors by name, each looked at before."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kvkeep.compiled.binding import CMatrix
from kvkeep.compiled.matrices import described
from kvkeep.compiled.operands import address
from kvkeep.errors import KernelMismatch
from kvkeep.models.spec.model_spec import ModelSpec
from kvkeep.models.weights.packing import Matrix
from kvkeep.models.weights.tensors import EMBEDDING, HEAD, is_router, tensor_shapes


class Held:
    """A model's tensors, bfloat16, and matrices that are packed, as `CompiledExecutor` has both.

    Whatever else there is, no kernel knows of it. All that is handed out lives as long as this.
    """

    def __init__(
        self, spec: ModelSpec, tensors: Mapping[str, Tensor], packed: Mapping[str, Matrix]
    ):
        self.shapes = tensor_shapes(spec)
        self.tensors = {name: tensors[name].contiguous() for name in self.shapes if name in tensors}
        self._packed = packed
        self._tied = spec.tied_head
        self._kept: list[Tensor] = []

    def found(self, name: str, sampled: bool) -> Matrix:
        """What tokens that were sampled are multiplied by, or those of a prompt."""
        tied = name == HEAD and self._tied
        held: tuple[Mapping[str, Matrix], ...] = (self.tensors, self._packed)
        for there in reversed(held) if sampled else held:
            for each in (HEAD, EMBEDDING) if tied else (name,):
                if each in there:
                    return there[each]
        raise KernelMismatch(f"the compiled kernels need {name}, and there is none")

    def matrix(self, name: str, sampled: bool) -> CMatrix:
        """Of no rows where the model's kind has no such tensor. Raises KernelMismatch."""
        shape = self.shapes.get(EMBEDDING if name == HEAD and self._tied else name)
        if shape is None:
            return CMatrix()
        bias = self.pointer(name.removesuffix("weight") + "bias")
        rounded = not sampled and not is_router(name)
        return described(name, self.found(name, sampled), shape, bias, rounded)

    def pointer(self, name: str) -> int | None:
        """Of a tensor; None where the model's kind has no such one. Raises KernelMismatch."""
        if name not in self.shapes:
            return None
        return address(self.tensors[name], name, torch.bfloat16, self.shapes[name])

    def kept(self, numbers: Sequence[float] | Tensor, dtype: torch.dtype) -> int:
        """The address of numbers that are held from now on."""
        self._kept.append(torch.as_tensor(numbers, dtype=dtype, device="cpu").contiguous())
        return self._kept[-1].data_ptr()

"""Operands of the compiled kernels: addresses of tensors, and structures that point to them.

A kernel trusts its pointers, so a tensor of another dtype, shape or layout than it reads is refused
here. A check must take less than a microsecond: a decode step of a small model makes two thousand.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kvkeep.cache import RaggedCells
from kvkeep.cache.quantised import SCALE_DTYPE, KVTensor, scale_count
from kvkeep.compiled import structures as c
from kvkeep.errors import KernelMismatch
from kvkeep.models.layers.network import tensor_shapes
from kvkeep.models.layers.primitives import EMBEDDING, LM_HEAD
from kvkeep.models.spec.model_spec import ModelSpec
from kvkeep.models.weights.packing import Matrix, packed_shapes
from kvkeep.models.weights.tensors import is_router


def address(x: Tensor, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """Return the address of a dense CPU tensor. Raises KernelMismatch, with `name`, for others."""
    if x.dtype is not dtype or x.shape != shape or not x.is_contiguous() or not x.is_cpu:
        raise _mismatch_error(x, name, f"dense {dtype} {list(shape)}")
    return x.data_ptr()


def strided_address(x: Tensor, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """Return the address of a tensor whose last dimension is dense. Raises KernelMismatch."""
    if x.dtype is not dtype or x.shape != shape or x.stride()[-1] != 1 or not x.is_cpu:
        raise _mismatch_error(x, name, f"{dtype} {list(shape)}, the last dimension dense")
    return x.data_ptr()


def cell_bias_address(x: Tensor, shape: tuple[int, ...]) -> int:
    """Return the address of cells' biases, `[..., cells]`. Raises KernelMismatch."""
    return strided_address(x, "the cells' biases", torch.float32, shape)


def stored_cells(stored: KVTensor, shape: tuple[int, ...], *outer_strides: int) -> c.CStoredCells:
    """Describe keys or values, plain or quantised, `[layers, kv_heads, cells, head_dim]`.

    shape: the expected shape, which may lack leading dimensions. outer_strides: the strides of
    these, such as 0 for cells of one layer. Raises KernelMismatch.
    """
    if isinstance(stored, Tensor):
        data = strided_address(stored, "cells", torch.bfloat16, shape)
        strides = c.CStrides(*outer_strides, *stored.stride()[:-1])
        return c.CStoredCells(data, None, strides, c.CStrides(), 16, 0)
    bits, head_dim = stored.bits, shape[-1]
    dtype, vector_bytes = (torch.int8, head_dim) if bits == 8 else (torch.uint8, head_dim // 2)
    outer_shape, num_scales = shape[:-1], scale_count(head_dim, bits)
    return c.CStoredCells(
        strided_address(stored.data, "quantised cells", dtype, (*outer_shape, vector_bytes)),
        strided_address(stored.scale, "their scales", SCALE_DTYPE, (*outer_shape, num_scales)),
        c.CStrides(*outer_strides, *stored.data.stride()[:-1]),
        c.CStrides(*outer_strides, *stored.scale.stride()[:-1]),
        bits,
        0,
    )


def ragged_cells(
    cells: RaggedCells, layers: int, kv_heads: int, head_dim: int
) -> tuple[c.CStoredCells, c.CStoredCells, int, int]:
    """Describe ragged cells, of which each layer and KV head has a number of its own.

    Returns keys, values, and the addresses of the cells' biases and of the offset of each head.
    Raises KernelMismatch, also for counts of other heads or another total.
    """
    stored_shape, offsets = (cells.total, head_dim), cells.offsets
    assert cells.bias is not None
    if cells.counts.shape != (layers, kv_heads) or not cells.counts_are_valid:
        heads_text = f"{layers} x {kv_heads} heads"
        require(False, f"{cells.total} ragged cells in {heads_text}", cells.counts.tolist())
    return (
        stored_cells(cells.stored_keys, stored_shape, 0, 0),
        stored_cells(cells.stored_values, stored_shape, 0, 0),
        cell_bias_address(cells.bias, (cells.total,)),
        address(offsets, "offsets", torch.int64, (layers * kv_heads + 1,)),
    )


def matrix_operand(
    name: str, matrix: Matrix, shape: tuple[int, ...], bias: int | None, round_weights: bool
) -> c.CMatrix:
    """Describe a weight matrix, dense or packed.

    shape: `(rows, columns)`. bias: the address of `[rows]` bfloat16. round_weights: multiply as if
    each had been rounded to bfloat16. Raises KernelMismatch for a matrix of another shape.
    """
    rows, columns = shape
    if isinstance(matrix, Tensor):
        require(matrix.dtype in c.DENSE_FORMATS, f"{name} in 16 or 32 bits", matrix.dtype)
        data = address(matrix, name, matrix.dtype, shape)
        format_number = c.DENSE_FORMATS[matrix.dtype]
        return c.CMatrix(format_number, rows, columns, int(round_weights), data, None, bias)
    require(matrix.rows == rows, f"{name} packed with {rows} rows", matrix.rows)
    data_shape, scales_shape = packed_shapes(matrix.format, rows, columns)
    data = address(matrix.data, name, torch.uint8, data_shape)
    scales = address(matrix.scales, f"the scales of {name}", torch.uint8, scales_shape)
    return c.CMatrix(matrix.format.kernel_id, rows, columns, int(round_weights), data, scales, bias)


class ModelOperands:
    """A model's weights by name, tensors and packed matrices; see `CompiledExecutor`.

    Weights that `spec` does not name are ignored. Addresses are valid as long as this object lives.
    """

    def __init__(
        self, spec: ModelSpec, tensors: Mapping[str, Tensor], packed: Mapping[str, Matrix]
    ):
        self.shapes = tensor_shapes(spec)
        self.tensors = {name: tensors[name].contiguous() for name in self.shapes if name in tensors}
        self._packed = packed
        self._tied_head = spec.tied_head
        self._copies: list[Tensor] = []

    def weight(self, name: str, sampled: bool) -> Matrix:
        """Return a matrix: preferably packed for sampled tokens, and a tensor for a prompt's.

        Raises KernelMismatch for a missing weight.
        """
        tensor_names = (LM_HEAD, EMBEDDING) if name == LM_HEAD and self._tied_head else (name,)
        sources: tuple[Mapping[str, Matrix], ...] = (self.tensors, self._packed)
        for source in reversed(sources) if sampled else sources:
            for tensor_name in tensor_names:
                if tensor_name in source:
                    return source[tensor_name]
        raise KernelMismatch(f"the compiled kernels need {name}, which is missing")

    def describe_matrix(self, name: str, sampled: bool, rounded: bool = False) -> c.CMatrix:
        """Describe a matrix; it has no rows if the spec does not name it. Raises KernelMismatch.

        sampled: see `weight`. rounded: as if each weight had been rounded to bfloat16, as torch's
        products read them; routers are not rounded.
        """
        shape = self.shapes.get(EMBEDDING if name == LM_HEAD and self._tied_head else name)
        if shape is None:
            return c.CMatrix()
        bias = self.address_of(name.removesuffix("weight") + "bias")
        round_weights = rounded and not is_router(name)
        return matrix_operand(name, self.weight(name, sampled), shape, bias, round_weights)

    def address_of(self, name: str) -> int | None:
        """Return a tensor's address; None if the spec does not name it. Raises KernelMismatch."""
        if name not in self.shapes:
            return None
        return address(self.tensors[name], name, torch.bfloat16, self.shapes[name])

    def copy_address(self, numbers: Sequence[float] | Tensor, dtype: torch.dtype) -> int:
        """Return the address of a copy of the numbers, which this object keeps alive."""
        self._copies.append(torch.as_tensor(numbers, dtype=dtype, device="cpu").contiguous())
        return self._copies[-1].data_ptr()


def require(condition: bool, expected: str, actual: Any) -> None:
    """Raise KernelMismatch unless the condition holds."""
    if not condition:
        raise KernelMismatch(f"the compiled kernels need {expected}; found {actual}")


def _mismatch_error(x: Tensor, name: str, expected: str) -> KernelMismatch:
    return KernelMismatch(
        f"the compiled kernels need {name} as {expected} on the CPU; found {x.dtype} "
        f"{list(x.shape)} with strides {list(x.stride())} on {x.device}. Set KVKEEP_COMPILED=0 to "
        "use torch"
    )

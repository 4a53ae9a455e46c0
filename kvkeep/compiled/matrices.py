"""Matrices as the compiled kernels read them, and their products with the rows of a prompt.

A token that was sampled is multiplied by weights as they are packed. A prompt's tokens are
multiplied by the same weights, each rounded to bfloat16, however many tokens a step has: few by a
kernel, many by the library, to which a matrix is unpacked part by part. On a processor that does
not multiply bfloat16 the library is handed the same numbers in float32.
"""

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from kvkeep.compiled.binding import PLAIN, CMatrix, require_done
from kvkeep.compiled.operands import address, require
from kvkeep.models.layers.primitives import padded_rows
from kvkeep.models.weights.packing import BLOCK, Matrix, packed_shapes

FEW = 16  # rows that a kernel multiplies: beyond, unpacking and the library are faster
_SCRATCH = 1 << 26  # bytes that are unpacked at a time, 64 MB


def described(
    name: str, matrix: Matrix, shape: tuple[int, ...], bias: int | None, rounded: bool
) -> CMatrix:
    """rounded: as if each weight had been rounded to bfloat16.

    Raises KernelMismatch for a matrix that is not of that shape.
    """
    rows, columns = shape
    if isinstance(matrix, Tensor):
        require(matrix.dtype in PLAIN, f"{name} in 16 or 32 bits", matrix.dtype)
        data = address(matrix, name, matrix.dtype, shape)
        return CMatrix(PLAIN[matrix.dtype], rows, columns, int(rounded), data, None, bias)
    require(matrix.rows == rows, f"{name} packed with {rows} rows", matrix.rows)
    shapes = packed_shapes(matrix.format, rows, columns)
    data = address(matrix.data, name, torch.uint8, shapes[0])
    scales = address(matrix.scales, f"the scales of {name}", torch.uint8, shapes[1])
    return CMatrix(matrix.format.number, rows, columns, int(rounded), data, scales, bias)


class PackedLinear:
    """A product with rows of bfloat16, `[n, columns]` to `[n, rows]`, of a matrix that is packed.

    matrix: to be read as rounded. bias: `[rows]` bfloat16, or None. kept: what the matrix is of.
    dtype: of the library's products.
    """

    def __init__(
        self,
        kernels: ctypes.CDLL,
        matrix: CMatrix,
        bias: Tensor | None,
        kept: Matrix,
        dtype: torch.dtype,
    ):
        self._kernels = kernels
        self._dtype = dtype
        self._matrix = matrix
        self._bias = bias
        self._kept = kept

    def __call__(self, x: Tensor) -> Tensor:
        return self._by_kernel(x) if x.shape[0] <= FEW else self._by_library(x)

    def dense(self) -> Tensor:
        """All of it, `[rows, columns]` bfloat16."""
        out = torch.empty(
            self._matrix.rows, self._matrix.columns, dtype=torch.bfloat16, device="cpu"
        )
        self._unpack(0, -(-self._matrix.rows // BLOCK), out)
        return out

    def take_rows(self, indices: Tensor) -> Tensor:
        """Return rows of the matrix, `[n, columns]` bfloat16. indices: `[n]` int64."""
        matrix, indices = self._matrix, indices.contiguous()
        rows = indices.tolist()
        require(
            not rows or 0 <= min(rows) <= max(rows) < matrix.rows,
            f"rows of 0 to {matrix.rows - 1}",
            rows,
        )
        out = torch.empty(len(rows), matrix.columns, dtype=torch.bfloat16, device="cpu")
        require_done(
            self._kernels.kvkeep_rows(matrix, indices.data_ptr(), len(rows), out.data_ptr())
        )
        return out

    def _by_kernel(self, x: Tensor) -> Tensor:
        matrix, x = self._matrix, x.contiguous()
        read = address(x, "rows", torch.bfloat16, (x.shape[0], matrix.columns))
        out = torch.empty(x.shape[0], matrix.rows, dtype=torch.float32, device="cpu")
        threads = torch.get_num_threads()
        require_done(
            self._kernels.kvkeep_product(matrix, read, x.shape[0], out.data_ptr(), threads)
        )
        return out.bfloat16()

    def _by_library(self, x: Tensor) -> Tensor:
        matrix, n = self._matrix, x.shape[0]
        if self._dtype is torch.bfloat16 and (missing := padded_rows(n) - n):
            x = F.pad(x, (0, 0, 0, missing))
        x = x.to(self._dtype)
        step = max(1, _SCRATCH // (matrix.columns * BLOCK * self._dtype.itemsize))
        blocks, parts = -(-matrix.rows // BLOCK), []
        scratch = _scratch(min(step, blocks) * BLOCK * matrix.columns, self._dtype)
        for first in range(0, blocks, step):
            begin, end = first * BLOCK, min((first + step) * BLOCK, matrix.rows)
            some = scratch[: (end - begin) * matrix.columns].view(end - begin, matrix.columns)
            self._unpack(first, min(step, blocks - first), some)
            bias = None if self._bias is None else self._bias[begin:end].to(self._dtype)
            parts.append(F.linear(x, some, bias)[:n].bfloat16())
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def _unpack(self, first: int, blocks: int, out: Tensor) -> None:
        kernels, threads = self._kernels, torch.get_num_threads()
        is_bf16 = out.dtype is torch.bfloat16
        unpack = kernels.kvkeep_unpack if is_bf16 else kernels.kvkeep_unpack_floats
        require_done(unpack(self._matrix, first, blocks, out.data_ptr(), threads))


_OF_THREAD = threading.local()


@contextmanager
def one_scratch() -> Iterator[None]:
    """Products in the block are unpacked to one piece of memory, which then is given back."""
    try:
        yield
    finally:
        vars(_OF_THREAD).pop("scratch", None)


def _scratch(size: int, dtype: torch.dtype) -> Tensor:
    """Of so many numbers; of a thread the same memory for each call."""
    held: Tensor | None = getattr(_OF_THREAD, "scratch", None)
    if held is None or held.nbytes < size * dtype.itemsize:
        held = torch.empty(size * dtype.itemsize, dtype=torch.uint8, device="cpu")
        _OF_THREAD.scratch = held
    return held[: size * dtype.itemsize].view(dtype)

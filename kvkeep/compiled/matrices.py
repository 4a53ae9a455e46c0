"""Products of packed weight matrices with the rows of a prompt.

A sampled token is multiplied by the weights as they are packed. A prompt's tokens are multiplied
by the same weights, each rounded to bfloat16, whatever the size of the step: few rows by a kernel,
many by torch, for which the matrix is unpacked part by part. On a processor without fast bfloat16
products torch gets the same numbers in float32.
"""

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from kvkeep.compiled.binding import CMatrix, require_done
from kvkeep.compiled.operands import address, require
from kvkeep.models.layers.primitives import padded_rows
from kvkeep.models.weights.packing import BLOCK, Matrix

FEW = 16  # rows that a kernel multiplies: beyond, unpacking and torch are faster
_SCRATCH = 1 << 26  # bytes that are unpacked at a time, 64 MB


class PackedLinear:
    """The product of bfloat16 rows with a packed matrix: `[n, columns]` to `[n, rows]`.

    matrix: the operand, marked as rounded. bias: `[rows]` bfloat16, or None. weight: the storage
    that the operand points to. dtype: of torch's products.
    """

    def __init__(
        self,
        kernels: ctypes.CDLL,
        matrix: CMatrix,
        bias: Tensor | None,
        weight: Matrix,
        dtype: torch.dtype,
    ):
        self._kernels = kernels
        self._matrix = matrix
        self._bias = bias
        self._weight = weight  # not read here; must live as long as the operand
        self._dtype = dtype

    def __call__(self, x: Tensor) -> Tensor:
        return self._by_kernel(x) if x.shape[0] <= FEW else self._by_torch(x)

    def dense(self) -> Tensor:
        """Return the matrix unpacked, `[rows, columns]` bfloat16."""
        rows, columns = self._matrix.rows, self._matrix.columns
        out = torch.empty(rows, columns, dtype=torch.bfloat16, device="cpu")
        self._unpack(0, -(-rows // BLOCK), out)
        return out

    def take_rows(self, indices: Tensor) -> Tensor:
        """Return rows of the matrix, `[n, columns]` bfloat16. indices: `[n]` int64."""
        matrix, indices = self._matrix, indices.contiguous()
        rows = indices.tolist()
        in_range = not rows or 0 <= min(rows) <= max(rows) < matrix.rows
        require(in_range, f"rows of 0 to {matrix.rows - 1}", rows)
        out = torch.empty(len(rows), matrix.columns, dtype=torch.bfloat16, device="cpu")
        require_done(
            self._kernels.kvkeep_rows(matrix, indices.data_ptr(), len(rows), out.data_ptr())
        )
        return out

    def _by_kernel(self, x: Tensor) -> Tensor:
        matrix, x, threads = self._matrix, x.contiguous(), torch.get_num_threads()
        rows = address(x, "rows", torch.bfloat16, (x.shape[0], matrix.columns))
        out = torch.empty(x.shape[0], matrix.rows, dtype=torch.float32, device="cpu")
        require_done(
            self._kernels.kvkeep_product(matrix, rows, x.shape[0], out.data_ptr(), threads)
        )
        return out.bfloat16()

    def _by_torch(self, x: Tensor) -> Tensor:
        matrix, n = self._matrix, x.shape[0]
        if self._dtype is torch.bfloat16 and (missing := padded_rows(n) - n):
            x = F.pad(x, (0, 0, 0, missing))
        x = x.to(self._dtype)
        step = max(1, _SCRATCH // (matrix.columns * BLOCK * self._dtype.itemsize))
        blocks, parts = -(-matrix.rows // BLOCK), []
        scratch = _scratch(min(step, blocks) * BLOCK * matrix.columns, self._dtype)
        for first in range(0, blocks, step):
            begin, end = first * BLOCK, min((first + step) * BLOCK, matrix.rows)
            part = scratch[: (end - begin) * matrix.columns].view(end - begin, matrix.columns)
            self._unpack(first, min(step, blocks - first), part)
            bias = None if self._bias is None else self._bias[begin:end].to(self._dtype)
            parts.append(F.linear(x, part, bias)[:n].bfloat16())
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def _unpack(self, first: int, blocks: int, out: Tensor) -> None:
        kernels, threads = self._kernels, torch.get_num_threads()
        is_bf16 = out.dtype is torch.bfloat16
        unpack = kernels.kvkeep_unpack if is_bf16 else kernels.kvkeep_unpack_floats
        require_done(unpack(self._matrix, first, blocks, out.data_ptr(), threads))


_thread_local = threading.local()


@contextmanager
def shared_scratch() -> Iterator[None]:
    """Unpack the matrices of all products in the block to one buffer, freed at its end."""
    try:
        yield
    finally:
        vars(_thread_local).pop("scratch", None)


def _scratch(size: int, dtype: torch.dtype) -> Tensor:
    """Return this thread's scratch buffer as `[size]` numbers, enlarged where it is too small."""
    buffer: Tensor | None = getattr(_thread_local, "scratch", None)
    if buffer is None or buffer.nbytes < size * dtype.itemsize:
        buffer = torch.empty(size * dtype.itemsize, dtype=torch.uint8, device="cpu")
        _thread_local.scratch = buffer
    return buffer[: size * dtype.itemsize].view(dtype)

"""Products of a prompt's hidden states, one row for each token, with packed weight matrices.

Where bfloat16 products are slow, a kernel multiplies rows as integers by the weights as they are
packed, to the bits of a sampled token's products; with KVKEEP_PROMPT_BITS=8 many rows are less
exact, also on some processors where bfloat16 products are fast. Elsewhere each weight is rounded to
bfloat16, whatever the size of the step: a kernel multiplies few rows; for many, the matrix is
unpacked part by part and torch multiplies.
"""

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kvkeep.compiled.binding import raise_for_status
from kvkeep.compiled.operands import address, require
from kvkeep.compiled.structures import CMatrix
from kvkeep.models.layers.primitives import padded_row_count
from kvkeep.models.weights.packing import BLOCK_ROWS, Matrix

MAX_KERNEL_ROWS = 16  # above, unpacking and torch are faster
_SCRATCH_BYTES = 1 << 26  # size of the part of a matrix that is unpacked at a time


@dataclass(frozen=True, eq=False)
class PackedLinear:
    """The product of bfloat16 rows with a packed matrix: `[n, columns]` to `[n, rows]`.

    rows, columns: the shape of the matrix; it is stored in blocks of 16 rows. _matrix: points to
    `_weight`, and is marked as rounded. _bias: `[rows]` bfloat16. _dtype: of torch's products.
    _row_bits: see `PromptProducts`. 8 is for more than `MAX_KERNEL_ROWS` rows: up to as many have
    16, or are multiplied as without integers where `_dtype` is bfloat16.
    """

    _kernels: ctypes.CDLL
    _matrix: CMatrix
    _bias: Tensor | None
    _weight: Matrix  # keeps the matrix's storage alive
    _dtype: torch.dtype
    _row_bits: int = 0

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply `[n, columns]` bfloat16."""
        has_few_rows = x.shape[0] <= MAX_KERNEL_ROWS
        row_bits = 0 if isinstance(self._weight, Tensor) else self._row_bits
        if has_few_rows and row_bits == 8:
            row_bits = 0 if self._dtype is torch.bfloat16 else 16
        if row_bits:
            return self._multiply_as_integers(x, row_bits)
        return self._multiply_by_kernel(x) if has_few_rows else self._multiply_by_torch(x)

    def dense(self) -> Tensor:
        """Unpack the matrix, `[rows, columns]` bfloat16."""
        rows, columns = self._matrix.rows, self._matrix.columns
        out = torch.empty(rows, columns, dtype=torch.bfloat16, device="cpu")
        self._unpack(0, -(-rows // BLOCK_ROWS), out)
        return out

    def take_rows(self, indices: Tensor) -> Tensor:
        """Return rows of the matrix, `[n, columns]` bfloat16. indices: `[n]` int64."""
        matrix, indices = self._matrix, indices.contiguous()
        rows, count = indices.tolist(), len(indices)
        in_range = not rows or 0 <= min(rows) <= max(rows) < matrix.rows
        require(in_range, f"row indices from 0 to {matrix.rows - 1}", rows)
        out = torch.empty(count, matrix.columns, dtype=torch.bfloat16, device="cpu")
        status = self._kernels.kvkeep_rows(matrix, indices.data_ptr(), count, out.data_ptr())
        raise_for_status(status)
        return out

    def _multiply_by_kernel(self, x: Tensor) -> Tensor:
        matrix, x, n = self._matrix, x.contiguous(), x.shape[0]
        x_address = address(x, "rows", torch.bfloat16, (n, matrix.columns))
        out = torch.empty(n, matrix.rows, dtype=torch.float32, device="cpu")
        threads, multiply = torch.get_num_threads(), self._kernels.kvkeep_product
        raise_for_status(multiply(matrix, x_address, n, out.data_ptr(), threads))
        return out.bfloat16()

    def _multiply_as_integers(self, x: Tensor, row_bits: int) -> Tensor:
        matrix, x, n = self._matrix, x.contiguous(), x.shape[0]
        x_address = address(x, "rows", torch.bfloat16, (n, matrix.columns))
        out = torch.empty(n, matrix.rows, dtype=torch.bfloat16, device="cpu")
        threads, multiply = torch.get_num_threads(), self._kernels.kvkeep_prompt_product
        raise_for_status(multiply(matrix, x_address, n, out.data_ptr(), threads, row_bits))
        return out

    def _multiply_by_torch(self, x: Tensor) -> Tensor:
        matrix, n = self._matrix, x.shape[0]
        # torch prepares bfloat16 products anew for each number of rows, so there are only a few.
        if self._dtype is torch.bfloat16 and (padding := padded_row_count(n) - n):
            x = F.pad(x, (0, 0, 0, padding))
        x = x.to(self._dtype)
        block_count, outputs = -(-matrix.rows // BLOCK_ROWS), []
        max_blocks = max(1, _SCRATCH_BYTES // (matrix.columns * BLOCK_ROWS * self._dtype.itemsize))
        scratch = _scratch(min(max_blocks, block_count) * BLOCK_ROWS * matrix.columns, self._dtype)
        for block in range(0, block_count, max_blocks):
            begin, end = block * BLOCK_ROWS, min((block + max_blocks) * BLOCK_ROWS, matrix.rows)
            weight = scratch[: (end - begin) * matrix.columns].view(end - begin, matrix.columns)
            self._unpack(block, min(max_blocks, block_count - block), weight)
            bias = None if self._bias is None else self._bias[begin:end].to(self._dtype)
            outputs.append(F.linear(x, weight, bias)[:n].bfloat16())
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)

    def _unpack(self, first_block: int, block_count: int, out: Tensor) -> None:
        """Unpack blocks of rows to `out`, `[rows, columns]` bfloat16 or float32."""
        kernels, threads = self._kernels, torch.get_num_threads()
        to_bfloat16 = out.dtype is torch.bfloat16
        unpack = kernels.kvkeep_unpack if to_bfloat16 else kernels.kvkeep_unpack_floats
        raise_for_status(unpack(self._matrix, first_block, block_count, out.data_ptr(), threads))


_thread_local = threading.local()


@contextmanager
def shared_scratch() -> Iterator[None]:
    """Let all products within the context unpack to one buffer, freed at its end."""
    try:
        yield
    finally:
        vars(_thread_local).pop("scratch", None)


def _scratch(count: int, dtype: torch.dtype) -> Tensor:
    """Return `[count]` numbers of this thread's scratch buffer, enlarged if it is too small."""
    buffer: Tensor | None = getattr(_thread_local, "scratch", None)
    if buffer is None or buffer.nbytes < count * dtype.itemsize:
        buffer = torch.empty(count * dtype.itemsize, dtype=torch.uint8, device="cpu")
        _thread_local.scratch = buffer
    return buffer[: count * dtype.itemsize].view(dtype)

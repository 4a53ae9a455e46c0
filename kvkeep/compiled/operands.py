"""Tensors whose addresses the compiled kernels are handed: only what they were written to read.

A kernel trusts its pointers. Whatever is of another dtype, shape or layout is refused here, at a
fraction of a microsecond each: a decode step of a small model takes two thousand of them.
"""

from typing import Any

import torch
from torch import Tensor

from kvkeep.cache import Ragged
from kvkeep.cache.quantised import SCALE, KVTensor, scale_count
from kvkeep.compiled import binding as c
from kvkeep.errors import KernelMismatch


def address(x: Tensor, what: str, dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """Of a dense tensor in the CPU's memory. Raises KernelMismatch for any other."""
    if x.dtype is not dtype or x.shape != shape or not x.is_contiguous() or not x.is_cpu:
        raise _mismatch(x, what, f"dense {dtype} {list(shape)}")
    return x.data_ptr()


def row_address(x: Tensor, what: str, dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """As `address`, where only the last dimension must be dense: strides are handed over, too."""
    if x.dtype is not dtype or x.shape != shape or x.stride()[-1] != 1 or not x.is_cpu:
        raise _mismatch(x, what, f"{dtype} {list(shape)}, the last dimension dense")
    return x.data_ptr()


def biases(x: Tensor, shape: tuple[int, ...]) -> int:
    """The address of cells' biases, `[..., cells]`. Raises KernelMismatch."""
    return row_address(x, "the cells' biases", torch.float32, shape)


def kept(stored: KVTensor, shape: tuple[int, ...], *before: int) -> c.CKept:
    """Keys or values, plain or quantised, `[layers, kv_heads, cells, head_dim]` or without cells.

    shape: what the kernel will take for granted. before: strides of dimensions that were taken
    away in front, such as 0 for cells of one layer. Raises KernelMismatch.
    """
    if isinstance(stored, Tensor):
        data = row_address(stored, "cells", torch.bfloat16, shape)
        return c.CKept(data, None, c.CStrides(*before, *stored.stride()[:-1]), c.CStrides(), 16, 0)
    bits, head_dim = stored.bits, shape[-1]
    kind, width = (torch.int8, head_dim) if bits == 8 else (torch.uint8, head_dim // 2)
    vectors = shape[:-1]
    return c.CKept(
        row_address(stored.data, "quantised cells", kind, (*vectors, width)),
        row_address(stored.scale, "their scales", SCALE, (*vectors, scale_count(head_dim, bits))),
        c.CStrides(*before, *stored.data.stride()[:-1]),
        c.CStrides(*before, *stored.scale.stride()[:-1]),
        bits,
        0,
    )


def row(cells: Ragged, layers: int, kv_heads: int, head_dim: int) -> tuple[Any, Any, int, int]:
    """Keys, values, and the addresses of biases and offsets of ragged cells of so many heads.

    Raises KernelMismatch, too, where counts are not of these cells, or of other heads.
    """
    vectors, offsets = (cells.total, head_dim), cells.offsets
    assert cells.bias is not None
    if cells.counts.shape != (layers, kv_heads) or not cells.counts_match:
        heads = f"{layers} x {kv_heads} heads"
        require(False, f"{cells.total} cells, shared by {heads}", cells.counts.tolist())
    return (
        kept(cells.stored_keys, vectors, 0, 0),
        kept(cells.stored_values, vectors, 0, 0),
        biases(cells.bias, (cells.total,)),
        address(offsets, "offsets", torch.int64, (layers * kv_heads + 1,)),
    )


def require(holds: bool, expected: str, found: object) -> None:
    """Raises KernelMismatch."""
    if not holds:
        raise KernelMismatch(f"the compiled kernels need {expected}; found {found}")


def _mismatch(x: Tensor, what: str, expected: str) -> KernelMismatch:
    return KernelMismatch(
        f"the compiled kernels read {what} as {expected} on the CPU; found {x.dtype} "
        f"{list(x.shape)} with strides {list(x.stride())} on {x.device}. KVKEEP_COMPILED=0 goes "
        "by torch alone"
    )

"""The largest dot product of each vector with the vectors of another set."""

import math

import torch
from torch import Tensor

from kvkeep.compiled.binding import kernel_library, raise_for_status
from kvkeep.compiled.operands import address
from kvkeep.compiled.structures import CSimilarity

BLOCK_ROWS = 256  # rows compared with all older ones at a time


def most_similar(x: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest product of each vector of x with a vector of `others`, and its index.

    x: `[layers, kv_heads, n, width]` bfloat16 or float32. others: `[layers, kv_heads, m, width]`,
    m > 0. Returns `[layers, kv_heads, n]` float32 and int64.
    """
    indices = torch.empty(x.shape[:3], dtype=torch.int64, device=x.device)
    largest = _run_kernel(x, others, indices)
    if largest is not None:
        return largest, indices
    # Layer by layer, to bound the memory that the products take.
    layers = zip(x, others, strict=True)
    maxima = [(rows @ columns.transpose(-1, -2)).max(-1) for rows, columns in layers]
    products, argmaxima = zip(*maxima, strict=True)
    return torch.stack(products).float(), torch.stack(argmaxima)


def most_similar_older(x: Tensor) -> Tensor:
    """Return the largest product of each vector with an earlier one; -inf for the first vector.

    x: `[layers, kv_heads, n, width]` bfloat16. Returns `[layers, kv_heads, n]` float32.
    """
    largest = _run_kernel(x, x, None)
    if largest is not None:
        return largest
    parts, count = [], x.shape[2]
    not_older_mask = torch.ones(BLOCK_ROWS, count, dtype=torch.bool, device=x.device).triu_()
    for first in range(0, count, BLOCK_ROWS):  # later columns are not needed
        end = min(first + BLOCK_ROWS, count)
        products = x[:, :, first:end] @ x[:, :, :end].transpose(-1, -2)
        diagonal_block = products[..., first:]
        diagonal_block.masked_fill_(not_older_mask[: end - first, : end - first], -math.inf)
        parts.append(products.amax(-1))
    return torch.cat(parts, -1).float()


def _run_kernel(x: Tensor, others: Tensor, indices: Tensor | None) -> Tensor | None:
    """Return the largest products, by the compiled kernel; None if it cannot compute them.

    indices: an output; None to compare each vector with earlier ones only.
    """
    kernels = kernel_library()
    if kernels is None or x.device.type != "cpu" or x.dtype != torch.bfloat16 or x.shape[-1] % 2:
        return None
    x, others = x.contiguous(), others.contiguous()
    (layers, kv_heads, rows, width), columns = x.shape, others.shape[2]
    largest = torch.empty(layers, kv_heads, rows, dtype=torch.float32, device="cpu")
    arguments = CSimilarity(
        layers * kv_heads,
        rows,
        columns,
        width,
        int(indices is None),
        torch.get_num_threads(),
        address(x, "vectors", torch.bfloat16, (layers, kv_heads, rows, width)),
        address(others, "others", torch.bfloat16, (layers, kv_heads, columns, width)),
        largest.data_ptr(),
        None if indices is None else address(indices, "indices", torch.int64, largest.shape),
    )
    raise_for_status(kernels.kvkeep_most_similar(arguments))
    return largest

"""Which of some vectors is most like each of others."""

import math

import torch
from torch import Tensor

from kvkeep.compiled.binding import CSimilarity, library, require_done
from kvkeep.compiled.operands import address

BLOCK = 256  # rows compared with all older ones at a time


def most_similar(x: Tensor, among: Tensor) -> tuple[Tensor, Tensor]:
    """The largest product of each vector with one of others, and with which.

    x: `[layers, kv_heads, n, width]` bfloat16 or float32, among: `[layers, kv_heads, m, width]`, m
    above 0. Returns `[layers, kv_heads, n]` float32 and int64.
    """
    which = torch.empty(x.shape[:3], dtype=torch.int64, device=x.device)
    most = _by_kernels(x, among, which)
    if most is not None:
        return most, which
    # Layer by layer, so that not all products are there at once.
    found = [
        (rows @ columns.transpose(-1, -2)).max(-1) for rows, columns in zip(x, among, strict=True)
    ]
    return torch.stack([most for most, _ in found]).float(), torch.stack([at for _, at in found])


def most_similar_older(x: Tensor) -> Tensor:
    """The largest product of each vector with one before it; minus infinity for the first.

    x: `[layers, kv_heads, n, width]` bfloat16. Returns `[layers, kv_heads, n]` float32.
    """
    most = _by_kernels(x, x, None)
    if most is not None:
        return most
    found, count = [], x.shape[2]
    later = torch.ones(BLOCK, count, dtype=torch.bool, device=x.device).triu_()
    for first in range(0, count, BLOCK):  # what is younger need not be looked at
        upto = min(first + BLOCK, count)
        products = x[:, :, first:upto] @ x[:, :, :upto].transpose(-1, -2)
        diagonal = products[..., first:]
        diagonal.masked_fill_(later[: upto - first, : upto - first], -math.inf)
        found.append(products.amax(-1))
    return torch.cat(found, -1).float()


def _by_kernels(x: Tensor, among: Tensor, which: Tensor | None) -> Tensor | None:
    """which: filled; None where each row meets those before it only. None where no kernel can."""
    kernels = library()
    if kernels is None or x.device.type != "cpu" or x.dtype != torch.bfloat16 or x.shape[-1] % 2:
        return None
    x, among = x.contiguous(), among.contiguous()
    (layers, kv_heads, rows, width), columns = x.shape, among.shape[2]
    most = torch.empty(layers, kv_heads, rows, dtype=torch.float32, device="cpu")
    asked = CSimilarity(
        layers * kv_heads,
        rows,
        columns,
        width,
        int(which is None),
        torch.get_num_threads(),
        address(x, "vectors", torch.bfloat16, (layers, kv_heads, rows, width)),
        address(among, "others", torch.bfloat16, (layers, kv_heads, columns, width)),
        most.data_ptr(),
        None if which is None else address(which, "indices", torch.int64, most.shape),
    )
    require_done(kernels.kvkeep_most_similar(asked))
    return most

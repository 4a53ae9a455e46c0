"""A chunk step's attention by the compiled kernels: one call for each layer."""

import ctypes
from functools import cached_property

import torch
from torch import Tensor

from kvkeep.cache.quantised import Stored
from kvkeep.cache.step import ChunkStep, View
from kvkeep.compiled import library as c
from kvkeep.compiled.cells import kept


class ChunkAttention:
    """What a chunk step sees, prepared once and used by every layer."""

    def __init__(self, step: ChunkStep, kernels: ctypes.CDLL):
        self._step = step
        self._kernels = kernels

    @cached_property
    def _angles(self) -> Tensor:
        """`[rotations, n, head_dim]` float32: cosines and sines of each query's position."""
        frequencies = self._step.rope.inverse_frequencies
        positions = torch.tensor(self._step.where, dtype=torch.int64, device="cpu")
        shape = (*positions.shape, 2 * frequencies.shape[0])
        angles = torch.empty(shape, dtype=torch.float32, device="cpu")
        self._kernels.kvkeep_angles(
            frequencies.data_ptr(),
            angles.shape[-1],
            positions.data_ptr(),
            positions.numel(),
            angles.data_ptr(),
        )
        return angles

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As `Step.attend`."""
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        step, (n, heads, head_dim) = self._step, q.shape
        keys, values = step.new.keys[layer], step.new.values[layer]
        step.observe(layer, q)
        own = _part(keys, values, 0, step.own_bias, causal=step.own_bias is None)
        parts = [own, *(_of_view(view, layer) for view in step.views)]
        out = torch.empty(n, heads * head_dim, dtype=q.dtype, device="cpu")
        chunk = c.Chunk(
            n,
            heads,
            k.shape[1],
            head_dim,
            len(step.where),
            len(parts),
            torch.get_num_threads(),
            step.scale,
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            ctypes.cast(self._angles.data_ptr(), ctypes.POINTER(ctypes.c_float)),
            keys.data_ptr(),
            values.data_ptr(),
            keys.stride(0),
            values.stride(0),
            (c.Part * len(parts))(*parts),
            out.data_ptr(),
        )
        status = self._kernels.kvkeep_attend_chunk(chunk)
        assert status == 0, "can_decode was asked"
        return out


def _of_view(view: View, layer: int) -> c.Part:
    keys, values, cell_bias = view.keys[layer], view.values[layer], view.cell_bias[layer]
    return _part(keys, values, view.rotation, view.bias, causal=False, cell_bias=cell_bias)


def _part(
    keys: Stored,
    values: Stored,
    rotation: int,
    bias: Tensor | None,
    causal: bool,
    cell_bias: Tensor | None = None,
) -> c.Part:
    """keys, values: `[kv_heads, cells, head_dim]`."""
    return c.Part(
        kept(keys, "head", "cell"),
        kept(values, "head", "cell"),
        keys.shape[1],
        rotation,
        int(causal),
        0 if bias is None or bias.shape[0] == 1 else bias.stride(0),
        None if bias is None else bias.data_ptr(),
        *((None, 0) if cell_bias is None else (cell_bias.data_ptr(), cell_bias.stride(0))),
    )

"""A chunk step's attention by the compiled kernels: one call for each layer."""

import ctypes
from functools import cached_property

import torch
from torch import Tensor

from kvkeep.cache import Ragged
from kvkeep.cache.quantised import KVTensor
from kvkeep.cache.step import ChunkStep, View
from kvkeep.compiled import binding as c
from kvkeep.compiled.binding import require_done
from kvkeep.compiled.operands import address, biases, kept, require, row


class ChunkAttention:
    """What a chunk step sees, prepared once and used by every layer."""

    def __init__(self, step: ChunkStep, kernels: ctypes.CDLL):
        layers = step.new_cells.keys.shape[0]
        for view in step.views:
            cells = view.slots
            found = cells.counts.shape[0] if isinstance(cells, Ragged) else len(view.keys)
            require(found == layers, f"cells of {layers} layers", found)
        self._step = step
        self._kernels = kernels

    @cached_property
    def _angles(self) -> Tensor:
        """`[rotations, n, head_dim]` float32: cosines and sines of each query's position."""
        return self._turned_by(self._step.attention.rope.inverse_frequencies)

    @cached_property
    def _no_angles(self) -> Tensor:
        """The same of layers without RoPE: all are 0."""
        return self._turned_by(torch.zeros_like(self._step.attention.rope.inverse_frequencies))

    def _turned_by(self, frequencies: Tensor) -> Tensor:
        positions = torch.tensor(self._step.query_positions, dtype=torch.int64, device="cpu")
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

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        """As `Step.attend`. Raises KernelMismatch, OutOfMemory."""
        step, (n, heads, head_dim) = self._step, q.shape
        keys, values = step.new_cells.keys[layer], step.new_cells.values[layer]
        kv_heads = keys.shape[0]
        places = (kv_heads, n, head_dim)
        require(n == step.count, f"queries of {step.count} tokens", n)
        require(heads % kv_heads == 0, f"a multiple of {kv_heads} heads", heads)
        q = q.contiguous()
        given = [None if x is None else x.contiguous() for x in (k, v)]
        require((k is None) == (v is None), "keys with values, or neither", given)
        own = _part(keys, values, places, n, 0, step.own_bias, causal=step.own_bias is None)
        parts = [own, *(_of_view(view, layer, places) for view in step.views)]
        out = torch.empty(n, heads * head_dim, dtype=torch.bfloat16, device="cpu")
        turns = self._no_angles if layer in step.attention.rope.unrotated else self._angles
        sinks = None if step.attention.sinks is None else step.attention.sinks[layer]
        angles = address(turns, "angles", torch.float32, (len(step.query_positions), n, head_dim))
        chunk = c.CChunk(
            n,
            heads,
            kv_heads,
            head_dim,
            len(step.query_positions),
            len(parts),
            torch.get_num_threads(),
            step.attention.scale,
            step.attention.softcap,
            0,
            None if sinks is None else address(sinks, "sinks", torch.float32, (heads,)),
            address(q, "queries", torch.bfloat16, (n, heads, head_dim)),
            *(
                None if x is None else address(x, what, torch.bfloat16, (n, kv_heads, head_dim))
                for what, x in zip(("keys", "values"), given, strict=True)
            ),
            ctypes.cast(angles, ctypes.POINTER(ctypes.c_float)),
            address(keys, "new keys", torch.bfloat16, places),
            address(values, "new values", torch.bfloat16, places),
            keys.stride(0),
            values.stride(0),
            (c.CPart * len(parts))(*parts),
            out.data_ptr(),
            None
            if step.log_sums is None
            else address(step.log_sums[layer], "log sums", torch.float32, (heads, n)),
        )
        step.observe(layer, q)
        require_done(self._kernels.kvkeep_attend_chunk(chunk))
        return out


def _of_view(view: View, layer: int, places: tuple[int, int, int]) -> c.CPart:
    kv_heads, n, head_dim = places
    if isinstance(view.slots, Ragged):
        return _ragged(view.slots, layer, kv_heads, head_dim, view.rotation)
    keys, values, cell_bias = view.keys[layer], view.values[layer], view.cell_bias[layer]
    seen = (kv_heads, keys.shape[1], head_dim)
    return _part(keys, values, seen, n, view.rotation, view.bias, False, cell_bias)


def _part(
    keys: KVTensor,
    values: KVTensor,
    shape: tuple[int, int, int],
    n: int,
    rotation: int,
    bias: Tensor | None,
    causal: bool,
    cell_bias: Tensor | None = None,
) -> c.CPart:
    """shape: `[kv_heads, cells, head_dim]`, of keys and values. n: queries."""
    kv_heads, cells, _ = shape
    rows = 1 if bias is None or bias.shape[0] == 1 else n
    return c.CPart(
        kept(keys, shape, 0),
        kept(values, shape, 0),
        cells,
        rotation,
        int(causal),
        0 if rows == 1 else cells,
        None if bias is None else address(bias, "a bias", torch.float32, (rows, cells)),
        None if cell_bias is None else biases(cell_bias, (kv_heads, cells)),
        0 if cell_bias is None else cell_bias.stride(0),
        None,
    )


def _ragged(cells: Ragged, layer: int, kv_heads: int, head_dim: int, rotation: int) -> c.CPart:
    keys, values, bias, offsets = row(cells, cells.counts.shape[0], kv_heads, head_dim)
    offsets += layer * kv_heads * cells.offsets.itemsize
    most = int(cells.counts[layer].max())
    return c.CPart(keys, values, most, rotation, 0, 0, None, bias, 0, offsets)

"""Attention of a prompt's chunk by the compiled kernels, one call for each layer."""

import ctypes
from functools import cached_property

import torch
from torch import Tensor

from kvkeep.cache import LayerAttention, RaggedCells
from kvkeep.cache.step import ChunkStep, LayerDispatch
from kvkeep.cache.view import View
from kvkeep.compiled import binding as c
from kvkeep.compiled.operands import address, cell_bias_address, ragged_cells, require, stored_cells
from kvkeep.models.layers.executor import AnyStep


def layer_attention(step: AnyStep) -> LayerAttention:
    """Return the attention for a forward that torch computes: by the kernels if they support it."""
    kernels = c.library()
    if kernels is None or not isinstance(step, ChunkStep):
        return step.layer_attention
    layouts = [s.newest_segment.layout for s in (step, step.local_step) if s]
    is_supported = all(
        layout.device.type == "cpu"
        and layout.dtype is torch.bfloat16
        and layout.head_dim in c.HEAD_DIMS
        for layout in layouts
    )
    return chunk_attention(step, kernels) if is_supported else step.layer_attention


def chunk_attention(step: ChunkStep, kernels: ctypes.CDLL) -> LayerAttention:
    """Return the kernels' attention of a chunk in all layers, local ones included."""
    attention = ChunkAttention(step, kernels)
    if not isinstance(step.local_step, ChunkStep):
        return attention
    return LayerDispatch(step.placements, attention, ChunkAttention(step.local_step, kernels))


class ChunkAttention:
    """The attention of one chunk step in a group of layers.

    Raises KernelMismatch if the cells have another number of layers than the chunk.
    """

    def __init__(self, step: ChunkStep, kernels: ctypes.CDLL):
        layers = step.new_cells.keys.shape[0]
        for view in step.views:
            cells = view.slots
            count = cells.counts.shape[0] if isinstance(cells, RaggedCells) else len(view.keys)
            require(count == layers, f"cells of {layers} layers", count)
        self._step = step
        self._kernels = kernels

    @cached_property
    def _angles(self) -> Tensor:
        """`[rotations, n, head_dim]` float32: cosines and sines of each query's position."""
        return self._angles_of(self._step.attention.rope.inverse_frequencies)

    @cached_property
    def _zero_angles(self) -> Tensor:
        """`[rotations, n, head_dim]` float32: the same for layers without RoPE, all angles 0."""
        return self._angles_of(torch.zeros_like(self._step.attention.rope.inverse_frequencies))

    def _angles_of(self, frequencies: Tensor) -> Tensor:
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
        """Attend as `Step.attend` does. Raises KernelMismatch, OutOfMemory."""
        step, (n, heads, head_dim) = self._step, q.shape
        keys, values = step.new_cells.keys[layer], step.new_cells.values[layer]
        kv_heads = keys.shape[0]
        cells_shape, kv_shape = (kv_heads, n, head_dim), (n, kv_heads, head_dim)
        require(n == step.count, f"queries of {step.count} tokens", n)
        require(heads % kv_heads == 0, f"a multiple of {kv_heads} heads", heads)
        q = q.contiguous()
        k, v = (None if x is None else x.contiguous() for x in (k, v))
        require((k is None) == (v is None), "keys and values together, or neither", (k, v))
        views = [_describe_view(view, layer, cells_shape) for view in step.all_views]
        out = torch.empty(n, heads * head_dim, dtype=torch.bfloat16, device="cpu")
        rotations, attention = len(step.query_positions), step.attention
        angles = self._zero_angles if layer in attention.rope.unrotated_layers else self._angles
        angles_address = address(angles, "angles", torch.float32, (rotations, n, head_dim))
        sinks = None if attention.sinks is None else attention.sinks[layer]
        chunk = c.CChunk(
            n,
            heads,
            kv_heads,
            head_dim,
            rotations,
            len(views),
            torch.get_num_threads(),
            attention.scale,
            attention.softcap,
            0,
            None if sinks is None else address(sinks, "sinks", torch.float32, (heads,)),
            address(q, "queries", torch.bfloat16, (n, heads, head_dim)),
            None if k is None else address(k, "keys", torch.bfloat16, kv_shape),
            None if v is None else address(v, "values", torch.bfloat16, kv_shape),
            ctypes.cast(angles_address, ctypes.POINTER(ctypes.c_float)),
            address(keys, "new keys", torch.bfloat16, cells_shape),
            address(values, "new values", torch.bfloat16, cells_shape),
            keys.stride(0),
            values.stride(0),
            (c.CChunkView * len(views))(*views),
            out.data_ptr(),
            None
            if step.log_sums is None
            else address(step.log_sums[layer], "log sums", torch.float32, (heads, n)),
        )
        step.observe(layer, q)
        c.raise_for_status(self._kernels.kvkeep_attend_chunk(chunk))
        return out


def _describe_view(view: View, layer: int, cells_shape: tuple[int, int, int]) -> c.CChunkView:
    """Describe a view's cells in one layer. cells_shape: `(kv_heads, n, head_dim)` of the chunk."""
    kv_heads, n, head_dim = cells_shape
    cells = view.slots
    if isinstance(cells, RaggedCells):
        keys, values, biases, offsets = ragged_cells(
            cells, cells.counts.shape[0], kv_heads, head_dim
        )
        offsets += layer * kv_heads * cells.offsets.itemsize
        max_count, rotation = int(cells.counts[layer].max()), view.rotation_index
        return c.CChunkView(keys, values, max_count, rotation, 0, 0, None, biases, 0, offsets)
    layer_keys, layer_values = view.keys[layer], view.values[layer]
    count, bias, cell_bias = layer_keys.shape[1], view.bias, view.cell_bias[layer]
    shape = (kv_heads, count, head_dim)
    bias_rows = 1 if bias is None or bias.shape[0] == 1 else n
    return c.CChunkView(
        stored_cells(layer_keys, shape, 0),
        stored_cells(layer_values, shape, 0),
        count,
        view.rotation_index,
        int(view.causal),
        0 if bias_rows == 1 else count,
        None if bias is None else address(bias, "a bias", torch.float32, (bias_rows, count)),
        None if cell_bias is None else cell_bias_address(cell_bias, (kv_heads, count)),
        0 if cell_bias is None else cell_bias.stride(0),
        None,
    )

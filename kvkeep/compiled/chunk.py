"""Attention of a prompt's chunk by the compiled kernels, one call for each layer."""

import ctypes
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from kvkeep.cache import LayerAttention, Layout, RaggedCells
from kvkeep.cache.step import ChunkStep, dispatch
from kvkeep.cache.view import View
from kvkeep.compiled import structures as c
from kvkeep.compiled.binding import HEAD_DIMS, STATUS_NO_MEMORY, kernel_library, raise_for_status
from kvkeep.compiled.operands import address, cell_bias_address, ragged_cells, require, stored_cells
from kvkeep.models.layers.executor import AnyStep

_BLOCK_CELLS = 64  # `kBlockCells` in src/attention.h


def layer_attention(step: AnyStep) -> LayerAttention:
    """Return the attention of a forward that torch computes: by the kernels if they support it."""
    kernels = kernel_library()
    if kernels is None or not isinstance(step, ChunkStep):
        return step.layer_attention
    layouts = [s.newest_segment.layout for s in (step, step.local_step) if s]
    is_supported = all(map(supports_attention, layouts))
    return chunk_attention(step, kernels) if is_supported else step.layer_attention


def supports_attention(layout: Layout) -> bool:
    """Whether the kernels compute the attention of a chunk to cells of a layout."""
    on_cpu, is_bfloat16 = layout.device.type == "cpu", layout.dtype is torch.bfloat16
    return on_cpu and is_bfloat16 and layout.head_dim in HEAD_DIMS


def chunk_attention(step: ChunkStep, kernels: ctypes.CDLL) -> LayerAttention:
    """Return the kernels' attention of a chunk in all layers, including those with a window."""
    local = step.local_step
    local_attention = ChunkAttention(local, kernels) if isinstance(local, ChunkStep) else None
    return dispatch(step.placements, ChunkAttention(step, kernels), local_attention)


class ChunkAttention:
    """The attention of a chunk of a prompt in the layers of one cache.

    step: has the chunk's new cells, and views of the stored ones. Raises KernelMismatch if these
    have another number of layers than the chunk.
    """

    def __init__(self, step: ChunkStep, kernels: ctypes.CDLL):
        layer_count = step.new_cells.keys.shape[0]
        for view in step.views:
            cells = view.slots
            count = cells.counts.shape[0] if isinstance(cells, RaggedCells) else len(view.keys)
            require(count == layer_count, f"cells of {layer_count} layers", count)
        self._step, self._kernels = step, kernels
        self._packed = torch.empty(0, dtype=torch.uint8, device="cpu")

    @cached_property
    def _angles(self) -> Tensor:
        """`[rotations, n, head_dim]` float32: cosines and sines of each query's position."""
        return self._compute_angles(self._step.attention.rope.inverse_frequencies)

    @cached_property
    def _zero_angles(self) -> Tensor:
        """`[rotations, n, head_dim]` float32: the same for layers without RoPE, all angles 0."""
        frequencies = torch.zeros_like(self._step.attention.rope.inverse_frequencies)
        return self._compute_angles(frequencies)

    def _compute_angles(self, frequencies: Tensor) -> Tensor:
        """Return `[rotations, n, 2 * len(frequencies)]`: one rotation for each position map."""
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
        """Store a layer's new cells, and attend to all that its queries see.

        q: `[n, heads, head_dim]`. k, v: `[n, kv_heads, head_dim]`, or None for a layer that reads
        the cells of another one. All are bfloat16, and unrotated. Returns `[n, heads * head_dim]`.
        Raises KernelMismatch, OutOfMemory.
        """
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
            tokens=n,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            rotations=rotations,
            view_count=len(views),
            threads=torch.get_num_threads(),
            softmax_scale=attention.scale,
            softcap=attention.softcap,
            sinks=None if sinks is None else address(sinks, "sinks", torch.float32, (heads,)),
            q=address(q, "queries", torch.bfloat16, (n, heads, head_dim)),
            k=None if k is None else address(k, "keys", torch.bfloat16, kv_shape),
            v=None if v is None else address(v, "values", torch.bfloat16, kv_shape),
            angles=ctypes.cast(angles_address, ctypes.POINTER(ctypes.c_float)),
            new_keys=address(keys, "new keys", torch.bfloat16, cells_shape),
            new_values=address(values, "new values", torch.bfloat16, cells_shape),
            new_key_head=keys.stride(0),
            new_value_head=values.stride(0),
            views=(c.CChunkView * len(views))(*views),
            packed=self._packed_memory(packed_bytes(views, kv_heads, head_dim)).data_ptr(),
            out=out.data_ptr(),
            log_sums=None
            if step.log_sums is None
            else address(step.log_sums[layer], "log sums", torch.float32, (heads, n)),
        )
        step.observe(layer, q)  # keeps the queries, if a compression needs them
        raise_for_status(self._kernels.kvkeep_attend_chunk(chunk))
        return out

    def _packed_memory(self, size: int) -> Tensor:
        """Return memory for packed cells, the same for all layers of the step: `[size or more]`."""
        if self._packed.nbytes < size:
            try:
                self._packed = torch.empty(size, dtype=torch.uint8, device="cpu")
            except RuntimeError:
                raise_for_status(STATUS_NO_MEMORY)
        return self._packed


def packed_bytes(views: Sequence[c.CChunkView], kv_heads: int, head_dim: int) -> int:
    """Return the size of `CChunk.packed`: keys and values in blocks of 64 cells, in bfloat16."""
    blocks: int = sum(-(-view.cells // _BLOCK_CELLS) for view in views)
    return blocks * kv_heads * _BLOCK_CELLS * 2 * head_dim * torch.bfloat16.itemsize


def _describe_view(view: View, layer: int, cells_shape: tuple[int, int, int]) -> c.CChunkView:
    """Describe stored cells that a chunk of cells, `(kv_heads, n, head_dim)`, attends to."""
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

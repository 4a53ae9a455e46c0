"""Stored cells as the queries of one step see them."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kvkeep.cache.attention import AttentionConfig, Part, attend_cells, hiding_bias
from kvkeep.cache.block import Cells
from kvkeep.cache.quantised import KVTensor
from kvkeep.cache.ragged import Ragged
from kvkeep.cache.segment import Segment


@dataclass(frozen=True)
class View:
    """Stored cells as the queries of this step see them.

    slots, span: the storage of the cells, and their range in it. origin: the place of its slot 0.
    rotation: index of the step's rotation that the queries take towards these cells.
    bias: `[n, cells]` float32, or None where every query sees every cell, as with ragged cells.
    """

    slots: Cells
    span: slice
    rotation: int
    bias: Tensor | None
    origin: int

    @cached_property
    def keys(self) -> tuple[KVTensor, ...]:
        """For each layer `[kv_heads, cells, head_dim]`; not for ragged cells."""
        return self.slots.stored_keys[:, :, self.span].unbind()

    @cached_property
    def values(self) -> tuple[KVTensor, ...]:
        """For each layer `[kv_heads, cells, head_dim]`; not for ragged cells."""
        return self.slots.stored_values[:, :, self.span].unbind()

    @cached_property
    def cell_bias(self) -> tuple[Tensor | None, ...]:
        """For each layer `[kv_heads, cells]` float32, or None."""
        return self.slots.layer_biases(self.span)

    def attend(self, layer: int, q: Tensor, attention: AttentionConfig) -> Part:
        """Attend with queries `[n, heads, head_dim]`, rotated; see `attend_cells`."""
        if isinstance(self.slots, Ragged):
            return self.slots.attend(layer, q, attention.scale, attention.softcap)
        return attend_cells(
            q,
            self.keys[layer],
            self.values[layer],
            scale=attention.scale,
            bias=self.bias,
            causal=False,
            cell_bias=self.cell_bias[layer],
            softcap=attention.softcap,
        )


def visibility_bias(
    segment: Segment, span: slice, first: int, count: int, visible: list[tuple[int, int]] | None
) -> Tensor | None:
    """Return the bias `[n, cells]` of the slots of `span`; None if every query sees every cell.

    first, count: which of the segment's cells are in these slots, 0 for the oldest.
    visible: for each query, the range (first, end) of cells that it sees; None for all of them.
    """
    if visible is None and count == span.stop - span.start:
        return None
    slots = torch.arange(span.start, span.stop, dtype=torch.int64, device="cpu")
    # 0 for the oldest cell. A cell that is being written comes last, whether its slot was free or
    # that of an evicted cell.
    order = (slots - segment.start - first) % segment.capacity + first
    bounds = torch.tensor(visible or [(first, first + count)], dtype=torch.int64, device="cpu")
    seen = (order >= bounds[:, :1]) & (order < bounds[:, 1:])
    seen &= (order >= first) & (order < first + count)
    return hiding_bias(~seen).to(segment.layout.device)

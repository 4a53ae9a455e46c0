"""Stored cells as the queries of one step see them."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from kvkeep.cache.attention import AttentionConfig, PartialAttention, attend_cells, range_bias
from kvkeep.cache.block import Cells
from kvkeep.cache.quantised import KVTensor, stored_tensors
from kvkeep.cache.ragged import RaggedCells
from kvkeep.cache.segment import Segment


@dataclass(frozen=True)
class View:
    """Stored cells as the queries of one step see them.

    slots, slot_range: the storage of the cells and their range. place_offset: the place of slot 0.
    rotation_index: of the step's rotation that the queries take towards these cells.
    bias: `[n, cells]` float32, or None where every query sees every cell, as with ragged cells.
    causal: whether query i sees cells 0 ... i only; there is no bias then.
    """

    slots: Cells
    slot_range: slice
    rotation_index: int
    bias: Tensor | None
    place_offset: int
    causal: bool = field(default=False, kw_only=True)

    @classmethod
    def of_segment(
        cls,
        segment: Segment,
        first: int,
        end: int,
        rotation_index: int,
        visible_ranks: list[tuple[int, int]],
    ) -> "View":
        """Return the view of a segment's cells `first ... end - 1`, 0 for the oldest.

        visible_ranks: for each query, the range (first, end) of cells that it sees, by their ranks
        in the segment; empty if every query sees all of the view.

        The last step's view of the block is returned again if it is the same and has no bias, as of
        most frozen segments. Edits leave hundreds of these, which each token would describe anew.
        """
        ranges = segment.slot_ranges(first, end - first)
        slot_range = ranges[0] if len(ranges) == 1 else slice(0, segment.capacity)
        block, bias = segment.block, None
        if visible_ranks or end - first < slot_range.stop - slot_range.start:
            slots = torch.arange(slot_range.start, slot_range.stop, dtype=torch.int64, device="cpu")
            # The rank of each slot's cell. `first` is the lowest, so a cell that is written in this
            # step has the highest, also in a ring where it takes the slot of an evicted cell.
            ranks = (slots - segment.start - first) % segment.capacity + first
            bias = range_bias(ranks, visible_ranks or [(first, end)], segment.layout.device)
        elif (last := block.last_view) is not None and (
            last.slots is block.slots
            and last.slot_range == slot_range
            and last.rotation_index == rotation_index
        ):
            view: View = last
            return view
        view = cls(block.slots, slot_range, rotation_index, bias, block.place_offset)
        if bias is None:
            block.last_view = view
        return view

    @cached_property
    def storage_key(self) -> tuple[int, ...]:
        """The same for views of the same memory: addresses and strides, and the place of slot 0."""
        stored = (
            *stored_tensors(self.slots.stored_keys),
            *stored_tensors(self.slots.stored_values),
        )
        addresses = (n for x in stored for n in (x.data_ptr(), *x.stride()))
        return (self.place_offset, *addresses)

    @cached_property
    def descriptions(self) -> dict[Any, Any]:
        """Descriptions of these cells for kernels, by their parameters, kept with the view."""
        return {}

    @cached_property
    def keys(self) -> tuple[KVTensor, ...]:
        """For each layer `[kv_heads, cells, head_dim]`; not for ragged cells."""
        return self.slots.stored_keys[:, :, self.slot_range].unbind()

    @cached_property
    def values(self) -> tuple[KVTensor, ...]:
        """For each layer `[kv_heads, cells, head_dim]`; not for ragged cells."""
        return self.slots.stored_values[:, :, self.slot_range].unbind()

    @cached_property
    def cell_bias(self) -> tuple[Tensor | None, ...]:
        """For each layer `[kv_heads, cells]` float32, or None."""
        return self.slots.layer_biases(self.slot_range)

    def release(self) -> None:
        """Free the tensors of each layer, which a view that is kept would hold between steps."""
        for name in ("keys", "values", "cell_bias"):
            vars(self).pop(name, None)

    def attend(self, layer: int, q: Tensor, attention: AttentionConfig) -> PartialAttention:
        """Attend with queries `[n, heads, head_dim]`, rotated; see `attend_cells`."""
        if isinstance(self.slots, RaggedCells):
            return self.slots.attend(layer, q, attention.scale, attention.softcap)
        return attend_cells(
            q,
            self.keys[layer],
            self.values[layer],
            scale=attention.scale,
            bias=self.bias,
            causal=self.causal,
            cell_bias=self.cell_bias[layer],
            softcap=attention.softcap,
        )

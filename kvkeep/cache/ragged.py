"""Compressed cells whose count differs between layers and KV heads."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from kvkeep.cache.attention import MASK_BIAS, PartialAttention, attend_cells
from kvkeep.cache.block import NO_TOKEN, Cells
from kvkeep.cache.quantised import map_stored
from kvkeep.cache.rope import Rope

_ZERO = torch.zeros(1, dtype=torch.int64, device="cpu")


@dataclass(frozen=True)
class RaggedCells(Cells):
    """Compressed cells in one row: those of layer 0 and KV head 0, oldest first, of head 1, ...

    They are never sliced or written to. Their length is the mean number of cells of a head, rounded
    up.

    stored_keys, stored_values: `[total, head_dim]`.
    positions, bias: `[total]`.
    serials: `[length]`, all `NO_TOKEN`.
    counts: `[layers, kv_heads]` int64 on the CPU, the number of cells of each head.
    scores: `[total]` float32, for an eviction method that scores each cell once; else None.
    residual: `[total]` bool on the CPU, which cells are residual: each stands for a cluster of
        evicted cells, whose number is in its bias. None: no cell.

    With two layers of two heads that have 3, 0, 4 and 2 cells, a total of 9:

        counts   [[3, 0], [4, 2]]
        offsets  0, 3, 3, 7, 9       head 0 of layer 1 has the cells 3 to 6; the length is 3
    """

    counts: Tensor = field(default_factory=_ZERO.clone)
    scores: Tensor | None = None
    residual: Tensor | None = None

    @classmethod
    def from_cells(cls, cells: Cells) -> "RaggedCells":
        """Return ragged cells as they are, and others as a row of equal counts."""
        if isinstance(cells, RaggedCells):
            return cells
        cells = cells.to_compressed_format()
        head_shape = cells.stored_keys.shape[:2]
        counts = torch.full(head_shape, len(cells), dtype=torch.int64, device="cpu")
        return cls._from_parts([cells], lambda x: x.flatten(0, 2), counts)

    @classmethod
    def from_heads(cls, heads: Sequence[Cells], layers: int) -> "RaggedCells":
        """Return the compressed cells `[1, 1, n, ...]` of each head, those of layer 0 first."""
        counts = torch.tensor([len(cells) for cells in heads], dtype=torch.int64, device="cpu")
        counts = counts.view(layers, -1)
        return cls._from_parts(heads, lambda *x: torch.cat([t.flatten(0, 2) for t in x]), counts)

    @classmethod
    def select_from(cls, cells: Cells, mask: Tensor) -> "RaggedCells":
        """Return some of any kind of cells, copied.

        mask: bool `[layers, kv_heads, n]`; for ragged cells `[total]`.
        """
        if isinstance(cells, RaggedCells):
            return cls.select_and_concatenate([cells], [mask])
        parts = [cells.to_compressed_format()]
        return cls._from_parts(parts, lambda x: _select(x, mask), mask.cpu().sum(-1))

    def clone(self) -> "RaggedCells":
        scores = None if self.scores is None else self.scores.clone()
        residual = None if self.residual is None else self.residual.clone()
        return self._from_parts([self], torch.clone, self.counts, scores, residual)

    @classmethod
    def _concatenate(cls, parts: Sequence[Cells]) -> "RaggedCells":
        """Concatenate the cells of each head, in the order of the parts; copied."""
        ragged = [cls.from_cells(part) for part in parts]
        masks = [torch.ones_like(part.positions, dtype=torch.bool) for part in ragged]
        return cls.select_and_concatenate(ragged, masks)

    @classmethod
    def select_and_concatenate(
        cls, parts: Sequence["RaggedCells"], masks: Sequence[Tensor]
    ) -> "RaggedCells":
        """Concatenate some cells of each head, in the order of the parts; copied.

        masks: for each part bool `[total]`.
        """
        selected = torch.cat([mask.cpu() for mask in masks]).nonzero()[:, 0]
        head_indices = torch.cat([part.head_indices for part in parts])[selected]
        indices = selected[head_indices.argsort(stable=True)] if len(parts) > 1 else selected
        counts = head_indices.bincount(minlength=parts[0].counts.numel()).view_as(parts[0].counts)
        part_scores = [part.scores for part in parts if part.scores is not None]
        scores = _gather(*part_scores, indices=indices) if len(part_scores) == len(parts) else None
        residual = None
        if any(part.residual is not None for part in parts):
            residual = _gather(*(part.residual_mask for part in parts), indices=indices)
        return cls._from_parts(parts, partial(_gather, indices=indices), counts, scores, residual)

    @classmethod
    def _from_parts(
        cls,
        parts: Sequence[Cells],
        to_row: Callable[..., Tensor],
        counts: Tensor,
        scores: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> "RaggedCells":
        """Return the cells of compressed parts in one row.

        to_row: makes one tensor of the parts' keys, and likewise of values, positions and biases.
        """
        return cls(
            map_stored(to_row, *(part.stored_keys for part in parts)),
            map_stored(to_row, *(part.stored_values for part in parts)),
            to_row(*(part.positions for part in parts)),
            _no_token_serials(-(-int(counts.sum()) // counts.numel())),
            to_row(*(part.bias for part in parts if part.bias is not None)),
            counts,
            scores,
            residual,
        )

    @property
    def total(self) -> int:
        """Number of cells over all layers and heads."""
        return self.positions.shape[0]

    @property
    def residual_mask(self) -> Tensor:
        """`[total]` bool on the CPU: which cells are residual."""
        if self.residual is None:
            return torch.zeros(self.total, dtype=torch.bool, device="cpu")
        return self.residual

    @property
    def residual_counts(self) -> Tensor:
        """`[layers, kv_heads]` int64: how many of each head's cells are residual."""
        marked = self.head_indices[self.residual_mask]
        return marked.bincount(minlength=self.counts.numel()).view_as(self.counts)

    @cached_property
    def offsets(self) -> Tensor:
        """`[layers * kv_heads + 1]` int64: where each head's cells begin, and the total."""
        return torch.cat((_ZERO, self.counts.flatten().cumsum(0)))

    @property
    def head_indices(self) -> Tensor:
        """`[total]` int64: `layer * kv_heads + head` of each cell."""
        heads = torch.arange(self.counts.numel(), dtype=torch.int64, device="cpu")
        return heads.repeat_interleave(self.counts.flatten())

    @cached_property
    def _offset_list(self) -> list[int]:
        offsets: list[int] = self.offsets.tolist()
        return offsets

    @cached_property
    def max_count(self) -> int:
        return int(self.counts.max())

    @cached_property
    def counts_are_valid(self) -> bool:
        """Whether the counts are not negative and add up to the total."""
        return int(self.counts.min()) >= 0 and self._offset_list[-1] == self.total

    def head_slice(self, layer: int, head: int) -> slice:
        """Return the range of a KV head's cells in the row."""
        index = layer * self.counts.shape[1] + head
        return slice(self._offset_list[index], self._offset_list[index + 1])

    def head(self, layer: int, head: int) -> Cells:
        """Return the cells of one head, `[1, 1, n, ...]`, not copied."""
        row_slice = self.head_slice(layer, head)
        assert self.bias is not None
        return Cells(
            self.stored_keys[row_slice][None, None],
            self.stored_values[row_slice][None, None],
            self.positions[None, None, row_slice],
            _no_token_serials(row_slice.stop - row_slice.start),
            self.bias[None, None, row_slice],
        )

    def heads(self) -> Iterator[tuple[int, int, Cells]]:
        """Yield (layer, KV head, its cells), those of layer 0 first."""
        layers, kv_heads = self.counts.shape
        for layer in range(layers):
            for head in range(kv_heads):
                yield layer, head, self.head(layer, head)

    def part(self, slot_range: slice) -> "RaggedCells":
        """Return the cells themselves: only a slice of all of them is allowed."""
        assert slot_range.indices(len(self)) == (0, len(self), 1), "ragged cells cannot be sliced"
        return self

    def key_shifts(self, rope: Rope, shifts: Tensor) -> Tensor:
        if not rope.unrotated_layers:
            return shifts
        layers, kv_heads = self.counts.shape
        is_rotated = torch.ones(layers, dtype=torch.int64, device="cpu")
        is_rotated[list(rope.unrotated_layers)] = 0
        return shifts * is_rotated[self.head_indices // kv_heads]

    def attend(self, layer: int, q: Tensor, scale: float, softcap: float = 0.0) -> PartialAttention:
        """Attend with every query to every cell of its KV head; see `attend_cells`.

        q: `[n, heads, head_dim]`, rotated.
        """
        n, heads, head_dim = q.shape
        kv_heads = self.counts.shape[1]
        groups = heads // kv_heads
        q, parts = q.view(n, kv_heads, groups, head_dim), []
        for head in range(kv_heads):
            row_slice = self.head_slice(layer, head)
            if row_slice.start == row_slice.stop:
                shape = (groups, 1, n) if n > 1 else (1, 1, groups)  # as of `attend_cells`
                out = torch.zeros(*shape, head_dim, dtype=q.dtype, device=q.device)
                log_sum = torch.full(shape, MASK_BIAS, dtype=torch.float32, device=q.device)
                parts.append(PartialAttention(out, log_sum))
                continue
            assert self.bias is not None
            parts.append(
                attend_cells(
                    q[:, head],
                    self.stored_keys[row_slice][None],
                    self.stored_values[row_slice][None],
                    scale=scale,
                    bias=None,
                    causal=False,
                    cell_bias=self.bias[row_slice][None],
                    softcap=softcap,
                )
            )
        outs, log_sums = zip(*parts, strict=True)
        return PartialAttention(torch.cat(outs, 1), torch.cat(log_sums, 1))

    def to(self, device: torch.device) -> "RaggedCells":
        moved = super().to(device)
        assert isinstance(moved, RaggedCells)
        if moved is self or self.scores is None:
            return moved
        return replace(moved, scores=self.scores.to(device))

    def tensors(self) -> tuple[Tensor, ...]:
        optional = (tensor for tensor in (self.scores, self.residual) if tensor is not None)
        return (*super().tensors(), self.counts, *optional)


def _select(x: Tensor, mask: Tensor) -> Tensor:
    """Return what a mask `[layers, kv_heads, n]` selects of `x: [layers, kv_heads, n, ...]`.

    Copied layer by layer: no copy is larger than what is selected.
    """
    pairs = zip(x.unbind(), mask.to(x.device).unbind(), strict=True)
    return torch.cat([layer[selected] for layer, selected in pairs])


def _gather(*parts: Tensor, indices: Tensor) -> Tensor:
    """Return rows of the concatenation of `parts` by index, without concatenating them.

    The first tensor is usually the largest, and its rows are copied once.
    """
    first, indices = parts[0], indices.to(parts[0].device)
    if not len(first):
        return torch.cat(parts).index_select(0, indices)
    rows, begin = first.index_select(0, indices.clamp(max=len(first) - 1)), len(first)
    for part in parts[1:]:
        in_part = ((indices >= begin) & (indices < begin + len(part))).nonzero()[:, 0]
        rows.index_copy_(0, in_part, part.index_select(0, indices[in_part] - begin))
        begin += len(part)
    return rows


def _no_token_serials(count: int) -> Tensor:
    return torch.full((count,), NO_TOKEN, dtype=torch.int64, device="cpu")

"""Compressed cells of which each layer and KV head has a number of its own."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from kvkeep.cache.attention import HIDDEN, Part, attend_cells
from kvkeep.cache.block import NO_TOKEN, Cells, Layout
from kvkeep.cache.quantised import (
    KVTensor,
    Quantised,
    concatenate_stored,
    dequantise,
    quantise,
    tensors,
)
from kvkeep.cache.rope import Rope

_ZERO = torch.zeros(1, dtype=torch.int64, device="cpu")


@dataclass(frozen=True)
class Ragged(Cells):
    """Cells in one row: those of layer 0 and KV head 0, oldest first, those of head 1, and so on.

    stored_keys, stored_values: `[total, head_dim]`. positions, bias: `[total]`. counts: `[layers,
    kv_heads]` int64 on the CPU. serials: as many as heads have on average, rounded up; that is its
    length, too. scores: `[total]` float32, what each cell is worth to the method that keeps it, for
    as long as it is there; None where that is found anew each time. With two layers of two heads
    that have 3, 0, 4 and 2 cells, a total of 9:

        counts   [[3, 0], [4, 2]]
        offsets  0, 3, 3, 7, 9       head 0 of layer 1 has the cells 3 to 6; the length is 3
    """

    counts: Tensor = field(default_factory=_ZERO.clone)
    scores: Tensor | None = None

    @classmethod
    def from_cells(cls, cells: Cells) -> "Ragged":
        """The same cells: ragged ones, or compressed ones of which all heads have as many."""
        if isinstance(cells, Ragged):
            return cells
        heads = cells.stored_keys.shape[:2]
        counts = torch.full(heads, len(cells), dtype=torch.int64, device="cpu")
        return cls._of(_in_a_row(cells), counts)

    @classmethod
    def from_heads(cls, heads: Sequence[Cells], layers: int) -> "Ragged":
        """heads: compressed cells `[1, 1, n, ...]` of each head, those of layer 0 first."""
        counts = torch.tensor([len(cells) for cells in heads], dtype=torch.int64, device="cpu")
        return cls._of(_end_to_end(map(_in_a_row, heads)), counts.view(layers, -1))

    @classmethod
    def select_from(cls, cells: Cells, which: Tensor) -> "Ragged":
        """Some of any cells, copied.

        which: bool `[layers, kv_heads, n]`; of ragged cells `[total]`.
        """
        if isinstance(cells, Ragged):
            return cells.select(which)
        there = which.cpu()
        row = Cells(
            _some(cells.stored_keys, which),
            _some(cells.stored_values, which),
            cells.positions.expand(which.shape)[there],
            _of_no_token(0),
            which.new_zeros(int(there.sum()), dtype=torch.float32)
            if cells.bias is None
            else cells.bias[which],
        )
        return cls._of(row, there.sum(-1))

    def select(self, which: Tensor) -> "Ragged":
        """Some of them, copied. which: bool `[total]`."""
        return self.select_and_concatenate([self], [which])

    def clone(self) -> "Ragged":
        scores = None if self.scores is None else self.scores.clone()
        return self._of(super().clone(), self.counts, scores)

    @classmethod
    def _concatenate(cls, parts: Sequence[Cells]) -> "Ragged":
        """Of each head the cells of all parts, in their order; copied."""
        ragged = [cls.from_cells(part) for part in parts]
        return cls.select_and_concatenate(
            ragged, [part.positions.new_ones(part.total) > 0 for part in ragged]
        )

    @classmethod
    def select_and_concatenate(cls, parts: Sequence["Ragged"], which: Sequence[Tensor]) -> "Ragged":
        """Of each head some cells of all parts, in their order; copied. which: bool `[total]`."""
        kept = torch.cat([flags.cpu() for flags in which]).nonzero()[:, 0]
        owners = torch.cat([part.owners for part in parts])[kept]
        order = kept[owners.argsort(stable=True)] if len(parts) > 1 else kept
        counts = owners.bincount(minlength=parts[0].counts.numel()).view_as(parts[0].counts)
        all_scores = [part.scores for part in parts if part.scores is not None]
        scores = _gathered(all_scores, order) if len(all_scores) == len(parts) else None
        return cls._of(_rows(parts, order), counts, scores)

    @classmethod
    def _of(cls, row: Cells, counts: Tensor, scores: Tensor | None = None) -> "Ragged":
        serials = _of_no_token(-(-int(counts.sum()) // counts.numel()))
        keys, values = row.stored_keys, row.stored_values
        return cls(keys, values, row.positions, serials, row.bias, counts, scores)

    @property
    def total(self) -> int:
        """Over all layers and heads."""
        return self.positions.shape[0]

    @cached_property
    def offsets(self) -> Tensor:
        """`[layers * kv_heads + 1]` int64: where each head's cells begin, and where all end."""
        return torch.cat((_ZERO, self.counts.flatten().cumsum(0)))

    @property
    def owners(self) -> Tensor:
        """`[total]` int64: which layer and KV head each cell is of, counted through."""
        heads = torch.arange(self.counts.numel(), dtype=torch.int64, device="cpu")
        return heads.repeat_interleave(self.counts.flatten())

    @cached_property
    def _bounds(self) -> list[int]:
        bounds: list[int] = self.offsets.tolist()
        return bounds

    @cached_property
    def max_count(self) -> int:
        """Cells of the head that has most."""
        return int(self.counts.max())

    @cached_property
    def counts_match(self) -> bool:
        """Whether its counts are of as many cells as there are."""
        return int(self.counts.min()) >= 0 and self._bounds[-1] == self.total

    def head_slice(self, layer: int, head: int) -> slice:
        """Where the cells of a head are in the row."""
        index = layer * self.counts.shape[1] + head
        return slice(self._bounds[index], self._bounds[index + 1])

    def head(self, layer: int, head: int) -> Cells:
        """The cells of one head, `[1, 1, n, ...]`, not copied."""
        where = self.head_slice(layer, head)
        assert self.bias is not None
        return Cells(
            self.stored_keys[where][None, None],
            self.stored_values[where][None, None],
            self.positions[None, None, where],
            _of_no_token(where.stop - where.start),
            self.bias[None, None, where],
        )

    def heads(self) -> Iterator[tuple[int, int, Cells]]:
        """(layer, KV head, its cells), those of layer 0 first."""
        layers, kv_heads = self.counts.shape
        for layer in range(layers):
            for head in range(kv_heads):
                yield layer, head, self.head(layer, head)

    def part(self, where: slice) -> "Ragged":
        """All of it: heads have no cells in common that a slice could mean."""
        assert where.indices(len(self)) == (0, len(self), 1), "ragged cells are taken whole"
        return self

    def write(self, where: slice, cells: Cells) -> None:
        raise AssertionError("ragged cells are replaced, never written")

    def biases(self, where: slice) -> tuple[Tensor | None, ...]:
        raise AssertionError("each head of ragged cells has a bias of its own length")

    def key_shifts(self, rope: Rope, by: Tensor) -> Tensor:
        if not rope.unrotated:
            return by
        layers, kv_heads = self.counts.shape
        rotated = torch.tensor(
            [layer not in rope.unrotated for layer in range(layers)],
            dtype=torch.int64,
            device="cpu",
        )
        return by * rotated[self.owners // kv_heads]

    def attend(self, layer: int, q: Tensor, scale: float, softcap: float = 0.0) -> Part:
        """As `attend_cells`, over a layer's cells; every query sees every cell of its KV head."""
        n, heads, head_dim = q.shape
        kv_heads = self.counts.shape[1]
        groups = heads // kv_heads
        q, parts = q.view(n, kv_heads, groups, head_dim), []
        for head in range(kv_heads):
            where = self.head_slice(layer, head)
            if where.start == where.stop:
                shape = (groups, 1, n) if n > 1 else (1, 1, groups)
                out = torch.zeros(*shape, head_dim, dtype=q.dtype, device=q.device)
                none = torch.full(shape, HIDDEN, dtype=torch.float32, device=q.device)
                parts.append(Part(out, none))
                continue
            assert self.bias is not None
            parts.append(
                attend_cells(
                    q[:, head],
                    self.stored_keys[where][None],
                    self.stored_values[where][None],
                    scale=scale,
                    bias=None,
                    causal=False,
                    cell_bias=self.bias[where][None],
                    softcap=softcap,
                )
            )
        return Part(torch.cat([p.out for p in parts], 1), torch.cat([p.log_sum for p in parts], 1))

    def in_layout(self, layout: Layout) -> "Ragged":
        """The same cells as a layout keeps them; themselves, if they are kept so."""
        keys = _kept(self.stored_keys, layout.key_bits, layout.dtype)
        values = _kept(self.stored_values, layout.value_bits, layout.dtype)
        if keys is self.stored_keys and values is self.stored_values:
            return self
        return replace(self, stored_keys=keys, stored_values=values)

    def to(self, device: torch.device) -> "Ragged":
        there = super().to(device)
        assert isinstance(there, Ragged)
        return (
            there
            if there is self or self.scores is None
            else replace(there, scores=self.scores.to(device))
        )

    def tensors(self) -> tuple[Tensor, ...]:
        scores = () if self.scores is None else (self.scores,)
        return (*super().tensors(), self.counts, *scores)


def _in_a_row(cells: Cells) -> Cells:
    """Compressed cells of which all heads have as many, `[layers * kv_heads * n, ...]`."""
    assert cells.bias is not None
    return Cells(
        _flat(cells.stored_keys),
        _flat(cells.stored_values),
        cells.positions.reshape(-1),
        cells.serials,
        cells.bias.reshape(-1),
    )


def _end_to_end(rows: Iterable[Cells]) -> Cells:
    each = list(rows)
    return Cells(
        concatenate_stored([row.stored_keys for row in each], 0),
        concatenate_stored([row.stored_values for row in each], 0),
        torch.cat([row.positions for row in each]),
        _of_no_token(0),
        torch.cat([row.bias for row in each if row.bias is not None]),
    )


def _rows(parts: Sequence[Cells], order: Tensor) -> Cells:
    """order: indices, as if the parts lay end to end."""
    return Cells(
        _stored_rows([part.stored_keys for part in parts], order),
        _stored_rows([part.stored_values for part in parts], order),
        _gathered([part.positions for part in parts], order),
        _of_no_token(0),
        _gathered([part.bias for part in parts if part.bias is not None], order),
    )


def _stored_rows(parts: Sequence[KVTensor], order: Tensor) -> KVTensor:
    if isinstance(parts[0], Tensor):
        return _gathered([part for part in parts if isinstance(part, Tensor)], order)
    data, scale = zip(*(tensors(part) for part in parts), strict=True)
    return Quantised(_gathered(data, order), _gathered(scale, order))


def _gathered(parts: Sequence[Tensor], order: Tensor) -> Tensor:
    """Rows of tensors, as if these lay end to end: most are copied once, those of the first."""
    first, order = parts[0], order.to(parts[0].device)
    if not len(first):
        return torch.cat(list(parts)).index_select(0, order)
    found, begun = first.index_select(0, order.clamp(max=len(first) - 1)), len(first)
    for part in parts[1:]:
        where = ((order >= begun) & (order < begun + len(part))).nonzero()[:, 0]
        found.index_copy_(0, where, part.index_select(0, order[where] - begun))
        begun += len(part)
    return found


def _some(stored: KVTensor, which: Tensor) -> KVTensor:
    """Layer by layer, so that what stays alone is copied."""
    layers: tuple[KVTensor, ...] = tuple(stored.unbind())
    each = zip(layers, which.unbind(), strict=True)
    return concatenate_stored([numbers[here] for numbers, here in each], 0)


def _flat(stored: KVTensor) -> KVTensor:
    if isinstance(stored, Quantised):
        return Quantised(stored.data.flatten(0, -2), stored.scale.flatten(0, -2))
    return stored.flatten(0, -2)


def _kept(stored: KVTensor, bits: int, dtype: torch.dtype) -> KVTensor:
    if isinstance(stored, Quantised) and stored.bits == bits:
        return stored
    if bits == 16:
        return dequantise(stored, dtype)
    return quantise(dequantise(stored, torch.float32), bits)


def _of_no_token(count: int) -> Tensor:
    return torch.full((count,), NO_TOKEN, dtype=torch.int64, device="cpu")

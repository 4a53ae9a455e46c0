"""What a compression method is: it leaves fewer cells of some, each KV head its own."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Literal, TypeAlias

import torch
from torch import Tensor

from kvkeep.cache import NO_TOKEN, Cells, Queries, Ragged, Rope
from kvkeep.compression.methods.budget import Budget
from kvkeep.compression.methods.statistics import Statistics
from kvkeep.errors import InvalidArgument

Repeated: TypeAlias = Literal["attention", "contribution"]


@dataclass(frozen=True)
class Candidates:
    """Cells to be compressed, and what is known of those who look at them.

    cells: n of them, oldest first. queries: the newest ones, of tokens that came after the cells
    or are of them; None where nobody observed. statistics: of the model, from a calibration; None
    without one. seed: for what is drawn. ageing: whether they compete with cells still to come, for
    ever: what is older may then be worth less. reconstruction: `[layers, kv_heads, n]` float32, the
    log of how much each was needed to repeat the text; None where nobody asked. newest: a position,
    from which ages are counted; None for that of the newest of these.
    """

    cells: Cells
    rope: Rope
    scale: float
    queries: Queries | None = None
    statistics: Statistics | None = None
    seed: int = 0
    ageing: bool = False
    reconstruction: Tensor | None = None
    newest: int | None = None

    def __len__(self) -> int:
        return len(self.cells)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(layers, kv_heads, n); not of ragged cells."""
        layers, kv_heads, count, _ = self.cells.keys.shape
        return layers, kv_heads, count

    @property
    def layers_and_heads(self) -> tuple[int, int]:
        """(layers, kv_heads), of ragged cells, too."""
        cells = self.cells
        shape = (cells.counts if isinstance(cells, Ragged) else cells.stored_keys).shape
        return shape[0], shape[1]

    def part(self, where: slice) -> "Candidates":
        """Some of them."""
        needed = None if self.reconstruction is None else self.reconstruction[..., where]
        return replace(self, cells=self.cells.part(where), reconstruction=needed)

    def head(self, layer: int, head: int, cells: Cells) -> "Candidates":
        """Cells of one layer and KV head, `[1, 1, n, ...]`, and what is known of that."""
        queries, known = self.queries, self.statistics
        if queries is not None:
            groups = queries.values.shape[1] // self.layers_and_heads[1]
            own = slice(head * groups, (head + 1) * groups)
            queries = Queries(queries.values[layer : layer + 1, own], queries.times)
        return replace(
            self,
            cells=cells,
            rope=self.rope.for_layer(layer),
            queries=queries,
            statistics=None if known is None else known.head(layer, head),
            seed=hash((self.seed, layer, head)),
        )

    def layers(self, where: slice) -> "Candidates":
        """All of them in some layers, of which neither queries nor statistics are known."""
        cells, own = self.cells, self.cells.bias is not None
        part = Cells(
            cells.keys[where],
            cells.values[where],
            cells.positions[where] if own else cells.positions,
            cells.serials,
            cells.bias[where] if cells.bias is not None else None,
        )
        return replace(self, cells=part, queries=None, statistics=None)

    @cached_property
    def positions(self) -> Tensor:
        """`[layers, kv_heads, n]` int64."""
        return as_compressed(self.cells).positions

    @cached_property
    def bias(self) -> Tensor:
        """`[layers, kv_heads, n]` float32."""
        bias = as_compressed(self.cells).bias
        assert bias is not None
        return bias

    @cached_property
    def keys(self) -> Tensor:
        """As they are stored; float32."""
        return self.cells.keys.float()

    @cached_property
    def age(self) -> Tensor:
        """`[layers, kv_heads, n]` float32: how many positions before the newest."""
        newest = self.positions.max() if self.newest is None else self.newest
        age = newest - self.positions
        return age.to(self.cells.keys.device, torch.float32)

    @cached_property
    def unrotated(self) -> Tensor:
        """Keys as they were before rotation: what a cell says, wherever it stands; float32."""
        return self.rope.shifted(self.keys, self.cells.key_shifts(self.rope, -self.cells.positions))

    def taken(self, which: Tensor) -> Cells:
        """Some of the cells. which: `[layers, kv_heads, m]` indices, in their order."""
        return Cells(
            rows(self.cells.keys, which),
            rows(self.cells.values, which),
            self.positions.gather(2, which.cpu()),
            torch.full((which.shape[2],), NO_TOKEN, dtype=torch.int64, device="cpu"),
            self.bias.gather(2, which),
        )


@dataclass(frozen=True)
class Compressed:
    """cells: what is left. merged: cells that live on in others, a mean over all KV heads."""

    cells: Cells
    merged: float = 0.0


class Method(ABC):
    """observes: whether it decides by the newest queries, where somebody observes them. guesses:
    whether it decides by a calibration's surrogate.

    reconstructs: what it decides by while the model repeats the text, if it does: how much a query
    looks at a cell, or how much that adds to what the query's token is. budget: how cells are
    shared out unless somebody says otherwise; only an `Eviction` can let heads compete.
    """

    name: ClassVar[str]
    observes: ClassVar[bool] = False
    guesses: ClassVar[bool] = False
    reconstructs: ClassVar[Repeated | None] = None
    budget: ClassVar[Budget] = "uniform"

    def needs_queries(self, statistics: Statistics | None) -> bool:
        """Whether it cannot do without them."""
        return self.observes

    def require_known(self, statistics: Statistics | None) -> None:
        """Raises InvalidArgument where it cannot decide by what is known."""
        if self.guesses and (statistics is None or statistics.surrogate is None):
            found = "none" if statistics is None else "one of an earlier kvkeep"
            raise InvalidArgument(
                f'method "{self.name}" decides by a calibration with a surrogate; found {found}: '
                "make one for this model, once, with `kvkeep pull --calibrate`"
            )

    @abstractmethod
    def compress(self, candidates: Candidates, count: int) -> Compressed:
        """Leaves `count` cells (1 to n) for each layer and KV head."""


class Eviction(Method):
    """Keeps the cells of the highest score as they are; the others are forgotten."""

    @abstractmethod
    def score(self, candidates: Candidates) -> Tensor:
        """`[layers, kv_heads, n]`, or `[total]` of ragged cells: what each cell is worth."""

    def compress(self, candidates: Candidates, count: int) -> Compressed:
        return Compressed(candidates.taken(best(self.score(candidates), count)))


class EvictionByCell(Eviction):
    """One whose score of a cell depends on nothing but that cell, and its age.

    So ragged cells are scored in a row, and an archive finds once what each is worth.
    """

    @abstractmethod
    def worth(self, candidates: Candidates) -> Tensor:
        """The score, whatever the age: `[layers, kv_heads, n]`, or `[total]` of ragged cells."""

    def score(self, candidates: Candidates) -> Tensor:
        cells = candidates.cells
        kept = cells.scores if isinstance(cells, Ragged) else None
        return self.worth(candidates) if kept is None else kept


def best(score: Tensor, count: int) -> Tensor:
    """`[layers, kv_heads, count]`: which have the highest scores, in their order."""
    return score.topk(count, sorted=False).indices.sort().values


def rows(x: Tensor, which: Tensor) -> Tensor:
    """x: `[layers, kv_heads, n, width]`, which: `[layers, kv_heads, m]`: m of the n, copied."""
    layers, kv_heads, count, width = x.shape
    total = layers * kv_heads * count
    first = torch.arange(0, total, count, dtype=torch.int64, device=x.device)
    flat = (which + first.view(layers, kv_heads, 1)).flatten()
    # Ten times as fast as `gather`, which takes an index for each number.
    return x.reshape(-1, width).index_select(0, flat).view(*which.shape, width)


def as_compressed(cells: Cells) -> Cells:
    """The same cells, each KV head's its own; themselves, if they are so already."""
    if cells.bias is not None:
        return cells
    heads = cells.keys.shape[:3]
    return Cells(
        cells.keys,
        cells.values,
        cells.positions.expand(heads),
        torch.full_like(cells.serials, NO_TOKEN),
        torch.zeros(heads, dtype=torch.float32, device=cells.keys.device),
    )

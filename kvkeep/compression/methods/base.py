"""The interface of compression methods: fewer cells for each KV head."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from kvkeep.cache import NO_TOKEN, Cells, Queries, RaggedCells, Rope
from kvkeep.compression.methods.statistics import Statistics
from kvkeep.errors import InvalidArgument

# How KV heads share a budget of cells. "uniform": each keeps as many. "heads": the highest scores
# over all layers and KV heads are kept, as in KVzip (arXiv:2505.23416; within each layer in Ada-KV,
# arXiv:2407.11550), so that a head that attends to little leaves its share to others.
Budget: TypeAlias = Literal["heads", "uniform"]
BUDGETS: tuple[str, ...] = get_args(Budget)

AGE_UNIT = 32  # positions; see `Candidates.age_doublings`

# A reconstruction score is a query's attention to a cell; as "contribution", it is multiplied by
# the norm of the cell's projected value and divided by that of the query's residual stream.
ReconstructionScore: TypeAlias = Literal["attention", "contribution"]


@dataclass(frozen=True)
class Candidates:
    """Cells to compress, and the data by which a method may decide.

    Attributes:
        cells: n cells, oldest first.
        rope, scale, softcap: of the cache's attention.
        queries: the newest observed queries, of the cells' tokens or later ones; None if the cache
            did not observe any.
        statistics: of the model, from a calibration; None without one.
        seed: of random choices.
        ageing: whether the cells compete with all later ones, as in an archive; a method may then
            score older cells lower.
        reconstruction: `[layers, kv_heads, n]` float32, the log of each cell's reconstruction
            score; None unless the method uses it.
        newest_position: ages count from here; None for the newest cell's position.
    """

    cells: Cells
    rope: Rope
    scale: float
    queries: Queries | None = None
    statistics: Statistics | None = None
    seed: int = 0
    ageing: bool = False
    reconstruction: Tensor | None = None
    newest_position: int | None = None
    softcap: float = 0.0

    def __len__(self) -> int:
        return len(self.cells)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(layers, kv_heads, n); undefined for ragged cells."""
        layers, kv_heads, count, _ = self.cells.keys.shape
        return layers, kv_heads, count

    @property
    def layers_and_heads(self) -> tuple[int, int]:
        """(layers, kv_heads), for ragged cells as well."""
        cells = self.cells
        shape = (cells.counts if isinstance(cells, RaggedCells) else cells.stored_keys).shape
        return shape[0], shape[1]

    def part(self, indices: slice) -> "Candidates":
        reconstruction = None if self.reconstruction is None else self.reconstruction[..., indices]
        return replace(self, cells=self.cells.part(indices), reconstruction=reconstruction)

    def head(self, layer: int, head: int, cells: Cells) -> "Candidates":
        """Return candidates of one layer and KV head. cells: that head's, `[1, 1, n, ...]`."""
        queries, statistics = self.queries, self.statistics
        if queries is not None:
            groups = queries.vectors.shape[1] // self.layers_and_heads[1]
            heads = slice(head * groups, (head + 1) * groups)
            queries = Queries(queries.vectors[layer : layer + 1, heads], queries.times)
        return replace(
            self,
            cells=cells,
            rope=self.rope.for_layers(range(layer, layer + 1)),
            queries=queries,
            statistics=None if statistics is None else statistics.head(layer, head),
            seed=hash((self.seed, layer, head)),
        )

    def layers(self, first: int, end: int) -> "Candidates":
        """Return the cells of layers `first ... end - 1`, without anything else that has layers."""
        indices, cells, positions, bias = slice(first, end), self.cells, self.cells.positions, None
        if cells.bias is not None:
            positions, bias = positions[indices], cells.bias[indices]
        part = Cells(cells.keys[indices], cells.values[indices], positions, cells.serials, bias)
        rope = self.rope.for_layers(range(first, end))
        return replace(
            self, cells=part, rope=rope, queries=None, statistics=None, reconstruction=None
        )

    @cached_property
    def positions(self) -> Tensor:
        """`[layers, kv_heads, n]` int64."""
        return self.cells.to_compressed_format().positions

    @cached_property
    def bias(self) -> Tensor:
        """`[layers, kv_heads, n]` float32."""
        bias = self.cells.to_compressed_format().bias
        assert bias is not None
        return bias

    @cached_property
    def keys(self) -> Tensor:
        """Rotated keys as stored, in float32."""
        return self.cells.keys.float()

    @property
    def age_doublings(self) -> Tensor:
        """`[layers, kv_heads, n]` float32: 1 at an age of 32 positions, 2 at 96, 3 at 224."""
        newest = self.positions.max() if self.newest_position is None else self.newest_position
        age = (newest - self.positions).to(self.cells.keys.device, torch.float32)
        return torch.log2(age / AGE_UNIT + 1)

    @cached_property
    def unrotated_keys(self) -> Tensor:
        """Keys before rotation, which do not depend on positions; float32."""
        return self.rope.shift(self.keys, self.cells.key_shifts(self.rope, -self.cells.positions))

    def select(self, indices: Tensor) -> Cells:
        """Copy some cells of each KV head. indices: `[layers, kv_heads, m]`, ascending."""
        keys, values = (gather_rows(x, indices) for x in (self.cells.keys, self.cells.values))
        positions = self.positions.gather(2, indices.cpu())
        serials = torch.full((indices.shape[2],), NO_TOKEN, dtype=torch.int64, device="cpu")
        return Cells(keys, values, positions, serials, self.bias.gather(2, indices))


@dataclass(frozen=True)
class CompressionResult:
    """The remaining cells. merged: mean number of cells per KV head that were merged into them."""

    cells: Cells
    merged: float = 0.0


class Method(ABC):
    """A compression method.

    Class attributes:
        uses_queries: whether it decides by observed queries.
        uses_surrogate: whether it decides by a calibration's surrogate.
        reconstruction_kind: the kind of reconstruction score that it decides by; None for none.
        budget: the default budget; "heads" needs the scores of an `Eviction`.
        residual: whether some of the cells stand for those that are evicted, where heads compete:
            see `kvkeep.compression.methods.residual`.
    """

    name: ClassVar[str]
    uses_queries: ClassVar[bool] = False
    uses_surrogate: ClassVar[bool] = False
    reconstruction_kind: ClassVar[ReconstructionScore | None] = None
    budget: ClassVar[Budget] = "uniform"
    residual: ClassVar[bool] = False

    def needs_queries(self, statistics: Statistics | None) -> bool:
        """Whether queries must be observed, with the statistics of a calibration or without."""
        return self.uses_queries

    def require_statistics(self, statistics: Statistics | None) -> None:
        """Raise InvalidArgument if the method needs a surrogate and there is none."""
        if self.uses_surrogate and (statistics is None or statistics.surrogate is None):
            calibration = "none" if statistics is None else "one from an earlier kvkeep version"
            raise InvalidArgument(
                f'method "{self.name}" needs a calibration with a surrogate; found {calibration}. '
                "Make one for this model with `kvkeep pull --calibrate`"
            )

    @abstractmethod
    def compress(self, candidates: Candidates, count: int) -> CompressionResult:
        """Return `count` cells (1 to n) for each layer and KV head."""


class Eviction(Method):
    """A method that keeps the cells with the highest scores unchanged and evicts the others."""

    @abstractmethod
    def score(self, candidates: Candidates) -> Tensor:
        """Return each cell's score: `[layers, kv_heads, n]`, or `[total]` for ragged cells."""

    def compress(self, candidates: Candidates, count: int) -> CompressionResult:
        indices = self.score(candidates).topk(count, sorted=False).indices
        return CompressionResult(candidates.select(indices.sort().values))


class CellwiseEviction(Eviction):
    """An eviction whose score of a cell depends on that cell and its age alone.

    So ragged cells can be scored as one row, and an archive computes each cell's score only once.
    Stored scores fall by `decay_per_token` with each token that the archive gets.
    """

    decay_per_token: ClassVar[float] = 0.0

    @abstractmethod
    def cell_score(self, candidates: Candidates) -> Tensor:
        """Return the score without ageing: `[layers, kv_heads, n]`, or `[total]` if ragged."""

    def score(self, candidates: Candidates) -> Tensor:
        cells = candidates.cells
        stored_scores = cells.scores if isinstance(cells, RaggedCells) else None
        # An archive stores scores of its own method; compaction those of reconstruction.
        if candidates.ageing and stored_scores is not None:
            return stored_scores
        return self.cell_score(candidates)


def gather_rows(x: Tensor, indices: Tensor) -> Tensor:
    """Copy rows of `[layers, kv_heads, n, width]`. indices: `[layers, kv_heads, m]`."""
    layers, kv_heads, count, width = x.shape
    total = layers * kv_heads * count
    first_rows = torch.arange(0, total, count, dtype=torch.int64, device=x.device)
    flat = (indices + first_rows.view(layers, kv_heads, 1)).flatten()
    # Ten times as fast as `gather`, which takes an index for each number.
    return x.reshape(-1, width).index_select(0, flat).view(*indices.shape, width)

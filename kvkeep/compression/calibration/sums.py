"""The running sums of a calibration over the text measured so far, and their file."""

import itertools
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from kvkeep.cache import Cells, KVCache, Layout
from kvkeep.cache.checks import require_finite, require_int, require_tensor
from kvkeep.compression.methods.attention import group_by_kv_head, output_error
from kvkeep.compression.methods.base import Candidates
from kvkeep.compression.methods.fitted import Fitted
from kvkeep.compression.methods.statistics import Statistics
from kvkeep.errors import CorruptFile, NewerFormat, TruncatedFile
from kvkeep.storage.snapshots.container import read_container, write_container

_FILE_KIND, _FORMAT_VERSION = "unfinished calibration", 1

COSINES = (0.7, 0.8, 0.85, 0.9, 0.95, 1.1)  # thresholds that are tried; above 1 nothing is merged
TRIAL_RATIO = 4  # compression ratio of the trials
QUERY_STRIDE = 4  # the trials use every fourth query
RIDGE = 1e-3  # penalty of a weight, relative to its feature's sum of squares


class QuerySums:
    """Sums over queries, and the attention error of merges at each cosine; float32, on the CPU.

    Attributes, by the names that they have in the file:
        sum: `[layers, kv_heads, head_dim]`, the sum of queries q before rotation.
        outer: `[layers, kv_heads, head_dim, head_dim]`, the sum of q q^T.
        errors: `[cosines, layers, kv_heads]`, the summed relative errors of attention output.
        queries: `[1]` int64, the number of queries per KV head.
    """

    def __init__(self, layout: Layout):
        heads, head_dim = (layout.layers, layout.kv_heads), layout.head_dim
        self.sum = torch.zeros(*heads, head_dim, dtype=torch.float32, device="cpu")
        self.outer = torch.zeros(*heads, head_dim, head_dim, dtype=torch.float32, device="cpu")
        self.errors = torch.zeros(len(COSINES), *heads, dtype=torch.float32, device="cpu")
        self.queries = torch.zeros(1, dtype=torch.int64, device="cpu")

    def add(self, cache: KVCache, step_tokens: int) -> None:
        """Add the last `step_tokens` queries, and the errors of merging as many cells before."""
        assert cache.observer is not None
        queries = cache.observer.queries()
        assert queries is not None
        samples = group_by_kv_head(queries.vectors, cache.layout.kv_heads).cpu()
        self.queries += samples.shape[2]
        self.sum += samples.sum(2)
        self.outer += samples.transpose(-1, -2) @ samples
        first = cache.cells - 2 * step_tokens
        if first >= 0:
            parts = [cells for s, cells in cache.read(first, step_tokens) if not s.is_anchor]
            cells, softcap = Cells.concatenate(parts), cache.attention.softcap
            candidates = Candidates(cells, cache.rope, cache.scale, softcap=softcap)
            trial_queries, trial_cells = queries.every(QUERY_STRIDE), len(candidates) // TRIAL_RATIO
            for cosine_errors, cosine in zip(self.errors, COSINES, strict=True):
                remaining_cells = Fitted(cosine).compress(candidates, trial_cells).cells
                cosine_errors += output_error(candidates, remaining_cells, trial_queries).cpu()

    def statistics(self) -> Statistics:
        """Return the means, and for each KV head the cosine with the least error."""
        cosines = torch.tensor(COSINES, dtype=torch.float32, device="cpu")
        moment = self.outer / self.queries
        return Statistics(
            self.sum / self.queries,
            (moment + moment.transpose(-1, -2)) / 2,  # exactly symmetric: a file stores one half
            cosines[self.errors.argmin(0)],
        )


class RegressionSums:
    """The sums of a linear regression of y on x for each layer and KV head; float64, on the CPU.

    Attributes, by the names that they have in the file:
        outer: `[layers, kv_heads, width, width]`, the sum of x x^T.
        product: `[layers, kv_heads, width]`, the sum of x y.
        square, total: `[layers, kv_heads]`, the sums of y^2 and of y.
        count: `[1]`, the number of samples per KV head.
    """

    def __init__(self, layers: int, kv_heads: int, width: int):
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device="cpu")

        self.outer = zeros(layers, kv_heads, width, width)
        self.product = zeros(layers, kv_heads, width)
        self.square, self.total = zeros(layers, kv_heads), zeros(layers, kv_heads)
        self.count = zeros(1)

    def add(self, layer: int, x: Tensor, y: Tensor) -> None:
        """Add samples of one layer. x: `[kv_heads, n, width]`, y: `[kv_heads, n]`; float64."""
        transposed = x.transpose(-1, -2)
        self.outer[layer] += transposed @ x
        self.product[layer] += (transposed @ y.unsqueeze(-1)).squeeze(-1)
        self.square[layer] += y.square().sum(-1)
        self.total[layer] += y.sum(-1)
        if layer == 0:  # all layers have as many samples
            self.count += x.shape[1]

    def weights(self) -> Tensor:
        """Return the weights of a ridge regression, `[layers, kv_heads, width]`."""
        # The minimum keeps the matrix regular if a feature is always 0.
        penalty = (RIDGE * self.outer.diagonal(dim1=-2, dim2=-1)).clamp(min=1e-9)
        penalty[..., -1] = 0  # the last feature is always 1; its weight is not shrunk
        weights = torch.empty_like(self.product)
        for index in itertools.product(*map(range, self.square.shape)):
            # One at a time: batches fail with two threads in some builds of torch.
            matrix = self.outer[index] + penalty[index].diag()
            weights[index] = torch.linalg.solve(matrix, self.product[index])
        return weights

    def r_squared(self, weights: Tensor) -> float:
        """Return the share of y's variance that the weights explain, over all layers and heads."""
        # With p = w x: the sum of (y - p)^2 is the sum of y^2, plus that of p^2, less 2 y p.
        outer_weights = (self.outer @ weights.unsqueeze(-1)).squeeze(-1)
        errors = self.square + (weights * (outer_weights - 2 * self.product)).sum(-1)
        sample_count = float(self.count) * self.total.numel()
        variation = float(self.square.sum()) - float(self.total.sum()) ** 2 / sample_count
        return 1 - float(errors.sum()) / variation if variation > 0 else 0.0


class CalibrationSums:
    """All sums of a calibration in progress.

    parts_done: how many parts of the text are in the sums. training, held_out: sums over the
    reconstruction scores that the surrogate is fitted to, and that it is evaluated on.
    """

    def __init__(self, layout: Layout):
        width = 2 * layout.head_dim + 1
        self.parts_done = 0
        self.query_sums = QuerySums(layout)
        self.training = RegressionSums(layout.layers, layout.kv_heads, width)
        self.held_out = RegressionSums(layout.layers, layout.kv_heads, width)

    def tensors(self) -> dict[str, Tensor]:
        """Return all sums by their names in the file."""
        sums_by_prefix = {
            "measured": self.query_sums,
            "fitted": self.training,
            "held_back": self.held_out,
        }
        return {
            f"{prefix}.{name}": tensor
            for prefix, sums in sums_by_prefix.items()
            for name, tensor in vars(sums).items()
        }

    def save(self, path: Path, digest: str) -> None:
        """Write the file. digest: of model and text. Raises StoreError."""
        document = {"of": digest, "done": self.parts_done}
        write_container(path, _FILE_KIND, _FORMAT_VERSION, document, self.tensors())

    @classmethod
    def resume(cls, path: Path, digest: str, layout: Layout, num_parts: int) -> Self:
        """Read the sums in a file; start from zero if it is missing, damaged or of another text.

        digest: of model and text. Raises ForeignFile for a file of another kind.
        """
        sums = cls(layout)
        if not path.exists():
            return sums
        try:
            container = read_container(path, _FILE_KIND, _FORMAT_VERSION)
            if container.document["of"] != digest:
                return sums
            require_int("done", container.document["done"], 1, num_parts)
            for name, tensor in sums.tensors().items():
                stored = container.tensors[name]
                require_tensor(name, stored, tensor.dtype, *tensor.shape)
                if tensor.dtype != torch.int64:
                    require_finite(name, stored)
        except (CorruptFile, TruncatedFile, NewerFormat, LookupError, ValueError):
            return sums
        for name, tensor in sums.tensors().items():
            tensor.copy_(container.tensors[name])
        sums.parts_done = container.document["done"]
        return sums

"""Random cells to compress, and attention over them written as plain loops."""

import math

import torch
from torch import Tensor

from kvkeep.cache import Cells, Queries, Rope
from kvkeep.compression.methods.base import Candidates
from kvkeep.compression.methods.statistics import Statistics, Surrogate

LAYERS, KV_HEADS, HEADS, WIDTH = 2, 2, 4, 16
GROUPS = HEADS // KV_HEADS
SCALE = 0.25
FREQUENCIES = tuple(10000.0 ** (-2 * i / WIDTH) for i in range(WIDTH // 2))
ROPE = Rope(FREQUENCIES, torch.device("cpu"))
HEAD_INDICES = [(layer, head) for layer in range(LAYERS) for head in range(KV_HEADS)]


def random_candidates(
    count: int,
    seed: int = 0,
    compressed: bool = False,
    queries: int = 0,
    statistics: bool = False,
    softcap: float = 0.0,
) -> Candidates:
    """Return random cells at positions 7, 9, 11, ..., or at random ones per KV head if compressed.

    queries: the number of observed queries; the last ones have positions after all cells.
    """
    random = torch.Generator().manual_seed(seed)
    shape = (LAYERS, KV_HEADS, count)
    keys, values = (torch.randn(*shape, WIDTH, generator=random) for _ in range(2))
    positions, bias = 2 * torch.arange(count) + 7, None
    if compressed:
        steps = torch.randint(1, 4, shape, generator=random)
        positions, bias = steps.cumsum(-1), torch.randn(shape, generator=random)
    cells = Cells(keys, values, positions, torch.arange(count), bias)
    observed, measured = None, None
    if queries:
        last = int(positions.max()) + queries // 2
        observed = Queries(
            torch.randn(LAYERS, HEADS, queries, WIDTH, generator=random) + 0.3,
            torch.arange(last - queries + 1, last + 1),
        )
    if statistics:
        samples = torch.randn(LAYERS, KV_HEADS, 50, WIDTH, generator=random) + 0.2
        moment = samples.transpose(-1, -2) @ samples / 50
        surrogate = Surrogate.from_weights(
            torch.randn(LAYERS, KV_HEADS, 2 * WIDTH + 1, generator=random)
        )
        measured = Statistics(
            samples.mean(2), moment, torch.full((LAYERS, KV_HEADS), 0.9), surrogate
        )
    reconstruction_scores = torch.randn(shape, generator=random)
    return Candidates(
        cells,
        ROPE,
        SCALE,
        observed,
        measured,
        seed,
        reconstruction=reconstruction_scores,
        softcap=softcap,
    )


def rotated(x: Tensor, position: int) -> Tensor:
    """Rotate one vector to a position, pair by pair, in float64."""
    half, result = WIDTH // 2, x.double().clone()
    for i, frequency in enumerate(FREQUENCIES):
        cosine, sine = math.cos(position * frequency), math.sin(position * frequency)
        a, b = x[i].double(), x[i + half].double()
        result[i], result[i + half] = a * cosine - b * sine, a * sine + b * cosine
    return result


def position(candidates: Candidates, layer: int, head: int, cell: int) -> int:
    positions = candidates.cells.positions
    return int(positions[cell] if positions.ndim == 1 else positions[layer, head, cell])


def bias_of(candidates: Candidates, layer: int, head: int, cell: int) -> float:
    bias = candidates.cells.bias
    return 0.0 if bias is None else float(bias[layer, head, cell])


def attention_shares(
    candidates: Candidates, layer: int, head: int, count: int
) -> list[list[float]]:
    """Return the attention weight of each of the last `count` queries on each cell.

    Weights are averaged over the query heads of the KV head.
    """
    queries, n = candidates.queries, len(candidates)
    assert queries is not None
    all_shares = []
    for index in range(len(queries) - count, len(queries)):
        time, mean = int(queries.times[index]), [0.0] * n
        for group in range(GROUPS):
            query = rotated(queries.vectors[layer, head * GROUPS + group, index], time)
            weights = []
            for cell in range(n):
                product = float(query @ candidates.cells.keys[layer, head, cell].double())
                logit = product * candidates.scale
                if candidates.softcap:
                    logit = candidates.softcap * math.tanh(logit / candidates.softcap)
                logit += bias_of(candidates, layer, head, cell)
                visible = position(candidates, layer, head, cell) <= time
                weights.append(math.exp(logit) if visible else 0.0)
            total = sum(weights) or 1.0
            mean = [m + w / total / GROUPS for m, w in zip(mean, weights, strict=True)]
        all_shares.append(mean)
    return all_shares


def highest_scores(score: list[float], count: int) -> list[int]:
    """Return the indices of the highest scores, ascending."""
    return sorted(sorted(range(len(score)), key=lambda i: -score[i])[:count])

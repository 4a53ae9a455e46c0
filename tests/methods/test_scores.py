"""The scores of each eviction method, against the same written as loops."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from methods.candidates import (
    FREQUENCIES,
    HEAD_INDICES,
    KV_HEADS,
    WIDTH,
    attention_shares,
    bias_of,
    highest_scores,
    random_candidates,
)

from kvkeep.compression.methods import make_method
from kvkeep.compression.methods.base import Candidates, Eviction
from kvkeep.compression.methods.baselines import Random

COUNT = 60
COMPRESSED = {"as-fed": False, "compressed": True}


def score(name: str, candidates: Candidates) -> torch.Tensor:
    method = make_method(name)
    assert isinstance(method, Eviction)
    return method.score(candidates)


def require_score(name: str, candidates: Candidates, expected: dict) -> None:
    result = score(name, candidates)
    kept_positions = make_method(name).compress(candidates, 9).cells.positions
    for head_index in HEAD_INDICES:
        assert result[head_index].tolist() == pytest.approx(
            expected[head_index], rel=1e-3, abs=1e-5
        )
        indices = highest_scores(expected[head_index], 9)
        assert (
            kept_positions[head_index].tolist()
            == candidates.positions[head_index][indices].tolist()
        )


def norm(x: list[float]) -> float:
    return math.sqrt(sum(a * a for a in x))


@pytest.mark.parametrize("compressed", COMPRESSED.values(), ids=COMPRESSED)
def test_knorm_keeps_keys_with_a_small_norm(compressed: bool) -> None:
    candidates = random_candidates(COUNT, compressed=compressed)
    require_score(
        "knorm",
        candidates,
        {
            head_index: [-norm(k) for k in candidates.cells.keys[head_index].tolist()]
            for head_index in HEAD_INDICES
        },
    )


@pytest.mark.parametrize("compressed", COMPRESSED.values(), ids=COMPRESSED)
def test_keydiff_keeps_keys_unlike_the_mean_direction(compressed: bool) -> None:
    candidates, expected = random_candidates(COUNT, compressed=compressed), {}
    for head_index in HEAD_INDICES:
        directions = [[a / norm(k) for a in k] for k in candidates.cells.keys[head_index].tolist()]
        mean = [sum(d[i] for d in directions) / COUNT for i in range(WIDTH)]
        expected[head_index] = [
            -sum(a * b for a, b in zip(d, mean, strict=True)) / norm(mean) for d in directions
        ]
    require_score("keydiff", candidates, expected)


@pytest.mark.parametrize("compressed", COMPRESSED.values(), ids=COMPRESSED)
def test_h2o_sums_the_attention_of_the_newest_queries(compressed: bool) -> None:
    candidates = random_candidates(COUNT, compressed=compressed, queries=20)
    expected = {
        p: [sum(x) for x in zip(*attention_shares(candidates, *p, 20), strict=True)]
        for p in HEAD_INDICES
    }
    require_score("h2o", candidates, expected)


def test_h2o_uses_the_newest_128_queries() -> None:
    candidates = random_candidates(9, queries=150)
    expected = {
        p: [sum(x) for x in zip(*attention_shares(candidates, *p, 128), strict=True)]
        for p in HEAD_INDICES
    }
    require_score("h2o", candidates, expected)


@pytest.mark.parametrize("compressed", COMPRESSED.values(), ids=COMPRESSED)
def test_snapkv_pools_the_attention_of_the_last_32_queries_over_neighbours(
    compressed: bool,
) -> None:
    candidates, expected = random_candidates(COUNT, compressed=compressed, queries=40), {}
    for head_index in HEAD_INDICES:
        means = [
            sum(x) / 32 for x in zip(*attention_shares(candidates, *head_index, 32), strict=True)
        ]
        expected[head_index] = [max(means[max(0, i - 3) : i + 4]) for i in range(COUNT)]
    result = score("snapkv", candidates)
    for head_index in HEAD_INDICES:
        assert result[head_index].tolist() == pytest.approx(
            expected[head_index], rel=1e-3, abs=1e-6
        )


@pytest.mark.parametrize("compressed", COMPRESSED.values(), ids=COMPRESSED)
def test_tova_averages_the_attention_of_the_newest_query_over_kv_heads(compressed: bool) -> None:
    candidates, expected = random_candidates(COUNT, compressed=compressed, queries=5), {}
    for layer, head in HEAD_INDICES:
        shares_by_head = [
            attention_shares(candidates, layer, other, 1)[0] for other in range(KV_HEADS)
        ]
        expected[layer, head] = [sum(x) / KV_HEADS for x in zip(*shares_by_head, strict=True)]
    require_score("tova", candidates, expected)


@pytest.mark.parametrize("statistics", [False, True], ids=["observed", "calibrated"])
@pytest.mark.parametrize("compressed", COMPRESSED.values(), ids=COMPRESSED)
def test_expected_attention_uses_normally_distributed_future_queries(
    compressed: bool, statistics: bool
) -> None:
    candidates = random_candidates(COUNT, compressed=compressed, queries=30, statistics=statistics)
    rotation, expected = mean_rotation(int(candidates.positions.max()) + 1), {}
    for layer, head in HEAD_INDICES:
        mean, covariance = distribution(candidates, layer, head)
        mean, covariance = rotation @ mean, rotation @ covariance @ rotation.T
        weights = []
        for cell, key in enumerate(candidates.cells.keys[layer, head].double()):
            scaled = key * candidates.scale
            logit = float(scaled @ mean) + float(scaled @ covariance @ scaled) / 2
            weights.append(math.exp(logit + bias_of(candidates, layer, head, cell)))
        norms = [norm(v) for v in candidates.cells.values[layer, head].tolist()]
        expected[layer, head] = [
            (w / sum(weights) + 0.01) * n for w, n in zip(weights, norms, strict=True)
        ]
    require_score("expected_attention", candidates, expected)


def test_expected_attention_follows_a_softcap() -> None:
    """Its shares are near those of numerical integration, and far from those without the cap."""
    free = random_candidates(COUNT, compressed=False, queries=30, statistics=True)
    capped, nodes = replace(free, softcap=3.0), np.polynomial.hermite_e.hermegauss(60)
    rotation = mean_rotation(int(free.positions.max()) + 1)
    errors = dict.fromkeys(("free", "capped"), 0.0)
    for layer, head in HEAD_INDICES:
        mean, covariance = distribution(free, layer, head)
        mean, covariance = rotation @ mean, rotation @ covariance @ rotation.T
        keys = free.cells.keys[layer, head].double() * free.scale
        norms = free.cells.values[layer, head].norm(dim=-1).double()
        spread = ((keys @ covariance) * keys).sum(-1).clamp_min(0).sqrt()
        samples = (keys @ mean)[:, None] + spread[:, None] * torch.tensor(nodes[0])
        weights = torch.exp(3 * torch.tanh(samples / 3)) @ torch.tensor(nodes[1])
        wanted = (weights / weights.sum() + 0.01) * norms
        for name, candidates in (("free", free), ("capped", capped)):
            found = score("expected_attention", candidates)[layer, head]
            errors[name] += float((found - wanted).abs().sum())
    assert 3 * errors["capped"] < errors["free"]


def mean_rotation(first: int) -> torch.Tensor:
    """Return the mean rotation matrix of the 512 positions from `first` on."""
    rotation, half = torch.zeros(WIDTH, WIDTH, dtype=torch.float64), WIDTH // 2
    for i, frequency in enumerate(FREQUENCIES):
        angles = [position * frequency for position in range(first, first + 512)]
        cosine, sine = (sum(map(f, angles)) / 512 for f in (math.cos, math.sin))
        rotation[i, i] = rotation[i + half, i + half] = cosine
        rotation[i, i + half], rotation[i + half, i] = -sine, sine
    return rotation


def distribution(
    candidates: Candidates, layer: int, head: int
) -> tuple[torch.Tensor, torch.Tensor]:
    statistics_used = candidates.statistics
    if statistics_used is not None:
        mean, moment = (
            statistics_used.mean[layer, head].double(),
            statistics_used.moment[layer, head].double(),
        )
        return mean, moment - torch.outer(mean, mean)
    assert candidates.queries is not None
    queries_of_both_heads = (
        candidates.queries.vectors[layer, 2 * head : 2 * head + 2].double().flatten(0, 1)
    )
    mean = sum(queries_of_both_heads) / len(queries_of_both_heads)
    return mean, sum(torch.outer(q - mean, q - mean) for q in queries_of_both_heads) / len(
        queries_of_both_heads
    )


def test_random_eviction_depends_only_on_the_seed() -> None:
    def kept(seed: int) -> torch.Tensor:
        plain = random_candidates(COUNT)
        candidates = Candidates(plain.cells, plain.rope, plain.scale, seed=seed)
        return Random().compress(candidates, 9).cells.positions

    assert torch.equal(kept(5), kept(5))
    assert not torch.equal(kept(5), kept(6))

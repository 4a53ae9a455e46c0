"""What each eviction keeps, against its score written as loops."""

import math

import pytest
import torch
from methods.some_cells import (
    FREQUENCIES,
    KV_HEADS,
    PLACES,
    WIDTH,
    bias_of,
    highest,
    shares,
    some_cells,
)

from kvkeep.compression.methods import Candidates, Eviction, Random, make_method

COUNT = 60
MADE = {"as-fed": False, "compressed": True}


def score(name: str, candidates: Candidates) -> torch.Tensor:
    method = make_method(name)
    assert isinstance(method, Eviction)
    return method.score(candidates)


def require_score(name: str, candidates: Candidates, expected: dict) -> None:
    found = score(name, candidates)
    kept = make_method(name).compress(candidates, 9).cells.positions
    for place in PLACES:
        assert found[place].tolist() == pytest.approx(expected[place], rel=1e-3, abs=1e-5)
        which = highest(expected[place], 9)
        assert kept[place].tolist() == candidates.positions[place][which].tolist()


def norm(x: list[float]) -> float:
    return math.sqrt(sum(a * a for a in x))


@pytest.mark.parametrize("compressed", MADE.values(), ids=MADE)
def test_knorm_keeps_keys_of_a_small_norm(compressed: bool) -> None:
    candidates = some_cells(COUNT, compressed=compressed)
    require_score(
        "knorm",
        candidates,
        {place: [-norm(k) for k in candidates.cells.keys[place].tolist()] for place in PLACES},
    )


@pytest.mark.parametrize("compressed", MADE.values(), ids=MADE)
def test_keydiff_keeps_keys_unlike_the_mean_direction(compressed: bool) -> None:
    candidates, expected = some_cells(COUNT, compressed=compressed), {}
    for place in PLACES:
        directions = [[a / norm(k) for a in k] for k in candidates.cells.keys[place].tolist()]
        mean = [sum(d[i] for d in directions) / COUNT for i in range(WIDTH)]
        expected[place] = [
            -sum(a * b for a, b in zip(d, mean, strict=True)) / norm(mean) for d in directions
        ]
    require_score("keydiff", candidates, expected)


@pytest.mark.parametrize("compressed", MADE.values(), ids=MADE)
def test_h2o_keeps_what_shares_of_the_newest_queries_add_up_on(compressed: bool) -> None:
    candidates = some_cells(COUNT, compressed=compressed, queries=20)
    expected = {p: [sum(x) for x in zip(*shares(candidates, *p, 20), strict=True)] for p in PLACES}
    require_score("h2o", candidates, expected)


def test_h2o_adds_up_over_128_queries() -> None:
    candidates = some_cells(9, queries=150)
    expected = {p: [sum(x) for x in zip(*shares(candidates, *p, 128), strict=True)] for p in PLACES}
    require_score("h2o", candidates, expected)


@pytest.mark.parametrize("compressed", MADE.values(), ids=MADE)
def test_snapkv_keeps_what_the_last_32_look_at_and_its_neighbours(compressed: bool) -> None:
    candidates, expected = some_cells(COUNT, compressed=compressed, queries=40), {}
    for place in PLACES:
        means = [sum(x) / 32 for x in zip(*shares(candidates, *place, 32), strict=True)]
        expected[place] = [max(means[max(0, i - 3) : i + 4]) for i in range(COUNT)]
    found = score("snapkv", candidates)
    for place in PLACES:
        assert found[place].tolist() == pytest.approx(expected[place], rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("compressed", MADE.values(), ids=MADE)
def test_tova_keeps_what_the_newest_looks_at_the_same_in_all_kv_heads(compressed: bool) -> None:
    candidates, expected = some_cells(COUNT, compressed=compressed, queries=5), {}
    for layer, head in PLACES:
        each = [shares(candidates, layer, other, 1)[0] for other in range(KV_HEADS)]
        expected[layer, head] = [sum(x) / KV_HEADS for x in zip(*each, strict=True)]
    require_score("tova", candidates, expected)


@pytest.mark.parametrize("statistics", [False, True], ids=["observed", "calibrated"])
@pytest.mark.parametrize("compressed", MADE.values(), ids=MADE)
def test_expected_attention_keeps_what_normal_queries_would_look_at(
    compressed: bool, statistics: bool
) -> None:
    candidates = some_cells(COUNT, compressed=compressed, queries=30, statistics=statistics)
    rotation, expected = mean_rotation(int(candidates.positions.max()) + 1), {}
    for layer, head in PLACES:
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


def mean_rotation(first: int) -> torch.Tensor:
    """Of the 512 positions from `first` on."""
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
    known = candidates.statistics
    if known is not None:
        mean, moment = known.mean[layer, head].double(), known.moment[layer, head].double()
        return mean, moment - torch.outer(mean, mean)
    assert candidates.queries is not None
    both = candidates.queries.values[layer, 2 * head : 2 * head + 2].double().flatten(0, 1)
    mean = sum(both) / len(both)
    return mean, sum(torch.outer(q - mean, q - mean) for q in both) / len(both)


def test_random_is_the_same_for_the_same_seed_alone() -> None:
    def kept(seed: int) -> torch.Tensor:
        plain = some_cells(COUNT)
        candidates = Candidates(plain.cells, plain.rope, plain.scale, seed=seed)
        return Random().compress(candidates, 9).cells.positions

    assert torch.equal(kept(5), kept(5))
    assert not torch.equal(kept(5), kept(6))

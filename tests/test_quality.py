"""Perplexity of bounded sessions on the real model, against measured figures."""

import math

import pytest
from topics import topic_ids

from kvkeep.model import Model


def perplexity(
    model: Model, budget: int | None, keep: int | None, policy: str, first: int, end: int
):
    """Return the perplexity of tokens `first` to `end - 1` after all tokens before them."""
    session = model.session(budget, keep, policy)
    scores = session.score(topic_ids(model)[:end])[first:]
    return math.exp(-float(scores.mean()))


@pytest.mark.parametrize(
    ("budget", "keep", "policy", "expected"),
    [(None, None, "full", 9.62), (512, 4, "sliding", 10.05), (512, 0, "sliding", 17.77)],
)
def test_perplexity_of_tokens_1024_to_1535(
    smollm2: Model, budget: int | None, keep: int | None, policy: str, expected: float
) -> None:
    measured = perplexity(smollm2, budget, keep, policy, 1024, 1536)
    assert measured == pytest.approx(expected, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("budget", "keep", "policy", "expected"),
    [(None, None, "full", 10.30), (512, 4, "sliding", 11.61), (512, 0, "sliding", 20.31)],
)
def test_perplexity_of_tokens_1024_to_4095(
    smollm2: Model, budget: int | None, keep: int | None, policy: str, expected: float
) -> None:
    measured = perplexity(smollm2, budget, keep, policy, 1024, 4096)
    assert measured == pytest.approx(expected, rel=0.02)


@pytest.mark.slow
def test_running_perplexity_does_not_rise_over_20000_tokens(smollm2: Model) -> None:
    session = smollm2.session(max_kv_size=512)
    scores = session.score(topic_ids(smollm2)[:20_000])[1024:]
    running_perplexity = (-scores.cumsum(0) / scores.new_tensor(range(1, len(scores) + 1))).exp()
    samples = running_perplexity[4_000 - 1024 :: 2_000]
    assert float(running_perplexity[-1]) <= float(running_perplexity[4_000 - 1024]) * 1.05
    assert float(samples.max()) <= float(samples[0]) * 1.05
    assert session.cache.cells == 512

"""Sampling: what each filter lets through, and that a seed decides."""

import math
from collections import Counter

import pytest
import torch
from small import small_model

from kvkeep import Sampling
from kvkeep.errors import InvalidArgument
from kvkeep.sampling import Sampler

PROBABILITIES = [0.4, 0.3, 0.15, 0.1, 0.05]
LOGITS = torch.tensor(PROBABILITIES).log()


def drawn(how: Sampling, tokens: list[int] | None = None, n: int = 4000) -> dict[int, float]:
    sampler = Sampler()
    counts = Counter(sampler.choose(LOGITS, tokens or [], how) for _ in range(n))
    return {token: count / n for token, count in sorted(counts.items())}


def test_greedy_is_the_default() -> None:
    assert drawn(Sampling(), n=10) == {0: 1.0}


def test_temperature_one_draws_the_model_s_distribution() -> None:
    assert drawn(Sampling(temperature=1, seed=1)) == pytest.approx(
        dict(enumerate(PROBABILITIES)), abs=0.03
    )


def test_temperature_sharpens() -> None:
    squares = [p * p for p in PROBABILITIES]
    expected = {i: s / sum(squares) for i, s in enumerate(squares)}
    assert drawn(Sampling(temperature=0.5, seed=1)) == pytest.approx(expected, abs=0.03)


@pytest.mark.parametrize(
    ("how", "passing"),
    [
        (Sampling(temperature=1, seed=1, top_k=2), 2),
        (Sampling(temperature=1, seed=1, top_k=50), 5),
        (Sampling(temperature=1, seed=1, top_p=0.69), 2),
        (Sampling(temperature=1, seed=1, top_p=0.71), 3),
        (Sampling(temperature=1, seed=1, top_p=0.0001), 1),
        (Sampling(temperature=1, seed=1, min_p=0.3), 3),
        (Sampling(temperature=1, seed=1, min_p=1), 1),
        # Of the four likeliest (0.95 together), 0.72 of the mass is in the first two.
        (Sampling(temperature=1, seed=1, top_k=4, top_p=0.72), 2),
    ],
)
def test_filters_pass_the_likeliest_in_proportion(how: Sampling, passing: int) -> None:
    kept = PROBABILITIES[:passing]
    assert drawn(how) == pytest.approx({i: p / sum(kept) for i, p in enumerate(kept)}, abs=0.03)


def test_repetition_penalty_acts_on_recent_tokens_only() -> None:
    how = Sampling(repetition_penalty=2, repetition_window=2)
    # log 0.4 doubled is log 0.16: below 0.3 and above 0.15.
    assert drawn(how, tokens=[0], n=1) == {1: 1.0}
    assert drawn(how, tokens=[0, 1], n=1) == {0: 1.0}
    assert drawn(how, tokens=[0, 3, 3], n=1) == {0: 1.0}


def test_the_same_seed_gives_the_same_tokens() -> None:
    model = small_model()

    def text(seed: int | None) -> list[int]:
        session = model.session(max_kv_size=32)
        session.feed([1, 2, 3])
        return [session.next_token(Sampling(temperature=2, seed=seed)) for _ in range(30)]

    assert text(1) == text(1)
    assert text(1) != text(2)
    assert text(None) != text(None)


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_k": -1},
        {"top_p": 0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"repetition_penalty": 0},
        {"repetition_window": -1},
        {"seed": -1},
        {"stop": "end"},
        {"stop": ("",)},
    ],
)
def test_settings_out_of_range_are_refused(wrong: dict) -> None:
    with pytest.raises(InvalidArgument, match=next(iter(wrong))):
        Sampling(**wrong)

"""Sampling: what each filter lets through, and that a seed decides."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from small_models import small_model
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kvkeep import Sampling
from kvkeep.errors import InvalidArgument
from kvkeep.session.history import History
from kvkeep.session.sampler import Sampler, distribution
from tests.examples import examples

PROBABILITIES = [0.4, 0.3, 0.15, 0.1, 0.05]
LOGITS = torch.tensor(PROBABILITIES).log()


def drawn(how: Sampling, tokens: list[int] | None = None, n: int = 4000) -> dict[int, float]:
    sampler = Sampler()
    counts = Counter(sampler.sample(LOGITS, tokens or [], how) for _ in range(n))
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


LOGIT = st.integers(-2000, 2000).map(lambda n: n / 64)  # unequal ones stay unequal in float32


@settings(max_examples=examples(100))
@given(
    logits=st.lists(LOGIT, min_size=1, max_size=40),
    temperature=st.sampled_from([0.05, 0.7, 1.0, 2.0, 30.0]),
    top_k=st.sampled_from([0, 1, 2, 5, 39, 40, 1000]),
    top_p=st.sampled_from([0.0001, 0.3, 0.5, 0.9, 0.95, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    penalty=st.sampled_from([1.0, 1.3, 0.5]),
)
def test_the_distribution_is_that_of_transformers(
    logits, temperature, top_k, top_p, min_p, penalty
) -> None:
    assume(top_p == 1 or len(set(logits)) == len(logits))  # which of two equal ones is open
    scores, seen = torch.tensor(logits, dtype=torch.float32), [0, len(logits) // 2]
    how = Sampling(temperature, top_k, top_p, min_p, penalty)
    theirs = scores[None].double()  # their order, without the rounding of float32
    for processor in (
        RepetitionPenaltyLogitsProcessor(penalty),
        TemperatureLogitsWarper(temperature),
        *([TopKLogitsWarper(top_k)] if top_k else []),
        *([TopPLogitsWarper(top_p)] if top_p < 1 else []),
        *([MinPLogitsWarper(min_p)] if min_p else []),
    ):
        before, theirs = theirs, processor(torch.tensor([seen]), theirs)
        if isinstance(processor, TopPLogitsWarper):
            sums = before.softmax(-1).sort().values.cumsum(-1)
            assume((sums - (1 - top_p)).abs().min() > 1e-5)  # no token on the very edge
        if isinstance(processor, MinPLogitsWarper):
            probabilities = before.softmax(-1)
            share = probabilities / probabilities.max()
            assume(min_p == 1 or (share - min_p).abs().min() > 1e-5)
    expected = theirs.softmax(-1)[0]
    ids, weights = distribution(scores, seen, how)
    ours = torch.zeros(len(logits), dtype=torch.float64)
    ours[ids] = weights.double() / weights.double().sum()
    assert len(set(ids.tolist())) == len(ids)
    assert (ours - expected).abs().max() < 1e-5
    assert set(ids.tolist()) >= set((expected > 1e-30).nonzero().squeeze(-1).tolist())
    assert not set(ids.tolist()) & set(theirs[0].isneginf().nonzero().squeeze(-1).tolist())


class AllowedTokens:
    """A constraint that always allows the same tokens."""

    def __init__(self, *tokens: int) -> None:
        self._tokens = list(tokens)

    def masked(self, logits: torch.Tensor) -> torch.Tensor:
        masked = torch.full_like(logits, -torch.inf)
        masked[self._tokens] = logits[self._tokens]
        return masked

    def accept(self, token: int) -> None:
        pass


@pytest.mark.parametrize("top_k", [1, 2, 3, 40, 0])
@pytest.mark.parametrize("top_p", [0.3, 0.95, 1])
def test_forbidden_tokens_are_no_candidates(top_k: int, top_p: float) -> None:
    """A grammar often allows fewer tokens than top_k: all others tie for the last place."""
    logits, allowed = torch.randn(50_000, generator=torch.Generator().manual_seed(0)), [7, 999]
    sampling = {"temperature": 1.0, "top_k": top_k, "top_p": top_p}
    ids, weights = distribution(
        logits, [], Sampling(**sampling, constraint=AllowedTokens(*allowed))
    )
    expected_ids, expected = distribution(logits[allowed], [], Sampling(**sampling))
    weight_by_id = dict(zip(ids.tolist(), weights.tolist(), strict=True))
    assert {i: weight for i, weight in weight_by_id.items() if weight} == {
        allowed[i]: weight for i, weight in zip(expected_ids, expected.tolist(), strict=True)
    }
    assert len(ids) <= 2 or (top_k == 0 and top_p == 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}], ids=str)
def test_a_constraint_may_return_another_dtype(dtype: torch.dtype, filters: dict) -> None:
    class Widened(AllowedTokens):
        def masked(self, logits: torch.Tensor) -> torch.Tensor:
            return super().masked(logits).to(dtype).requires_grad_()

    logits = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(dtype).float()
    allowed = range(0, 1000, 7)
    expected, found = (
        distribution(logits, [], Sampling(temperature=1, constraint=constraint, **filters))
        for constraint in (AllowedTokens(*allowed), Widened(*allowed))
    )
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize("temperature", [1e38, 1e39, 1e300])
@pytest.mark.parametrize("filters", [{}, {"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.1}], ids=str)
def test_the_highest_temperatures_keep_a_constraint(temperature: float, filters: dict) -> None:
    how = Sampling(temperature=temperature, constraint=AllowedTokens(1, 4), **filters)
    ids, weights = distribution(LOGITS, [], how)
    assert {i for i, weight in zip(ids.tolist(), weights.tolist(), strict=True) if weight} == {1, 4}


def test_a_top_k_that_cuts_nothing_changes_nothing() -> None:
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(1000, generator=random)
    every, none = (
        distribution(logits, [], Sampling(temperature=1, top_k=top_k, top_p=0.6))
        for top_k in (1000, 0)
    )
    assert torch.equal(every[0], none[0])
    assert torch.equal(every[1], none[1])


@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 4.0, 200.0])
@pytest.mark.parametrize(("top_p", "min_p"), [(0.9, 0), (1, 0.05), (0.99, 0.001), (1e-9, 0)])
def test_few_or_many_candidates_are_in_the_order_of_a_stable_sort(
    spread: float, top_p: float, min_p: float
) -> None:
    random = torch.Generator().manual_seed(0)
    logits = (torch.randn(50_000, generator=random) * spread).mul(8).round() / 8  # with many ties
    weights, ids = (logits - logits.max()).softmax(-1).sort(descending=True, stable=True)
    expected = weights >= min_p * weights[0]
    expected &= weights.double().cumsum(-1) - weights < top_p
    found, found_weights = distribution(
        logits, [], Sampling(temperature=1, top_p=top_p, min_p=min_p)
    )
    assert torch.equal(found, ids[expected])
    assert torch.equal(found_weights, weights[expected])


@pytest.mark.parametrize("temperature", [5e-324, 1e-46, 1e-45, 1e-40, 1e-38, 1e-30])
@pytest.mark.parametrize("filters", [{}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.1}])
def test_the_lowest_temperatures_take_the_likeliest(temperature: float, filters: dict) -> None:
    assert drawn(Sampling(temperature=temperature, seed=1, **filters), n=20) == {0: 1.0}


@pytest.mark.parametrize("penalty", [1e-300, 1e-45, 1e45, 1e300])
@pytest.mark.parametrize("temperature", [0, 1])
def test_the_strongest_penalties_are_still_numbers(penalty: float, temperature: float) -> None:
    how = Sampling(temperature=temperature, seed=1, repetition_penalty=penalty)
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    ids, weights = distribution(logits, [0, 2], how)
    assert weights.isfinite().all()
    assert int(ids[weights.argmax()]) == (0 if penalty < 1 else 1)


@pytest.mark.parametrize("sign", [1, -1])
def test_the_strongest_penalties_together_are_still_numbers(sign: int) -> None:
    """Even those that overflow float64 in opposite directions."""
    logits, tokens = torch.tensor([2.0, 1.0, 0.0, -1.0]), [0, 2, 3, 3]
    for repetition in (1e308, 5e-324):
        for presence in (1.7e308, -1.7e308):
            how = Sampling(
                temperature=1,
                repetition_penalty=repetition,
                presence_penalty=presence,
                frequency_penalty=sign * 1.7e308,
            )
            _, weights = distribution(logits, tokens, how)
            assert weights.isfinite().all()
            assert weights.sum() > 0


def test_biases_of_one_token_are_added_up() -> None:
    logits = torch.zeros(4)
    for biases in (((1, 1.0), (2, 2.5), (1, 2.0)), ((1, 2.0), (2, 2.5), (1, 1.0))):
        how = Sampling(logit_bias=biases)
        assert how == Sampling(logit_bias=((1, 3.0), (2, 2.5)))
        assert distribution(logits, [], how)[0].tolist() == [1]
    with pytest.raises(InvalidArgument, match="logit_bias"):
        Sampling(logit_bias=((1, 1.7e308), (1, 1.7e308)))


@pytest.mark.parametrize("window", [1, 7, 1000, 2**31])
def test_penalties_count_the_tokens_of_the_window(window: int) -> None:
    """The counts are the same for a session's history and for a list."""
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(50, generator=random)
    tokens = torch.randint(0, 50, (2000,), generator=random).tolist()
    how = Sampling(1, presence_penalty=0.5, frequency_penalty=0.25, repetition_window=window)
    counts = Counter(tokens[-window:])
    penalties = torch.tensor([counts[i] * 0.25 + (i in counts) * 0.5 for i in range(50)])
    expected = (logits - penalties).softmax(-1)
    for history in (tokens, History("i", tokens)):
        ids, weights = distribution(logits, history, how)
        assert torch.equal(ids, torch.arange(50))
        assert (weights / weights.sum() - expected).abs().max() < 1e-6


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

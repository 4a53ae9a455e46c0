"""The surrogate and its regression: against least squares over all samples at once."""

import pytest
import torch
from torch import Tensor

from kvkeep.compression.calibration.sums import RIDGE, RegressionSums
from kvkeep.compression.methods.statistics import Surrogate, features

LAYERS, KV_HEADS, HEAD_DIM, SAMPLES = 2, 3, 4, 200
WIDTH = 2 * HEAD_DIM + 1


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def samples(noise: float) -> tuple[Tensor, Tensor, Tensor]:
    """x `[layers, kv_heads, n, width]`, y `[layers, kv_heads, n]`, and what y is made by."""
    keys, values = (random(LAYERS, KV_HEADS, SAMPLES, HEAD_DIM, seed=seed) for seed in (0, 1))
    x, truth = features(keys, values), random(LAYERS, KV_HEADS, WIDTH, seed=2)
    y = (x @ truth.unsqueeze(-1)).squeeze(-1)
    return x, y + noise * random(*y.shape, seed=3), truth


def regression(x: Tensor, y: Tensor, parts: int) -> RegressionSums:
    found = RegressionSums(LAYERS, KV_HEADS, WIDTH)
    for some, its in zip(x.chunk(parts, 2), y.chunk(parts, 2), strict=True):
        for layer in range(LAYERS):
            found.add(layer, some[layer], its[layer])
    return found


@pytest.mark.parametrize("parts", [1, 7])
def test_weights_are_those_of_the_ridge_regression(parts: int) -> None:
    x, y, truth = samples(noise=0.5)
    found = regression(x, y, parts).weights()
    for layer in range(LAYERS):
        for head in range(KV_HEADS):
            # A ridge is as many samples more, of each feature alone, for which y is 0.
            penalty = (RIDGE * x[layer, head].square().sum(0)).sqrt()
            penalty[-1] = 0
            longer = torch.cat((x[layer, head], penalty.diag()))
            wanted = torch.cat((y[layer, head], torch.zeros(WIDTH, dtype=torch.float64)))
            best = torch.linalg.lstsq(longer, wanted).solution
            torch.testing.assert_close(found[layer, head], best)
    assert (found - truth).abs().max() < 0.2


def test_r_squared_is_the_part_of_the_variance_that_is_explained() -> None:
    x, y, truth = samples(noise=1.0)
    weights = truth + 0.1
    errors = y - (x @ weights.unsqueeze(-1)).squeeze(-1)
    wanted = 1 - errors.square().sum() / (y - y.mean()).square().sum()
    assert regression(x, y, 3).r_squared(weights) == pytest.approx(float(wanted))


def test_a_feature_that_is_always_zero_gets_no_weight() -> None:
    x, y, _ = samples(noise=0.1)
    x[..., 2] = 0
    found = regression(x, y, 1).weights()
    assert torch.equal(found[..., 2], torch.zeros(LAYERS, KV_HEADS, dtype=torch.float64))


def test_nothing_that_varies_is_nothing_explained() -> None:
    x, y, truth = samples(noise=0.0)
    assert regression(x, torch.zeros_like(y), 1).r_squared(truth) == 0


def test_a_surrogate_gives_what_was_fitted() -> None:
    x, _, truth = samples(noise=0.0)
    keys, values = x[..., :HEAD_DIM], x[..., HEAD_DIM:-1]
    wanted = (x @ truth.unsqueeze(-1)).squeeze(-1).float()
    found = Surrogate.from_weights(truth).score(keys.float(), values.float())
    torch.testing.assert_close(found, wanted)
    coarse = Surrogate.from_weights(truth).score(keys.bfloat16(), values.bfloat16())
    torch.testing.assert_close(coarse, wanted, atol=0.1, rtol=0.01)

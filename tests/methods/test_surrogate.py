"""The surrogate and its incremental regression, against least squares over all samples at once."""

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
    """Return x `[layers, kv_heads, n, width]`, y `[layers, kv_heads, n]` and the true weights."""
    keys, values = (random(LAYERS, KV_HEADS, SAMPLES, HEAD_DIM, seed=seed) for seed in (0, 1))
    x, true_weights = features(keys, values), random(LAYERS, KV_HEADS, WIDTH, seed=2)
    y = (x @ true_weights.unsqueeze(-1)).squeeze(-1)
    return x, y + noise * random(*y.shape, seed=3), true_weights


def regression(x: Tensor, y: Tensor, parts: int) -> RegressionSums:
    sums = RegressionSums(LAYERS, KV_HEADS, WIDTH)
    for x_part, y_part in zip(x.chunk(parts, 2), y.chunk(parts, 2), strict=True):
        for layer in range(LAYERS):
            sums.add(layer, x_part[layer], y_part[layer])
    return sums


@pytest.mark.parametrize("parts", [1, 7])
def test_weights_equal_ridge_regression_over_all_samples(parts: int) -> None:
    x, y, true_weights = samples(noise=0.5)
    weights = regression(x, y, parts).weights()
    for layer in range(LAYERS):
        for head in range(KV_HEADS):
            # A ridge penalty equals one more sample per feature, of that feature alone, with y = 0.
            penalty = (RIDGE * x[layer, head].square().sum(0)).sqrt()
            penalty[-1] = 0
            augmented = torch.cat((x[layer, head], penalty.diag()))
            expected = torch.cat((y[layer, head], torch.zeros(WIDTH, dtype=torch.float64)))
            solution = torch.linalg.lstsq(augmented, expected).solution
            torch.testing.assert_close(weights[layer, head], solution)
    assert (weights - true_weights).abs().max() < 0.2


def test_r_squared_is_the_explained_share_of_the_variance() -> None:
    x, y, true_weights = samples(noise=1.0)
    weights = true_weights + 0.1
    errors = y - (x @ weights.unsqueeze(-1)).squeeze(-1)
    expected = 1 - errors.square().sum() / (y - y.mean()).square().sum()
    assert regression(x, y, 3).r_squared(weights) == pytest.approx(float(expected))


def test_a_feature_that_is_always_zero_gets_weight_zero() -> None:
    x, y, _ = samples(noise=0.1)
    x[..., 2] = 0
    weights = regression(x, y, 1).weights()
    assert torch.equal(weights[..., 2], torch.zeros(LAYERS, KV_HEADS, dtype=torch.float64))


def test_r_squared_of_a_constant_target_is_zero() -> None:
    x, y, true_weights = samples(noise=0.0)
    assert regression(x, torch.zeros_like(y), 1).r_squared(true_weights) == 0


def test_a_surrogate_scores_with_the_fitted_weights() -> None:
    x, _, true_weights = samples(noise=0.0)
    keys, values = x[..., :HEAD_DIM], x[..., HEAD_DIM:-1]
    expected = (x @ true_weights.unsqueeze(-1)).squeeze(-1).float()
    scores = Surrogate.from_weights(true_weights).score(keys.float(), values.float())
    torch.testing.assert_close(scores, expected)
    in_bfloat16 = Surrogate.from_weights(true_weights).score(keys.bfloat16(), values.bfloat16())
    torch.testing.assert_close(in_bfloat16, expected, atol=0.1, rtol=0.01)

"""Least squares by sums: samples come part by part and are not kept."""

import torch
from torch import Tensor

RIDGE = 1e-3  # of the mean square of each feature


class Regression:
    """For each layer and KV head its own; float64, on the CPU. Two of them add up.

    outer: `[layers, kv_heads, width, width]`, the sum of x x^T. product: `[layers, kv_heads,
    width]`, of x y. square, total: `[layers, kv_heads]`, of y^2 and y. count: `[1]`, samples of
    each KV head.
    """

    NAMES = ("outer", "product", "square", "total", "count")

    def __init__(self, layers: int, kv_heads: int, width: int):
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device="cpu")

        self.outer = zeros(layers, kv_heads, width, width)
        self.product = zeros(layers, kv_heads, width)
        self.square, self.total = zeros(layers, kv_heads), zeros(layers, kv_heads)
        self.count = zeros(1)

    def take(self, layer: int, x: Tensor, y: Tensor) -> None:
        """Samples of one layer. x: `[kv_heads, n, width]`, y: `[kv_heads, n]`; float64."""
        across = x.transpose(-1, -2)
        self.outer[layer] += across @ x
        self.product[layer] += (across @ y.unsqueeze(-1)).squeeze(-1)
        self.square[layer] += y.square().sum(-1)
        self.total[layer] += y.sum(-1)
        if layer == 0:
            self.count += x.shape[1]

    def weights(self) -> Tensor:
        """`[layers, kv_heads, width]`: the ridge regression of y on x, whose last feature is 1."""
        layers, kv_heads = self.square.shape
        found = torch.empty_like(self.product)
        for layer in range(layers):
            for head in range(kv_heads):
                penalty = RIDGE * self.outer[layer, head].diagonal()
                penalty = penalty.clamp(min=1e-9)  # a feature that is always 0
                penalty[-1] = 0  # the constant is as large as it has to be
                # One at a time: batches fail with two threads in some builds of torch.
                found[layer, head] = torch.linalg.solve(
                    self.outer[layer, head] + penalty.diag(), self.product[layer, head]
                )
        return found

    def r_squared(self, weights: Tensor) -> float:
        """Which part of the variance of y, over all layers and heads, these weights explain."""
        guessed = (self.outer @ weights.unsqueeze(-1)).squeeze(-1)
        errors = self.square + (weights * (guessed - 2 * self.product)).sum(-1)
        samples = float(self.count) * self.total.numel()
        variance = float(self.square.sum()) - float(self.total.sum()) ** 2 / samples
        return 1 - float(errors.sum()) / variance if variance > 0 else 0.0

    def tensors(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in self.NAMES}

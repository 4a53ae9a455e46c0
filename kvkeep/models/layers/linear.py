"""A matrix product whose number of rows is one of few.

The library that multiplies on a CPU compiles a product anew for each number of rows that it meets,
and keeps what it has compiled: a chat would take more memory with each turn of another length. So
rows are filled up to the next of few sizes, with zeros that nobody sees. More sizes would waste
fewer rows and keep more products (docs/speed.md).

What a row becomes may depend, in its last bits, on how many rows there are in the product, never on
what stands in the others. So it depends on the number of tokens in its step and on nothing else,
and a replay gives the same.
"""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

# Up to so many rows, multiples of so many.
_MULTIPLES = ((32, 4), (96, 8), (256, 16), (512, 32))
_BEYOND = 128


@dataclass(frozen=True)
class Linear:
    """weight: `[out, in]`, bias: `[out]` or None."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """`[n, in]` to `[n, out]`."""
        n = x.shape[0]
        missing = filled_rows(n) - n
        if not missing:
            return F.linear(x, self.weight, self.bias)
        return F.linear(F.pad(x, (0, 0, 0, missing)), self.weight, self.bias)[:n]

    def chosen(self, rows: Tensor) -> Tensor:
        """Some rows of the weight, `[n, in]`. rows: `[n]` int64."""
        return F.embedding(rows, self.weight)


def filled_rows(n: int) -> int:
    """The number of rows of a product in which `n` are wanted: one of 35 up to 512."""
    if n == 1:
        return 1
    multiple = next((multiple for most, multiple in _MULTIPLES if n <= most), _BEYOND)
    return -(-n // multiple) * multiple

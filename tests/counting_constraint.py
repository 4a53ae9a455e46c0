"""A constraint that allows one text, so that a test sees whose tokens it was given."""

import torch
from torch import Tensor


class Counting:
    """A `Constraint` with one possible text: 10, 11, 12, ..."""

    def __init__(self) -> None:
        self.next = 10

    def masked(self, logits: Tensor) -> Tensor:
        allowed = torch.full_like(logits, -torch.inf)
        allowed[self.next] = 0.0
        return allowed

    def accept(self, token: int) -> None:
        self.next += 1

"""The seeded schedule of faults."""

import random
from dataclasses import dataclass

KINDS = ("kill", "restart", "stop", "full disk", "read only", "clock", "cut", "slow", "memory")


@dataclass(frozen=True)
class Fault:
    """at: operations done before it. seconds: that it lasts. hours: by which the clock moves."""

    at: int
    kind: str
    seconds: float
    hours: float


def schedule(seed: int, operations: int, every: int, kinds: tuple[str, ...] = KINDS) -> list[Fault]:
    """Return a fault for about every `every` operations; all kinds come equally often."""
    rng, faults, left = random.Random(seed), list[Fault](), list[str]()
    for at in range(every, operations, every):
        left = left or rng.sample(kinds, len(kinds))
        place = at + rng.randrange(every // 2 + 1)
        faults.append(Fault(place, left.pop(), rng.uniform(0.5, 5), rng.uniform(-12, 12)))
    return faults

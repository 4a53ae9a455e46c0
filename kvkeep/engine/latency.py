"""Histograms of the times that generations take, in buckets as Prometheus has them."""

import copy
import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvkeep.engine.usage import Usage

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_SECONDS_PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


@dataclass
class Histogram:
    """The number of durations in each bucket, and their sum."""

    bounds: tuple[float, ...] = _SECONDS  # the largest duration of each bucket but the last
    counts: list[int] = field(init=False)
    sum: float = 0.0  # seconds

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.sum += seconds

    def cumulative(self) -> Iterator[tuple[float, int]]:
        """Yield for each bound, infinity last, how many durations were at most so long."""
        total = 0
        for bound, count in zip((*self.bounds, math.inf), self.counts, strict=True):
            total += count
            yield bound, total


@dataclass
class Latencies:
    """The times of the generations that ended with at least one token."""

    queue: Histogram = field(default_factory=Histogram)  # from submission to the first prefill step
    first_token: Histogram = field(default_factory=Histogram)  # from submission
    # Of a generation, its decode time by its tokens.
    per_token: Histogram = field(default_factory=lambda: Histogram(_SECONDS_PER_TOKEN))
    total: Histogram = field(default_factory=Histogram)  # from submission to the end

    def add(self, usage: Usage) -> None:
        if not usage.generated:
            return
        first_token = usage.queue_seconds + usage.prefill_seconds
        self.queue.add(usage.queue_seconds)
        self.first_token.add(first_token)
        self.per_token.add(usage.decode_seconds / usage.generated)
        self.total.add(first_token + usage.decode_seconds)

    def copy(self) -> "Latencies":
        return copy.deepcopy(self)

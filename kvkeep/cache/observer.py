"""The newest queries, recorded for compression methods that score cells by them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvkeep.cache.rope import PositionMap

MAX_QUERIES = 128  # that an observer keeps


@dataclass(frozen=True)
class Queries:
    """Unrotated queries, oldest first.

    vectors: `[layers, heads, n, head_dim]`. times: `[n]` int64 on the CPU, the time of each token.
    """

    vectors: Tensor
    times: Tensor

    def __len__(self) -> int:
        return self.times.shape[0]

    def newest(self, count: int) -> "Queries":
        return Queries(self.vectors[:, :, -count:], self.times[-count:])

    def every(self, stride: int) -> "Queries":
        """Return every `stride`-th query, the newest included."""
        first = (len(self) - 1) % stride
        return Queries(self.vectors[:, :, first::stride], self.times[first::stride])

    def seen_from(self, position_map: PositionMap) -> "Queries":
        """Return the queries at their positions towards a segment. The map's group must be 1."""
        return Queries(self.vectors, self.times + position_map.offset)


class Observer:
    """A record of the queries of the newest `MAX_QUERIES` tokens.

    Each step's queries are one tensor that is never written to again, so forks share them.
    """

    def __init__(self, earlier: Queries | None = None):
        self._steps: list[tuple[int, Tensor]] = []  # first time; [layers, n, heads, head_dim]
        if earlier is not None:
            vectors = earlier.vectors.transpose(1, 2)
            for index, time in enumerate(earlier.times.tolist()):
                self._steps.append((time, vectors[:, index : index + 1]))

    def __len__(self) -> int:
        return sum(queries.shape[1] for _, queries in self._steps)

    def add(self, first_time: int, queries: Tensor) -> None:
        """Record the queries `[layers, n, heads, head_dim]` of the tokens from `first_time` on."""
        excess = queries.shape[1] - MAX_QUERIES
        if excess > 0:
            first_time, queries = first_time + excess, queries[:, excess:].clone()
        self._steps.append((first_time, queries))
        excess = len(self) - MAX_QUERIES
        while excess > 0:
            time, oldest = self._steps.pop(0)
            if oldest.shape[1] > excess:
                self._steps.insert(0, (time + excess, oldest[:, excess:]))
            excess -= oldest.shape[1]

    def drop_from(self, time: int) -> None:
        """Drop the queries of tokens from `time` on."""
        self._steps = [
            (first, queries[:, : time - first]) for first, queries in self._steps if first < time
        ]

    def queries(self) -> Queries | None:
        """Return all recorded queries, at most `MAX_QUERIES`; None if there are none."""
        if not self._steps:
            return None
        vectors = torch.cat([queries for _, queries in self._steps], 1).transpose(1, 2)
        times = [time + i for time, queries in self._steps for i in range(queries.shape[1])]
        return Queries(vectors, torch.tensor(times, dtype=torch.int64, device="cpu"))

    def fork(self) -> "Observer":
        """Return an observer that shares all recorded queries and records its own from now on."""
        fork = Observer()
        fork._steps = list(self._steps)
        return fork

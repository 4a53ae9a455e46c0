"""The newest queries, as far as somebody decides by them what is worth keeping."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvkeep.cache.position_map import PositionMap

MAX_QUERIES = 128  # queries that an observer keeps


@dataclass(frozen=True)
class Queries:
    """Queries before rotation, oldest first.

    values: `[layers, heads, n, head_dim]`. times: `[n]` int64 on the CPU, of their tokens.
    """

    values: Tensor
    times: Tensor

    def __len__(self) -> int:
        return self.times.shape[0]

    def newest(self, count: int) -> "Queries":
        """The last `count` of them."""
        return Queries(self.values[:, :, -count:], self.times[-count:])

    def every(self, stride: int) -> "Queries":
        """One of each `stride`, the newest included."""
        first = (len(self) - 1) % stride
        return Queries(self.values[:, :, first::stride], self.times[first::stride])

    def seen_from(self, position_map: PositionMap) -> "Queries":
        """The same standing where queries do that look by a map (of single positions)."""
        return Queries(self.values, self.times + position_map.offset)


class Observer:
    """Keeps the queries of the newest `MAX_QUERIES` tokens.

    They are kept step by step as tensors that nobody writes to again, so that a fork shares them.
    """

    def __init__(self, before: Queries | None = None):
        self._steps: list[tuple[int, Tensor]] = []  # time of the first; [layers, n, heads, d]
        if before is not None:
            values = before.values.transpose(1, 2)
            for index, time in enumerate(before.times.tolist()):
                self._steps.append((time, values[:, index : index + 1]))

    def __len__(self) -> int:
        return sum(queries.shape[1] for _, queries in self._steps)

    def take(self, time: int, queries: Tensor) -> None:
        """queries: `[layers, n, heads, head_dim]` of the tokens from `time` on."""
        excess = queries.shape[1] - MAX_QUERIES
        if excess > 0:
            time, queries = time + excess, queries[:, excess:].clone()
        self._steps.append((time, queries))
        excess = len(self) - MAX_QUERIES
        while excess > 0:
            first, oldest = self._steps.pop(0)
            if oldest.shape[1] > excess:
                self._steps.insert(0, (first + excess, oldest[:, excess:]))
            excess -= oldest.shape[1]

    def forget_from(self, time: int) -> None:
        """Drops the queries of tokens that were taken back."""
        self._steps = [
            (first, queries[:, : time - first]) for first, queries in self._steps if first < time
        ]

    def queries(self) -> Queries | None:
        """All that are kept, at most `MAX_QUERIES`; None before the first."""
        if not self._steps:
            return None
        values = torch.cat([queries for _, queries in self._steps], 1).transpose(1, 2)
        times = torch.cat(
            [
                torch.arange(first, first + queries.shape[1], dtype=torch.int64, device="cpu")
                for first, queries in self._steps
            ]
        )
        return Queries(values, times)

    def fork(self) -> "Observer":
        fork = Observer()
        fork._steps = list(self._steps)
        return fork

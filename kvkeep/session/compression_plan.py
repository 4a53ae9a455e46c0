"""The settings of one compression of a session, and which cells it leaves unchanged."""

import math
from collections.abc import Callable, Set
from dataclasses import dataclass

from kvkeep.cache import NO_TOKEN, are_in
from kvkeep.cache.cell_runs import CellRun, split_by
from kvkeep.compression.methods import BEST_UNCALIBRATED, make_method
from kvkeep.compression.methods.apply import check_budget
from kvkeep.compression.methods.base import Budget, Method
from kvkeep.compression.methods.kvzip import KVzap, KVzip
from kvkeep.compression.methods.statistics import Statistics
from kvkeep.errors import InvalidArgument
from kvkeep.models.text.codec import TextCodec
from kvkeep.session.memory import Memory

SINK_CELLS = 4  # first cells, which always stay: attention sinks
RECENT_CELLS = 64  # newest cells that stay unchanged with budget "uniform"
MIN_RECENT_CELLS = 32  # the same with budget "heads": at least
HIGHEST_RATIO = 16.0  # that `highest_ratio` tries


@dataclass(frozen=True)
class CompressionPlan:
    """The settings of one compression: see `Session.compress`.

    unchanged: serials of tokens whose cells stay unchanged, as those of pinned tokens do.
    keeps_scores: whether compressed cells keep their scores, by which they compete with others in
        the next such compression. For methods by reconstruction scores and "heads".
    """

    method: Method
    ratio: float
    budget: Budget | None
    codec: TextCodec
    recent: int | None = None
    seed: int = 0
    statistics: Statistics | None = None
    progress: Callable[[int], None] | None = None
    unchanged: frozenset[int] = frozenset()
    keeps_scores: bool = False

    @property
    def effective_budget(self) -> Budget:
        return self.method.budget if self.budget is None else self.budget

    def num_recent(self, num_cells: int, num_pinned: int) -> int:
        """Return how many of the newest of `num_cells` cells stay unchanged.

        By default, where heads compete, half of what remains: the following text continues from
        them, in all heads. Less at a ratio above 4, where the older text needs the cells more.
        """
        if self.recent is not None:
            return self.recent
        return _default_recent(self.effective_budget, self.ratio, num_cells, num_pinned)

    def check(self) -> None:
        """Raise InvalidArgument if the plan is impossible for any memory."""
        check_budget(self.method, self.effective_budget)
        if not self.ratio > 1:
            raise InvalidArgument(f"ratio must be above 1; found {self.ratio:g}")
        if self.recent is not None and self.recent < 1:
            raise InvalidArgument(f"recent must be 1 or more; found {self.recent}")
        self.method.require_statistics(self.statistics)


def _default_recent(budget: Budget, ratio: float, num_cells: int, num_pinned: int) -> int:
    if budget == "uniform":
        return RECENT_CELLS
    remaining = num_cells / ratio - num_pinned
    return max(MIN_RECENT_CELLS, int(remaining * min(1 / 2, 2 / ratio)))


def highest_ratio(memory: Memory) -> float | None:
    """Return the highest ratio that `Session.compress` takes by default, of 16, 15.5 and so on.

    None if it takes none of them above 1, as with other policies than "full".
    """
    cells, num_pinned = memory.cache.cells, len(memory.pins)
    if memory.policy.name != "full" or not cells:
        return None
    budget = make_method(default_method_name(memory, None)).budget
    ratio = min(HIGHEST_RATIO, math.floor(2 * cells / max(1, num_pinned)) / 2)  # pins stay
    while ratio > 1:
        try:
            recent = _default_recent(budget, ratio, cells, num_pinned)
            _split_into_runs(memory, memory.pins, recent, ratio)
        except InvalidArgument:
            ratio -= 0.5
        else:
            return ratio
    return None


def default_method_name(memory: Memory, statistics: Statistics | None) -> str:
    """Return the best method that the memory and the calibration's statistics allow."""
    if statistics is not None and statistics.surrogate is not None:
        return KVzap.name
    compressed_before = any(segment.compressed for segment in memory.cache.segments)
    return BEST_UNCALIBRATED if compressed_before else KVzip.name


def planned_runs(
    memory: Memory, plan: CompressionPlan, max_recent: int | None = None
) -> tuple[list[CellRun], int]:
    """Return a plan's runs of cells that stay or not, and how many of the latter remain.

    max_recent: bounds the default number of newest cells. Raises InvalidArgument if no cell of a
    run would remain.
    """
    pins = memory.pins | plan.unchanged
    recent = plan.num_recent(memory.cache.cells, len(pins))
    if max_recent is not None and plan.recent is None:
        recent = min(recent, max_recent)
    return _split_into_runs(memory, pins, recent, plan.ratio)


def _split_into_runs(
    memory: Memory, pins: Set[int], recent: int, ratio: float
) -> tuple[list[CellRun], int]:
    """Return runs of cells that stay or are to be compressed, and how many of the latter remain.

    The count is for each KV head. Compressed cells have no common order over heads, so none of them
    counts as one of the newest.

    Raises InvalidArgument if no cell of a run would remain.
    """
    cells = memory.cache.cells
    runs = split_by(
        memory.cache.segments,
        lambda ranks, serials: (
            (serials != NO_TOKEN)
            & ((ranks < SINK_CELLS) | (ranks >= cells - recent) | are_in(serials, pins))
        ),
    )
    unchanged_cells = sum(count for _, unchanged, _, count in runs if unchanged)
    remaining_cells = math.ceil(cells / ratio) - unchanged_cells
    if remaining_cells < len(runs):
        raise InvalidArgument(
            f"{cells} cells cannot be compressed by a factor of {ratio:g}: the first {SINK_CELLS}, "
            f"the newest {recent} and {len(pins)} pinned ones are never compressed. Use a lower "
            "ratio or a smaller recent, or unpin tokens"
        )
    return runs, remaining_cells

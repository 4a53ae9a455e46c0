"""An endless run: a prompt is read, tokens are written, and each one's cost is written down."""

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import psutil

from benchmarks.figures import rounded
from kvkeep import Model, Sampling, Session

WRITING = Sampling(temperature=0.8, top_k=40, repetition_penalty=1.1, seed=1)


@dataclass(frozen=True)
class Plan:
    """tokens: to write. group: tokens that a median is taken of. trace: tokens between two looks
    at the process's memory. young: tokens that the young session has written; pairs: tokens that
    it and the old one then write in turn, if the old one has written more. rounds: how often the
    same tokens are written, each time from the prompt on.
    """

    tokens: int = 20_000
    group: int = 1000
    trace: int = 100
    young: int = 2000
    pairs: int = 1000
    rounds: int = 1

    @property
    def steps(self) -> int:
        """Tokens written in all."""
        return self.tokens * self.rounds + (2 * self.pairs if self.paired else 0)

    @property
    def paired(self) -> bool:
        return self.tokens > self.young


@dataclass(frozen=True)
class Moment:
    """`trace` tokens. tokens: written so far. median_ms, slowest_ms: of these tokens. cells: the
    most held after one of them. rss_bytes: of the process, after the last.
    """

    tokens: int
    median_ms: float
    slowest_ms: float
    cells: int
    rss_bytes: int


@dataclass(frozen=True)
class Paired:
    """The old session and a young one, decoding in turn; medians over `pairs` tokens of each."""

    pairs: int
    young_tokens: int
    old_tokens: int
    young_median_ms: float
    old_median_ms: float
    ratio: float


@dataclass(frozen=True)
class Endless:
    """Null: too few tokens were written for it.

    median_ms: of all tokens; group_median_ms: of each whole group. ratio: the last whole
    group's median over the second's (the first may include warming up). slowest_at: how many
    tokens had been written before the slowest. kv_bytes: of keys and values at the end.
    recurring_ms: the slowest token, if of each the least time of all rounds counts: what a machine
    stops at random goes, what takes long by itself stays; null for one round.
    rss_young_bytes: after `plan.young` tokens; rss_end_bytes: after the last.
    """

    plan: Plan
    prompt_tokens: int
    tokens: int
    seconds: float
    tokens_per_s: float
    median_ms: float
    group_median_ms: tuple[float, ...]
    ratio: float | None
    slowest_ms: float
    slowest_at: int
    slowest_to_median: float
    recurring_ms: float | None
    recurring_at: int | None
    recurring_to_median: float | None
    max_kv_size: int
    max_cells: int
    kv_bytes: int
    rss_young_bytes: int | None
    rss_end_bytes: int
    paired: Paired | None
    interrupted: bool
    trace: tuple[Moment, ...]


def measure_endless(
    model: Model,
    prompt: list[int],
    plan: Plan,
    max_kv_size: int,
    keep: int,
    progress: Callable[[int], None] = lambda count: None,
) -> Endless:
    """Reads `prompt`, writes `plan.tokens`, and compares with a young session if there is one.

    Ctrl-C while it writes ends the measurement with what there is.
    """
    session = model.session(max_kv_size, keep)
    session.feed(prompt)
    record, paired, interrupted = _Record(plan), None, False
    least: array[float] | None = None
    try:
        for _ in range(plan.tokens):
            record.add(_timed(session), session.cache.cells)
            progress(1)
        record.look()
        if plan.paired:
            young = model.session(max_kv_size, keep)
            young.feed(session.tokens[: len(prompt) + plan.young])
            paired = _pair(young, session, plan, progress)
            del young
        for _ in range(plan.rounds - 1):
            again = model.session(max_kv_size, keep)
            again.feed(prompt)
            least = _least(least or record.seconds, again, progress)
    except KeyboardInterrupt:
        if not record.seconds:
            raise
        interrupted = True
    return _result(plan, record, session, len(prompt), paired, least, interrupted)


class _Record:
    """What is written down after each token."""

    def __init__(self, plan: Plan) -> None:
        # Arrays, since lists of objects would show in the memory that is measured.
        self.seconds = array("d")
        self.cells = array("i")
        self.rss: dict[int, int] = {}  # bytes, by tokens written
        self._trace = plan.trace
        self._process = psutil.Process()

    def add(self, seconds: float, cells: int) -> None:
        self.seconds.append(seconds)
        self.cells.append(cells)
        if len(self.seconds) == 1 or len(self.seconds) % self._trace == 0:
            self.look()

    def look(self) -> None:
        self.rss[len(self.seconds)] = self._process.memory_info().rss


def _timed(session: Session) -> float:
    begun = perf_counter()
    session.next_token(WRITING)
    return perf_counter() - begun


def _least(
    seconds: "array[float]", session: Session, progress: Callable[[int], None]
) -> "array[float]":
    """The least of each token's time so far and that of its being written once more."""
    least = array("d")
    for before in seconds:
        least.append(min(before, _timed(session)))
        progress(1)
    return least


def _pair(young: Session, old: Session, plan: Plan, progress: Callable[[int], None]) -> Paired:
    """Who goes first changes each time, since the first finds the caches as the other left them."""
    seconds: tuple[list[float], list[float]] = [], []
    for index in range(plan.pairs):
        for which in (0, 1) if index % 2 else (1, 0):
            seconds[which].append(_timed((young, old)[which]))
        progress(2)
    young_ms, old_ms = (_milliseconds(median(each)) for each in seconds)
    ratio = rounded(old_ms / young_ms)
    return Paired(plan.pairs, plan.young, plan.tokens, young_ms, old_ms, ratio)


def _result(
    plan: Plan,
    record: _Record,
    session: Session,
    prompt_tokens: int,
    paired: Paired | None,
    least: "array[float] | None",
    interrupted: bool,
) -> Endless:
    seconds, total, middle = record.seconds, sum(record.seconds), median(record.seconds)
    groups = tuple(
        _milliseconds(median(seconds[end - plan.group : end]))
        for end in range(plan.group, len(seconds) + 1, plan.group)
    )
    slowest, recurring = max(seconds), max(least) if least else None
    return Endless(
        plan=plan,
        prompt_tokens=prompt_tokens,
        tokens=len(seconds),
        seconds=rounded(total),
        tokens_per_s=rounded(len(seconds) / total),
        median_ms=_milliseconds(middle),
        group_median_ms=groups,
        ratio=rounded(groups[-1] / groups[1]) if len(groups) > 2 else None,
        slowest_ms=_milliseconds(slowest),
        slowest_at=seconds.index(slowest),
        slowest_to_median=rounded(slowest / middle),
        recurring_ms=None if recurring is None else _milliseconds(recurring),
        recurring_at=least.index(recurring) if least and recurring else None,
        recurring_to_median=None if recurring is None else rounded(recurring / middle),
        max_kv_size=session.max_kv_size,
        max_cells=max(record.cells),
        kv_bytes=session.cache.nbytes,
        rss_young_bytes=record.rss.get(plan.young),
        rss_end_bytes=record.rss[max(record.rss)],
        paired=paired,
        interrupted=interrupted,
        trace=_trace(plan.trace, record),
    )


def _trace(width: int, record: _Record) -> tuple[Moment, ...]:
    ends = range(width, len(record.seconds) + 1, width)
    return tuple(
        Moment(
            tokens=end,
            median_ms=_milliseconds(median(record.seconds[end - width : end])),
            slowest_ms=_milliseconds(max(record.seconds[end - width : end])),
            cells=max(record.cells[end - width : end]),
            rss_bytes=record.rss[end],
        )
        for end in ends
    )


def _milliseconds(seconds: float) -> float:
    return rounded(seconds * 1e3)

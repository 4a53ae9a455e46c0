"""Whether the thousandth token and the twenty-thousandth cost the same time and memory.

A prompt several times as long as the budget is read, then tokens are written without end. The
time of each token, the cells held after it and the process's memory are recorded.

A shared machine drifts within minutes. So a second comparison is made at the end: a young session,
fed as far as the first one was after `YOUNG` tokens, decodes beside the old one, token by token
in turn, and drift meets both alike.
"""

import dataclasses
import sys
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter

import click
import psutil

from kvkeep import Model, Sampling, Session, load_model
from kvkeep.bench.command import INTERRUPTED, Measurement, check_outputs, out_option, write_json
from kvkeep.bench.endless_plot import draw_endless
from kvkeep.bench.machine import Machine, describe_machine
from kvkeep.bench.manual import manual_text
from kvkeep.bench.progress import bar
from kvkeep.cli.options import DTYPE_NAMES
from kvkeep.cli.output_file import write_whole
from kvkeep.evaluate.plot import check_plottable
from kvkeep.models.source import DEFAULT_MODEL

GROUP = 1000  # tokens that a median is taken of
TRACE = 100  # tokens between two looks at the process's memory
YOUNG = 2000  # tokens that the young session has written
PAIRS = 1000  # tokens that the young and the old session write in turn
WRITING = Sampling(temperature=0.8, top_k=40, repetition_penalty=1.1, seed=1)


@dataclass(frozen=True)
class Moment:
    """`TRACE` tokens. tokens: written so far. median_ms, slowest_ms: of these tokens. cells: the
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

    median_ms: of all tokens; group_median_ms: of each whole thousand. ratio: the last whole
    thousand's median over the second's (the first may include warming up). slowest_at: how many
    tokens had been written before the slowest. kv_bytes: of keys and values at the end.
    rss_young_bytes: after `YOUNG` tokens; rss_end_bytes: after the last.
    """

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
    tokens: int,
    max_kv_size: int,
    keep: int,
    progress: Callable[[int], None] = lambda count: None,
) -> Endless:
    """Reads `prompt`, writes `tokens` (at least 1), and pairs if there is an old and a young.

    Ctrl-C while it writes ends the measurement with what there is.
    """
    session = model.session(max_kv_size, keep)
    session.feed(prompt)
    record, paired, interrupted = _Record(), None, False
    try:
        for _ in range(tokens):
            record.add(_timed(session), session.cache.cells)
            progress(1)
        record.look()
        if tokens > YOUNG:
            young = model.session(max_kv_size, keep)
            young.feed(session.tokens[: len(prompt) + YOUNG])
            paired = _pair(young, session, tokens, progress)
    except KeyboardInterrupt:
        if not record.seconds:
            raise
        interrupted = True
    return _result(record, session, len(prompt), paired, interrupted)


class _Record:
    """What is written down after each token."""

    def __init__(self) -> None:
        # Arrays, since lists of objects would show in the memory that is measured.
        self.seconds = array("d")
        self.cells = array("i")
        self.rss: dict[int, int] = {}  # bytes, by tokens written
        self._process = psutil.Process()

    def add(self, seconds: float, cells: int) -> None:
        self.seconds.append(seconds)
        self.cells.append(cells)
        if len(self.seconds) == 1 or len(self.seconds) % TRACE == 0:
            self.look()

    def look(self) -> None:
        self.rss[len(self.seconds)] = self._process.memory_info().rss


def _timed(session: Session) -> float:
    begun = perf_counter()
    session.next_token(WRITING)
    return perf_counter() - begun


def _pair(young: Session, old: Session, old_tokens: int, progress: Callable[[int], None]) -> Paired:
    """Who goes first changes each time, since the first finds the caches as the other left them."""
    seconds: tuple[list[float], list[float]] = [], []
    for index in range(PAIRS):
        for which in (0, 1) if index % 2 else (1, 0):
            seconds[which].append(_timed((young, old)[which]))
        progress(2)
    young_ms, old_ms = (_milliseconds(median(each)) for each in seconds)
    return Paired(PAIRS, YOUNG, old_tokens, young_ms, old_ms, round(old_ms / young_ms, 4))


def _result(
    record: _Record, session: Session, prompt_tokens: int, paired: Paired | None, interrupted: bool
) -> Endless:
    seconds, total, middle = record.seconds, sum(record.seconds), median(record.seconds)
    groups = tuple(
        _milliseconds(median(seconds[end - GROUP : end]))
        for end in range(GROUP, len(seconds) + 1, GROUP)
    )
    slowest = max(seconds)
    return Endless(
        prompt_tokens=prompt_tokens,
        tokens=len(seconds),
        seconds=round(total, 3),
        tokens_per_s=round(len(seconds) / total, 2),
        median_ms=_milliseconds(middle),
        group_median_ms=groups,
        ratio=round(groups[-1] / groups[1], 4) if len(groups) > 2 else None,
        slowest_ms=_milliseconds(slowest),
        slowest_at=seconds.index(slowest),
        slowest_to_median=round(slowest / middle, 2),
        max_kv_size=session.max_kv_size,
        max_cells=max(record.cells),
        kv_bytes=session.cache.nbytes,
        rss_young_bytes=record.rss.get(YOUNG),
        rss_end_bytes=record.rss[max(record.rss)],
        paired=paired,
        interrupted=interrupted,
        trace=tuple(_moment(record, end) for end in range(TRACE, len(seconds) + 1, TRACE)),
    )


def _moment(record: _Record, end: int) -> Moment:
    latest = record.seconds[end - TRACE : end]
    return Moment(
        tokens=end,
        median_ms=_milliseconds(median(latest)),
        slowest_ms=_milliseconds(max(latest)),
        cells=max(record.cells[end - TRACE : end]),
        rss_bytes=record.rss[end],
    )


def _milliseconds(seconds: float) -> float:
    return round(seconds * 1e3, 4)


def table(result: Endless) -> str:
    """The result for reading."""
    rows = [
        ("read, then written", f"{result.prompt_tokens:,} and {result.tokens:,} tokens"),
        ("speed", f"{result.tokens_per_s:.1f} tokens/s, median {result.median_ms:.2f} ms"),
        (
            "slowest token",
            f"{result.slowest_ms:.2f} ms, {result.slowest_to_median:.1f} medians, "
            f"after {result.slowest_at:,}",
        ),
        ("last thousand / second", _or_dash(result.ratio)),
        ("old / young, in turn", _or_dash(result.paired.ratio if result.paired else None)),
        ("most cells", f"{result.max_cells} of {result.max_kv_size}"),
        ("keys and values", f"{result.kv_bytes / 1e6:.1f} MB"),
    ]
    if result.rss_young_bytes is not None:
        rows.append((f"process after {YOUNG:,}", f"{result.rss_young_bytes / 1e6:.1f} MB"))
    rows.append(("process at the end", f"{result.rss_end_bytes / 1e6:.1f} MB"))
    return "\n".join(f"{name:<24}{value}" for name, value in rows)


def _or_dash(ratio: float | None) -> str:
    return "- (too few tokens)" if ratio is None else f"{ratio:.3f}"


def _as_json(
    result: Endless, machine: Machine, model: str, dtype: str, keep: int
) -> dict[str, object]:
    settings = {"model": model, "dtype": dtype, "keep": keep, **dataclasses.asdict(WRITING)}
    return {
        "machine": dataclasses.asdict(machine),
        "settings": settings,
        **dataclasses.asdict(result),
    }


@click.command(cls=Measurement, context_settings={"show_default": True})
@click.option("--tokens", default=20_000, type=click.IntRange(1), help="Tokens to write.")
@click.option("--prompt-tokens", default=4096, type=click.IntRange(1), help="Tokens to read first.")
@click.option("--max-kv-size", default=512, type=click.IntRange(1), help="Most tokens held.")
@click.option("--keep", default=4, type=click.IntRange(0), help="First tokens never forgotten.")
@click.option("--model", "name", default=DEFAULT_MODEL, help="As for `kvkeep generate`.")
@click.option("--dtype", default=DTYPE_NAMES[0], type=click.Choice(DTYPE_NAMES))
@click.option(
    "--plot", metavar="FILE.png", type=click.Path(path_type=Path), help="Draw time and memory."
)
@out_option
def endless(
    tokens: int,
    prompt_tokens: int,
    max_kv_size: int,
    keep: int,
    name: str,
    dtype: str,
    plot: Path | None,
    out: Path | None,
) -> None:
    """Write many tokens on a fixed budget: does a token's cost grow?"""
    check_outputs(out, plot)
    if plot is not None:
        check_plottable(plot)
    model = load_model(name, dtype=dtype, progress=True)
    prompt = model.text.encode(manual_text())[:prompt_tokens]
    machine = describe_machine()
    steps = tokens + (2 * PAIRS if tokens > YOUNG else 0)
    with bar(steps, "writing") as shown:
        result = measure_endless(model, prompt, tokens, max_kv_size, keep, shown)
    click.echo(table(result))
    write_json(out, _as_json(result, machine, name, dtype, keep))
    if plot is not None and result.trace:
        write_whole(plot, draw_endless(result, plot.suffix))
    if result.interrupted:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    endless()

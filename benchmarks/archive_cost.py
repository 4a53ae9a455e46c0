"""What it costs to archive: bounded sessions of one text, which only differ in what they forget.

    python -m benchmarks.archive_cost --calibration FILE --out archive-cost.json

One session forgets what leaves its window, the others compress it. All read a text in steps as
long as a block of an archive, and then write, in turn: a machine that drifts meets all alike.
Each step is compared with that of the first session beside it, so that a slow moment counts for
both; what an archive does once for each block is spread over the tokens of that block.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import click

from benchmarks.command import Measurement, check_outputs, model_option, out_option
from benchmarks.figures import rounded
from benchmarks.machine import describe_machine
from benchmarks.progress import bar
from kvkeep import Archive, Calibration, Session, Sliding, load_calibration, load_model
from kvkeep.evaluate.manual import manual_text
from kvkeep.model import Model
from kvkeep.storage.files.atomic import write_json

FILLED = 3  # budgets of text that are read before anything is measured


@dataclass(frozen=True)
class Kept:
    """method: of the archive; "none" of the window alone. cells: held in the end.

    step_s: a prefill step of a block, its median. token_s: a written token, over blocks of them,
    the median. steps, tokens: the same, by that of the session without an archive; the median of
    the ratios.
    """

    method: str
    cells: int
    step_s: float
    token_s: float
    steps: float
    tokens: float


@dataclass
class _Timed:
    session: Session
    steps: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)


def measure(
    model: Model,
    max_kv_size: int,
    methods: Sequence[str],
    blocks: int,
    calibration: Calibration | None,
    done: Callable[[int], None],
) -> list[Kept]:
    """Times `blocks` prefill steps, and as many blocks of written tokens."""
    archives = [Archive(max_kv_size, method=method) for method in methods]
    step, keep, window = archives[0].block, archives[0].keep, archives[0].window
    sessions = [model.session(policy=Sliding(max_kv_size), prefill_step=step)]
    sessions += [
        model.session(policy=archive, prefill_step=step, calibration=calibration)
        for archive in archives
    ]
    # From there on each step fills the window of an archive, and its oldest block leaves it.
    filled = keep + window + FILLED * max_kv_size // step * step
    ids = (model.text.encode(manual_text()) * 2)[: filled + blocks * step]
    for session in sessions:
        session.feed(ids[:filled])
    timed = [_Timed(session) for session in sessions]
    for first in range(filled, len(ids), step):
        for each in timed:
            each.steps.append(_seconds(each.session.feed, ids[first : first + step]))
        done(1)
    for _ in range(blocks):
        for each in timed:
            each.tokens.append(_seconds(_write, each.session, step) / step)
        done(1)
    return [
        _kept(method, each, timed[0])
        for method, each in zip(("none", *methods), timed, strict=True)
    ]


def _seconds(call: Callable[..., object], *arguments: object) -> float:
    begun = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - begun


def _write(session: Session, tokens: int) -> None:
    for _ in range(tokens):
        session.next_token()


def _kept(method: str, timed: _Timed, alone: _Timed) -> Kept:
    def times(own: list[float], others: list[float]) -> float:
        return rounded(median(a / b for a, b in zip(own, others, strict=True)))

    return Kept(
        method,
        timed.session.cache.cells,
        rounded(median(timed.steps)),
        rounded(median(timed.tokens)),
        times(timed.steps, alone.steps),
        times(timed.tokens, alone.tokens),
    )


@click.command(cls=Measurement, context_settings={"show_default": True})
@model_option
@click.option("--max-kv-size", default=1024, type=click.IntRange(64), help="Of all sessions.")
@click.option("--methods", default="fitted", help="Of archives, as NAME,...")
@click.option("--blocks", default=40, type=click.IntRange(1), help="Read, and written.")
@click.option("--calibration", type=click.Path(exists=True, path_type=Path), metavar="FILE")
@out_option
def archive_cost(
    name: str,
    max_kv_size: int,
    methods: str,
    blocks: int,
    calibration: Path | None,
    out: Path | None,
) -> None:
    """Compare what reading and writing take with an archive and with a window alone."""
    check_outputs(out)
    model = load_model(name, progress=True)
    known = load_calibration(calibration, model) if calibration else None
    with bar(2 * blocks, "reading, writing") as shown:
        found = measure(model, max_kv_size, methods.split(","), blocks, known, shown)
    for each in found:
        click.echo(
            f"{each.method:<10}{each.cells:>7,} cells  a step {1e3 * each.step_s:>6.2f} ms "
            f"({each.steps:.3f}x)  a token {1e3 * each.token_s:>6.3f} ms ({each.tokens:.3f}x)"
        )
    machine = dataclasses.asdict(describe_machine())
    rows = [dataclasses.asdict(each) for each in found]
    write_json(
        out, {"machine": machine, "model": name, "max_kv_size": max_kv_size, "readings": rows}
    )


if __name__ == "__main__":
    archive_cost()

"""Cost of an archive: bounded sessions of one text that differ in what they do with evicted cells.

    python -m benchmarks.archive_cost --calibration FILE --out archive-cost.json

One session drops the cells that leave its window, the others compress them. All prefill a text in
steps of one archive block and then decode, in turns, so that a machine that drifts affects all
alike. Each step is compared with the same step of the first session; the work that an archive does
once per block is spread over the tokens of that block.
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
from kvkeep.evaluate.haystack import manual_text
from kvkeep.model import Model
from kvkeep.storage.files.atomic import write_json

WARM_UP_BUDGETS = 3  # budgets of text that are prefilled before anything is measured


@dataclass(frozen=True)
class ArchiveCost:
    """Times of one session.

    method: of the archive; "none" for the window alone. cells: held at the end. step_s: median
    seconds of a prefill step of one block. token_s: median seconds of a decoded token. steps,
    tokens: median ratios of these to the session without an archive.
    """

    method: str
    cells: int
    step_s: float
    token_s: float
    steps: float
    tokens: float


@dataclass
class _TimedSession:
    session: Session
    steps: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)


def measure(
    model: Model,
    max_kv_size: int,
    methods: Sequence[str],
    blocks: int,
    calibration: Calibration | None,
    advance: Callable[[int], None],
) -> list[ArchiveCost]:
    """Time `blocks` prefill steps, and as many blocks of decoded tokens."""
    archives = [Archive(max_kv_size, method=method) for method in methods]
    step, keep, window = archives[0].block, archives[0].keep, archives[0].window
    sessions = [model.session(policy=Sliding(max_kv_size), prefill_step=step)]
    sessions += [
        model.session(policy=archive, prefill_step=step, calibration=calibration)
        for archive in archives
    ]
    # From here on, each step pushes the oldest block out of the full window.
    filled = keep + window + WARM_UP_BUDGETS * max_kv_size // step * step
    ids = (model.text.encode(manual_text()) * 2)[: filled + blocks * step]
    for session in sessions:
        session.feed(ids[:filled])
    timed = [_TimedSession(session) for session in sessions]
    for start in range(filled, len(ids), step):
        for session_times in timed:
            session_times.steps.append(
                _seconds(session_times.session.feed, ids[start : start + step])
            )
        advance(1)
    for _ in range(blocks):
        for session_times in timed:
            session_times.tokens.append(_seconds(_generate, session_times.session, step) / step)
        advance(1)
    return [
        _summarise(method, session_times, timed[0])
        for method, session_times in zip(("none", *methods), timed, strict=True)
    ]


def _seconds(call: Callable[..., object], *arguments: object) -> float:
    start = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - start


def _generate(session: Session, tokens: int) -> None:
    for _ in range(tokens):
        session.next_token()


def _summarise(method: str, timed: _TimedSession, baseline_session: _TimedSession) -> ArchiveCost:
    def ratio(times: list[float], baseline: list[float]) -> float:
        return rounded(median(a / b for a, b in zip(times, baseline, strict=True)))

    return ArchiveCost(
        method,
        timed.session.cache.cells,
        rounded(median(timed.steps)),
        rounded(median(timed.tokens)),
        ratio(timed.steps, baseline_session.steps),
        ratio(timed.tokens, baseline_session.tokens),
    )


@click.command(cls=Measurement, context_settings={"show_default": True})
@model_option
@click.option(
    "--max-kv-size", default=1024, type=click.IntRange(64), help="Budget of each session."
)
@click.option("--methods", default="fitted", help="Archive methods, NAME,...")
@click.option(
    "--blocks", default=40, type=click.IntRange(1), help="Blocks to prefill, and to decode."
)
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
    """Compare prefill and decode times with an archive and with a window alone."""
    check_outputs(out)
    model = load_model(name, progress=True)
    loaded_calibration = load_calibration(calibration, model) if calibration else None
    with bar(2 * blocks, "prefill, decode") as shown:
        costs = measure(model, max_kv_size, methods.split(","), blocks, loaded_calibration, shown)
    for cost in costs:
        click.echo(
            f"{cost.method:<10}{cost.cells:>7,} cells  a step {1e3 * cost.step_s:>6.2f} ms "
            f"({cost.steps:.3f}x)  a token {1e3 * cost.token_s:>6.3f} ms ({cost.tokens:.3f}x)"
        )
    machine = dataclasses.asdict(describe_machine())
    rows = [dataclasses.asdict(cost) for cost in costs]
    settings = {"model": name, "max_kv_size": max_kv_size, "blocks": blocks}
    settings["calibration"] = calibration.name if calibration else None
    write_json(out, {"machine": machine, **settings, "readings": rows})


if __name__ == "__main__":
    archive_cost()

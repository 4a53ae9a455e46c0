"""Prefill in steps against prefill of the whole prompt at once: speed and peak memory.

Steps are measured with all cells held and within a budget, which needs steps. Each measurement runs
in a new process. The ways alternate, so that a machine that drifts affects all alike; medians are
reported with minimum and maximum.
"""

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import click

from benchmarks.command import (
    INTERRUPTED,
    Measurement,
    check_outputs,
    dtype_option,
    model_option,
    out_option,
)
from benchmarks.machine import describe_machine
from benchmarks.one_prefill import Prefill, Way, measure_in_new_process
from benchmarks.progress import bar
from kvkeep.models.hub.source import resolve
from kvkeep.storage.files.atomic import write_json
from kvkeep.types import DtypeName


@dataclass(frozen=True)
class Spread:
    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: list[float]) -> "Spread":
        return cls(median(values), min(values), max(values))


@dataclass(frozen=True)
class Summary:
    """Summary of one way of prefill over all rounds."""

    prefill_step: int
    budget: int | None
    rounds: int
    tokens_per_s: Spread
    peak_bytes: Spread


def ways_to_compare(tokens: int, prefill_step: int, budget: int) -> tuple[Way, ...]:
    """Return the compared ways; the whole prompt at once comes last."""
    return Way(prefill_step), Way(prefill_step, budget), Way(tokens)


def summarise(measured: list[Prefill], way: Way) -> Summary:
    rounds = [reading for reading in measured if Way(reading.prefill_step, reading.budget) == way]
    return Summary(
        way.prefill_step,
        way.budget,
        len(rounds),
        Spread.of([reading.tokens_per_s for reading in rounds]),
        Spread.of([reading.peak_bytes for reading in rounds]),
    )


def measurements(
    name: str, dtype: DtypeName, tokens: int, compared: Sequence[Way], rounds: int
) -> Iterator[Prefill]:
    """Measure each way once per round, in new processes; the order alternates."""
    for index in range(rounds):
        for way in compared if index % 2 == 0 else reversed(compared):
            yield measure_in_new_process(name, dtype, tokens, way)


def table(summaries: list[Summary]) -> str:
    lines = [
        f"{'prefill step':>12}  {'budget':>6}  {'tokens/s':>24}  {'peak above weights, MB':>30}"
    ]
    for summary in summaries:
        speed, peak = summary.tokens_per_s, summary.peak_bytes
        lines.append(
            f"{summary.prefill_step:>12,}  {f'{summary.budget:,}' if summary.budget else '-':>6}  "
            f"{f'{speed.median:,.0f} ({speed.least:,.0f} to {speed.most:,.0f})':>24}  "
            f"{_megabytes(peak):>30}"
        )
    return "\n".join(lines)


def _megabytes(peak: Spread) -> str:
    middle, least, most = (x / 1e6 for x in (peak.median, peak.least, peak.most))
    return f"{middle:,.0f} ({least:,.0f} to {most:,.0f})"


@click.command(cls=Measurement, context_settings={"show_default": True})
@click.option("--tokens", default=4232, type=click.IntRange(2), help="Length of the prompt.")
@click.option("--prefill-step", default=512, type=click.IntRange(1), help="Tokens per step.")
@click.option(
    "--max-kv-size", "budget", default=1024, type=click.IntRange(5), help="Budget in cells."
)
@click.option("--rounds", default=5, type=click.IntRange(1), help="Repeats of each way.")
@model_option
@dtype_option
@out_option
def prefill(
    tokens: int,
    prefill_step: int,
    budget: int,
    rounds: int,
    name: str,
    dtype: DtypeName,
    out: Path | None,
) -> None:
    """Evaluate a prompt in steps and whole: speed, and memory above the weights."""
    if prefill_step >= tokens:
        raise click.UsageError(f"--prefill-step must be below --tokens; found {prefill_step}")
    check_outputs(out)
    resolve(name, progress=True)  # fetched and converted before anything is measured
    machine, measured, interrupted = describe_machine(), list[Prefill](), False
    compared = ways_to_compare(tokens, prefill_step, budget)
    try:
        with bar(len(compared) * rounds * tokens, "prefill") as progress:
            for reading in measurements(name, dtype, tokens, compared, rounds):
                measured.append(reading)
                progress(tokens)
    except KeyboardInterrupt:
        interrupted = True
    if len(measured) >= len(compared):
        summaries = [summarise(measured, way) for way in compared]
        click.echo(table(summaries))
        result = {
            "machine": dataclasses.asdict(machine),
            "settings": {"model": name, "dtype": dtype, "tokens": tokens},
            "summaries": [dataclasses.asdict(reading) for reading in summaries],
            "measurements": [dataclasses.asdict(reading) for reading in measured],
        }
        write_json(out, result)
    if interrupted:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    prefill()

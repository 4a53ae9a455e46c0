"""What evaluating a prompt in steps costs and saves, against evaluating it whole.

In steps it is read twice: with all cells held, and on a budget, which only steps can keep to. Each
measurement has a process of its own. The ways take turns, so that a drifting machine meets them
alike; medians are reported beside the least and the most.
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
from benchmarks.one_prefill import Prefill, Way, measure_apart
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
    """One way of prefill over its rounds."""

    prefill_step: int
    budget: int | None
    rounds: int
    tokens_per_s: Spread
    peak_bytes: Spread


def ways(tokens: int, prefill_step: int, budget: int) -> tuple[Way, ...]:
    """Those that are compared; the whole prompt at once comes last."""
    return Way(prefill_step), Way(prefill_step, budget), Way(tokens)


def summarise(found: list[Prefill], way: Way) -> Summary:
    mine = [each for each in found if Way(each.prefill_step, each.budget) == way]
    return Summary(
        way.prefill_step,
        way.budget,
        len(mine),
        Spread.of([each.tokens_per_s for each in mine]),
        Spread.of([each.peak_bytes for each in mine]),
    )


def measurements(
    name: str, dtype: DtypeName, tokens: int, compared: Sequence[Way], rounds: int
) -> Iterator[Prefill]:
    """Each way once a round, each in a fresh process; who goes first changes."""
    for index in range(rounds):
        for way in compared if index % 2 == 0 else reversed(compared):
            yield measure_apart(name, dtype, tokens, way)


def table(summaries: list[Summary]) -> str:
    lines = [
        f"{'prefill step':>12}  {'budget':>6}  {'tokens/s':>24}  {'peak above weights, MB':>30}"
    ]
    for each in summaries:
        speed, peak = each.tokens_per_s, each.peak_bytes
        lines.append(
            f"{each.prefill_step:>12,}  {f'{each.budget:,}' if each.budget else '-':>6}  "
            f"{f'{speed.median:,.0f} ({speed.least:,.0f} to {speed.most:,.0f})':>24}  "
            f"{_megabytes(peak):>30}"
        )
    return "\n".join(lines)


def _megabytes(peak: Spread) -> str:
    middle, least, most = (x / 1e6 for x in (peak.median, peak.least, peak.most))
    return f"{middle:,.0f} ({least:,.0f} to {most:,.0f})"


@click.command(cls=Measurement, context_settings={"show_default": True})
@click.option("--tokens", default=4232, type=click.IntRange(2), help="Length of the prompt.")
@click.option("--prefill-step", default=512, type=click.IntRange(1), help="Tokens at once.")
@click.option(
    "--max-kv-size", "budget", default=1024, type=click.IntRange(5), help="Of the budget."
)
@click.option("--rounds", default=5, type=click.IntRange(1), help="Measurements of each way.")
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
    machine, found, interrupted = describe_machine(), list[Prefill](), False
    compared = ways(tokens, prefill_step, budget)
    try:
        with bar(len(compared) * rounds * tokens, "prefill") as shown:
            for each in measurements(name, dtype, tokens, compared, rounds):
                found.append(each)
                shown(tokens)
    except KeyboardInterrupt:
        interrupted = True
    if len(found) >= len(compared):
        summaries = [summarise(found, way) for way in compared]
        click.echo(table(summaries))
        result = {
            "machine": dataclasses.asdict(machine),
            "settings": {"model": name, "dtype": dtype, "tokens": tokens},
            "summaries": [dataclasses.asdict(each) for each in summaries],
            "measurements": [dataclasses.asdict(each) for each in found],
        }
        write_json(out, result)
    if interrupted:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    prefill()

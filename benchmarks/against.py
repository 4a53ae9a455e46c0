"""Compare the speed of this checkout with another one, alternating between them.

    git worktree add ../before COMMIT && (cd ../before && python setup.py build_ext --inplace)
    python -m benchmarks.against ../before --rounds 5 --out against.json

Each round starts one process per checkout, which reports its fastest time of each figure. Ratios
are taken within a round, so that a machine that drifts affects both alike; reported are the median
ratio and its quartiles.
"""

import dataclasses
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import click

from benchmarks.command import Measurement, check_outputs, out_option
from benchmarks.machine import describe_machine
from benchmarks.progress import bar
from kvkeep.errors import InvalidArgument
from kvkeep.storage.files.atomic import write_json

HERE = Path(__file__).resolve().parent.parent
WORKER = Path(__file__).with_name("one_checkout.py")


@dataclass(frozen=True)
class Figure:
    """One figure of both checkouts, medians over the rounds.

    better: speed ratio within a round; above 1, `here` is faster. low, high: its quartiles.
    """

    name: str
    here: float
    there: float
    low: float
    better: float
    high: float


def measure(checkout: Path) -> dict[str, float]:
    """Run `one_checkout.py` on a checkout in a new process; return its figures by name."""
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    # -P: modules of this folder must not hide those of Python, such as `trace`.
    process = subprocess.run(
        [sys.executable, "-P", str(WORKER)], env=environment, capture_output=True, text=True
    )
    if process.returncode:
        raise InvalidArgument(f"{checkout} cannot be measured: {process.stderr.strip()[-400:]}")
    figures: dict[str, float] = json.loads(process.stdout)
    return figures


def compare_rounds(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> list[Figure]:
    """Summarise the rounds of both checkouts, figure by figure."""
    return [
        _figure(name, [each[name] for each in ours], [each[name] for each in theirs])
        for name in ours[0]
    ]


def _figure(name: str, ours: list[float], theirs: list[float]) -> Figure:
    pairs = (
        zip(ours, theirs, strict=True) if name.endswith("tok_s") else zip(theirs, ours, strict=True)
    )
    ratios = sorted(numerator / denominator for numerator, denominator in pairs)
    quarter = len(ratios) // 4
    low, high = ratios[quarter], ratios[-1 - quarter]
    return Figure(name, median(ours), median(theirs), low, median(ratios), high)


def table(figures: list[Figure]) -> str:
    lines = [f"{'':<24}{'here':>12}{'there':>12}{'better':>9}  half of the rounds"]
    for figure in figures:
        lines.append(
            f"{figure.name:<24}{figure.here:>12.4g}{figure.there:>12.4g}{figure.better:>8.2f}x"
            f"  {figure.low:.2f} to {figure.high:.2f}"
        )
    return "\n".join(lines)


def result_json(figures: list[Figure], rounds: int) -> dict[str, Any]:
    """Return the content of the JSON file."""
    rows = [dataclasses.asdict(figure) for figure in figures]
    machine = dataclasses.asdict(describe_machine())
    return {"machine": machine, "rounds": rounds, "figures": rows}


@click.command(cls=Measurement)
@click.argument("other", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(1))
@out_option
def main(other: Path, rounds: int, out: Path | None) -> None:
    """Measure this checkout and OTHER in turn: start-up, prefill, decode, endless, save, load."""
    check_outputs(out)
    measurements: dict[Path, list[dict[str, float]]] = {HERE: [], other.resolve(): []}
    if len(measurements) == 1:
        raise InvalidArgument(f"{other} is this checkout: give another one")
    with bar(2 * rounds, "processes") as advance:
        for index in range(rounds):
            for checkout in list(measurements) if index % 2 else list(reversed(measurements)):
                measurements[checkout].append(measure(checkout))
                advance(1)
            figures = compare_rounds(*measurements.values())
            write_json(out, result_json(figures, index + 1))
    click.echo(table(figures))


if __name__ == "__main__":
    main()

"""This checkout against another one, in turn, so that a drifting machine meets both alike.

    git worktree add ../before COMMIT && (cd ../before && python setup.py build_ext --inplace)
    python -m benchmarks.against ../before --rounds 5 --out against.json

Each round starts a process for each of them, which gives the least that it found of each figure.
What counts is the ratio within a round: its median over the rounds, and between what half of them
lie.
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
    """One figure of both, medians over the rounds.

    better: how many times, in the same round; above 1 is faster. low, high: half of the rounds lie
    between.
    """

    name: str
    here: float
    there: float
    low: float
    better: float
    high: float


def measure(checkout: Path) -> dict[str, float]:
    """The figures of one checkout, in a process of its own."""
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    done = subprocess.run(
        [sys.executable, str(WORKER)], env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise InvalidArgument(f"{checkout} cannot be measured: {done.stderr.strip()[-400:]}")
    found: dict[str, float] = json.loads(done.stdout)
    return found


def compared(here: list[dict[str, float]], there: list[dict[str, float]]) -> list[Figure]:
    """What rounds come to, figure by figure."""
    return [
        _figure(name, [each[name] for each in here], [each[name] for each in there])
        for name in here[0]
    ]


def _figure(name: str, here: list[float], there: list[float]) -> Figure:
    faster = (
        zip(here, there, strict=True) if name.endswith("tok_s") else zip(there, here, strict=True)
    )
    ratios = sorted(one / other for one, other in faster)
    quarter = len(ratios) // 4
    low, high = ratios[quarter], ratios[-1 - quarter]
    return Figure(name, median(here), median(there), low, median(ratios), high)


def table(figures: list[Figure]) -> str:
    lines = [f"{'':<24}{'here':>12}{'there':>12}{'better':>9}  half of the rounds"]
    for each in figures:
        lines.append(
            f"{each.name:<24}{each.here:>12.4g}{each.there:>12.4g}{each.better:>8.2f}x"
            f"  {each.low:.2f} to {each.high:.2f}"
        )
    return "\n".join(lines)


def result(figures: list[Figure], rounds: int) -> dict[str, Any]:
    """What is written of figures, as JSON has it."""
    rows = [dataclasses.asdict(each) for each in figures]
    machine = dataclasses.asdict(describe_machine())
    return {"machine": machine, "rounds": rounds, "figures": rows}


@click.command(cls=Measurement)
@click.argument("other", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(1))
@out_option
def main(other: Path, rounds: int, out: Path | None) -> None:
    """Measure this checkout and OTHER in turn: start-up, prefill, decode, endless, save, load."""
    check_outputs(out)
    found: dict[Path, list[dict[str, float]]] = {HERE: [], other.resolve(): []}
    if len(found) == 1:
        raise InvalidArgument(f"{other} is this checkout: give another one")
    with bar(2 * rounds, "processes") as advance:
        for number in range(rounds):
            for checkout in list(found) if number % 2 else list(reversed(found)):
                found[checkout].append(measure(checkout))
                advance(1)
    figures = compared(*found.values())
    click.echo(table(figures))
    if out:
        write_json(out, result(figures, rounds))


if __name__ == "__main__":
    main()

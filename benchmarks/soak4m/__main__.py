"""Millions of tokens of real text through bounded sessions that are killed and restored.

    python -m benchmarks.soak4m --folder /var/tmp/soak4m --out soak4m.json --plot soak4m.png

Each run is one session. It scores text in windows of 20,000 tokens. After 200,000 tokens it is
saved and its process ends by SIGKILL; a new process restores it and goes on, and its logits are
compared, to the bit, with those of the process that was killed. Every tenth window is evaluated
by a new session, too. The default length goes beyond position 2^22.

The folder holds the text, snapshots and results. The same command goes on with what is there,
whenever it was stopped. A result keeps the reports of complete runs that the folder does not have.
"""

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import click

from benchmarks.command import Measurement, check_outputs, model_option, out_option
from benchmarks.soak4m.plot import draw_runs
from benchmarks.soak4m.report import run_report, table, with_windows_report
from benchmarks.soak4m.runs import Plan, Run, all_runs
from benchmarks.soak4m.state import State
from kvkeep.errors import InvalidArgument, KvkeepError
from kvkeep.evaluate.plots import check_plottable
from kvkeep.storage.files.atomic import write_atomic, write_json

TOKENS = 4_200_000  # more than 2**22
MAX_DEATHS = 3  # in a row, without a window in between


@click.command(cls=Measurement, context_settings={"show_default": True})
@click.option("--folder", required=True, type=click.Path(path_type=Path), help="State of the runs.")
@click.option("--tokens", default=TOKENS, type=click.IntRange(40), help="Most tokens of a run.")
@click.option("--only", "names", multiple=True, metavar="RUN", help="Do only this run.")
@click.option("--window", default=Plan.window, type=click.IntRange(10), help="Tokens per window.")
@click.option("--step", default=Plan.step, type=click.IntRange(1), help="Tokens evaluated at once.")
@click.option(
    "--kill-every", default=Plan.kill_every, type=click.IntRange(10), help="Tokens per process."
)
@model_option
@click.option(
    "--plot", metavar="FILE.png", type=click.Path(path_type=Path), help="Plot complete runs."
)
@out_option
def soak4m(
    folder: Path,
    tokens: int,
    names: tuple[str, ...],
    window: int,
    step: int,
    kill_every: int,
    name: str,
    plot: Path | None,
    out: Path | None,
) -> None:
    """Evaluate millions of tokens in bounded sessions; go on with what FOLDER holds."""
    check_outputs(out, plot)
    if plot is not None:
        check_plottable(plot)
    if kill_every % window:
        raise InvalidArgument(f"--kill-every must be a multiple of {window}; found {kill_every}")
    plan = Plan(window, step, reference_from=window // 5, kill_every=kill_every)
    runs = all_runs(name, tokens, plan)
    if unknown := set(names) - set(runs):
        raise InvalidArgument(f"--only must be one of {', '.join(runs)}; found {unknown.pop()}")
    folder.mkdir(parents=True, exist_ok=True)
    earlier = stored_reports(out)
    chosen = {name: run for name, run in runs.items() if name in names} or runs
    complete_reports(chosen, folder)  # before hours of work: other settings are refused
    for run in chosen.values():
        _complete(run, folder, {"model": name, "tokens": tokens, "plan": asdict(plan)})
        reports = in_order(runs, earlier | complete_reports(chosen, folder))
        write_json(out, {"runs": reports})
        if plot is not None:
            write_atomic(plot, draw_runs(reports, plot.suffix))
    click.echo(table(in_order(runs, earlier | complete_reports(chosen, folder))))


def stored_reports(path: Path | None) -> dict[str, dict[str, object]]:
    """Return the reports in an earlier result, by name; none if there is no such file.

    Raises InvalidArgument for a file that is no result.
    """
    if path is None or not path.exists():
        return {}
    try:
        reports = json.loads(path.read_bytes())["runs"].items()
        return {name: with_windows_report(report) for name, report in reports}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InvalidArgument(
            f"{path} is no result of this benchmark: take another --out"
        ) from error


def in_order(
    runs: dict[str, Run], reports: dict[str, dict[str, object]]
) -> dict[str, dict[str, object]]:
    """Return the reports in the order of the runs."""
    return {name: reports[name] for name in runs if name in reports}


def complete_reports(runs: dict[str, Run], folder: Path) -> dict[str, dict[str, object]]:
    """Return the reports of the runs that were seen to their end, by name."""
    states = {name: State.load(folder / f"{name}.json", run) for name, run in runs.items()}
    return {
        name: run_report(state, runs[name], folder)
        for name, state in states.items()
        if state.is_complete
    }


def _complete(run: Run, folder: Path, arguments: dict[str, object]) -> None:
    """Start one process after another until a run is complete."""
    path, deaths = folder / f"{run.name}.json", 0
    while not (state := State.load(path, run)).is_complete:
        document = json.dumps({"folder": str(folder), "run": run.name, **arguments})
        command = [sys.executable, "-m", "benchmarks.soak4m.worker", document]
        # Threads that wait for others would count as computing, on a machine with other work.
        environment = {"OMP_WAIT_POLICY": "PASSIVE"} | os.environ
        status = subprocess.run(command, check=False, env=environment).returncode
        has_moved = State.load(path, run).tokens > state.tokens
        deaths = 0 if has_moved else deaths + 1
        if status not in (0, -signal.SIGKILL) or deaths == MAX_DEATHS:
            raise KvkeepError(
                f"{run.name} ended with status {status} after {state.tokens:,} tokens"
            )


if __name__ == "__main__":
    soak4m()

"""Validation of the simulator against running servers.

    python -m benchmarks.fleet.validate --out docs/results/fleet.json

Measures the costs of one server, and their increase with several servers; runs 8 clients against
one engine with two threads, and against fleets of 1, 2 and 4 servers with one thread each; takes
medians of several rounds; then simulates the same. Clients and Ray run on this machine too.
"""

import asyncio
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import click

from benchmarks.command import Measurement, ResultFile, out_option
from benchmarks.figures import rounded
from benchmarks.fleet.costs import (
    CompletionClient,
    Costs,
    StoreCosts,
    measure_alone,
    measure_beside,
    measure_store,
)
from benchmarks.fleet.load import ClientWork, Load, run_load
from benchmarks.fleet.servers import fleet, one_engine
from benchmarks.fleet.simulator import Fleet, Lognormal, World
from kvkeep import load_model
from kvkeep.evaluate.haystack import manual_text

COUNTS = (1, 2, 4)
CLIENT_WORKS = {
    "completions": ClientWork(8, 64, 64, False),
    "sessions": ClientWork(8, 64, 64, True),
}
WARM_UP, SEEDS = 4.0, 8
_OPTIONS = ("--max-kv-size", "512")


Loads = dict[str, list[Load]]  # by kind of work; one entry per round


@dataclass
class Measurements:
    """Measurements, one entry per round.

    alone: turns, steps and a request of one server. slow: turns and steps by number of servers.
    loads: by number of servers. two: loads of one engine with two threads.
    """

    alone: list[tuple[list[float], list[float], float]]
    slow: dict[int, list[tuple[float, float]]]
    loads: dict[int, Loads]
    two: Loads


def measure_rounds(
    rounds: int, seconds: float, ids: list[int], report: Callable[[Measurements], None]
) -> Measurements:
    """Measure everything once per round, in alternating order. report: called after each."""
    measurements = Measurements(
        [],
        {count: [] for count in COUNTS},
        {count: {name: [] for name in CLIENT_WORKS} for count in COUNTS},
        {name: [] for name in CLIENT_WORKS},
    )
    for turn in range(rounds):
        for count in (0, *COUNTS) if turn % 2 == 0 else (*reversed(COUNTS), 0):
            with tempfile.TemporaryDirectory() as folder:
                if count:
                    with fleet(count, Path(folder).as_uri(), *_OPTIONS) as url:
                        asyncio.run(_fleet(url, count, ids, seconds, measurements))
                else:
                    with one_engine(2, "--store", folder, *_OPTIONS) as url:
                        asyncio.run(_loads(url, ids, seconds, measurements.two))
            loads = measurements.loads[count] if count else measurements.two
            rates = [f"{name} {results[-1].rate:.1f}" for name, results in loads.items()]
            click.echo(f"{turn + 1}: {count or 'one engine'}: {', '.join(rates)}", err=True)
        report(measurements)
    return measurements


async def _fleet(
    url: str, count: int, ids: list[int], seconds: float, measurements: Measurements
) -> None:
    client = CompletionClient(url, ids)
    sessions = list((await client.servers(count)).values())
    for session in sessions:
        await client.turn(4, session)
    if count == 1:
        measurements.alone.append(await measure_alone(client, sessions[0]))
    measurements.slow[count].append(await measure_beside(client, sessions, seconds / 2))
    await _loads(url, ids, seconds, measurements.loads[count])


async def _loads(url: str, ids: list[int], seconds: float, results: Loads) -> None:
    for name, work in CLIENT_WORKS.items():
        results[name].append(await run_load(url, work, ids, seconds, WARM_UP))


def costs_of(measurements: Measurements, measure_store: StoreCosts) -> Costs:
    """Return the medians over rounds. store: from `measure_store`."""
    turns, steps, https = zip(*measurements.alone, strict=True)
    turn, step = ([median(part) for part in zip(*values, strict=True)] for values in (turns, steps))
    slow = {
        n: [median(values[kind] for values in measurements.slow[n]) for kind in (0, 1)]
        for n in COUNTS
    }
    slower = [{n: max(1.0, slow[n][kind] / slow[1][kind]) for n in COUNTS} for kind in (0, 1)]
    return Costs(
        1, turn[0], turn[1], step[0], step[1], slower[0], slower[1], *measure_store, median(https)
    )


def simulate(costs: Costs, count: int, work: ClientWork, seconds: float) -> float:
    """Return simulated tokens per second of `count` servers; the mean of several seeds."""
    none = Lognormal(0.0, 0.0)
    prompt, written = (Lognormal(float(tokens), 0.0) for tokens in (work.prompt, work.written))
    world = World(
        count,
        work.clients,
        work.sessions,
        prompt,
        written,
        think=none,
        http=costs.http,
        put=none,
        get=none,
        bandwidth=1e12,
        machines=False,
    )
    return mean(Fleet(world, costs, seed).run(seconds, WARM_UP).rate for seed in range(SEEDS))


def rows_of(measurements: Measurements, costs: Costs, seconds: float) -> list[dict[str, Any]]:
    """Return measured and simulated tokens per second by kind of work and number of servers."""
    rows = []
    for name, work in CLIENT_WORKS.items():
        for count in COUNTS:
            rates = [result.rate for result in measurements.loads[count][name]]
            measured, simulated = median(rates), simulate(costs, count, work, 3 * seconds)
            row = {
                "work": name,
                "servers": count,
                "tokens_per_second": rounded(measured),
                "rounds": [rounded(rate) for rate in rates],
                "simulated": rounded(simulated),
                "error": rounded(simulated / measured - 1),
            }
            rows.append(row)
            click.echo(
                f"{name} {count}: {measured:.1f} simulated {simulated:.1f} "
                f"({simulated / measured - 1:+.1%})"
            )
    return rows


@click.command(cls=Measurement)
@click.option("--rounds", type=click.IntRange(1), default=5)
@click.option("--seconds", type=float, default=15.0, help="Seconds per load and round.")
@out_option
def main(rounds: int, seconds: float, out: Path | None) -> None:
    """Measure fleets of a few servers, and compare with their simulation."""
    file = ResultFile(out, rounds=rounds, seconds=seconds)
    model = load_model()
    ids = model.text.encode(manual_text())
    store_costs = measure_store(model, ids)
    del model
    measurements = measure_rounds(
        rounds, seconds, ids, lambda unfinished: file.write(measurements=unfinished)
    )
    costs = costs_of(measurements, store_costs)
    rows = rows_of(measurements, costs, seconds)
    ratios = {
        name: [
            two.rate / value.rate
            for two, value in zip(measurements.loads[2][name], ones, strict=True)
        ]
        for name, ones in measurements.two.items()
    }
    for name, values in ratios.items():
        click.echo(f"{name}: 2 servers of 1 thread {median(values):.3f} of one engine of 2 threads")
    file.write(
        costs=costs,
        rows=rows,
        one_engine_of_two_threads={
            name: [rounded(values.rate) for values in loads]
            for name, loads in measurements.two.items()
        },
        two_servers_over_one_engine={
            name: {
                "median": rounded(median(values)),
                "rounds": [rounded(value) for value in values],
            }
            for name, values in ratios.items()
        },
    )


if __name__ == "__main__":
    main()

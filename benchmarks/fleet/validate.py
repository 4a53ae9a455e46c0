"""Servers that run and the simulator's, side by side: how far what it says can be believed.

    python -m benchmarks.fleet.validate --out docs/results/fleet.json

Measures what work costs at one server, and how much more beside others; has 8 clients ask one
engine of two threads, and fleets of 1, 2 and 4 servers of one thread each; all of it in several
rounds, of which it takes medians; then simulates the same. On this machine are the clients and Ray
as well.
"""

import asyncio
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import click

from benchmarks.command import check_outputs, out_option
from benchmarks.figures import rounded
from benchmarks.fleet.costs import Asking, Costs, Stored, alone, beside, store
from benchmarks.fleet.load import Load, Work, load
from benchmarks.fleet.servers import fleet, one_engine
from benchmarks.fleet.simulator import Fleet, Law, World
from benchmarks.machine import describe_machine
from kvkeep import load_model
from kvkeep.evaluate.haystack import manual_text
from kvkeep.storage.files.atomic import write_json

COUNTS = (1, 2, 4)
WORKS = {"completions": Work(8, 64, 64, False), "sessions": Work(8, 64, 64, True)}
WARM, SEEDS = 4.0, 8
_OPTIONS = ("--max-kv-size", "512")


Loads = dict[str, list[Load]]  # of each kind of work, by rounds


@dataclass
class Measured:
    """What rounds have found, a value each. alone: turns, steps and a request of one server.
    slow: turns and steps of so many servers at once. loads: of as many. two: of one engine."""

    alone: list[tuple[list[float], list[float], float]]
    slow: dict[int, list[tuple[float, float]]]
    loads: dict[int, Loads]
    two: Loads


def measured(rounds: int, seconds: float, ids: list[int]) -> Measured:
    """Everything once a round, in another order each time: the machine may be others' as well."""
    found = Measured(
        [],
        {count: [] for count in COUNTS},
        {count: {name: [] for name in WORKS} for count in COUNTS},
        {name: [] for name in WORKS},
    )
    for turn in range(rounds):
        for count in (0, *COUNTS) if turn % 2 == 0 else (*reversed(COUNTS), 0):
            with tempfile.TemporaryDirectory() as folder:
                if count:
                    with fleet(count, Path(folder).as_uri(), *_OPTIONS) as url:
                        asyncio.run(_fleet(url, count, ids, seconds, found))
                else:
                    with one_engine(2, "--store", folder, *_OPTIONS) as url:
                        asyncio.run(_loads(url, ids, seconds, found.two))
            loads = found.loads[count] if count else found.two
            rates = [f"{name} {each[-1].rate:.1f}" for name, each in loads.items()]
            click.echo(f"{turn + 1}: {count or 'one engine'}: {', '.join(rates)}", err=True)
    return found


async def _fleet(url: str, count: int, ids: list[int], seconds: float, found: Measured) -> None:
    asking = Asking(url, ids)
    sessions = list((await asking.servers(count)).values())
    for session in sessions:
        await asking.turn(4, session)
    if count == 1:
        found.alone.append(await alone(asking, sessions[0]))
    found.slow[count].append(await beside(asking, sessions, seconds / 2))
    await _loads(url, ids, seconds, found.loads[count])


async def _loads(url: str, ids: list[int], seconds: float, found: Loads) -> None:
    for name, work in WORKS.items():
        found[name].append(await load(url, work, ids, seconds, WARM))


def costs_of(found: Measured, store: Stored) -> Costs:
    """Medians of what rounds have found. store: as `costs.store` gives it."""
    turns, steps, https = zip(*found.alone, strict=True)
    turn, step = ([median(part) for part in zip(*each, strict=True)] for each in (turns, steps))
    slow = {n: [median(each[kind] for each in found.slow[n]) for kind in (0, 1)] for n in COUNTS}
    slower = [{n: max(1.0, slow[n][kind] / slow[1][kind]) for n in COUNTS} for kind in (0, 1)]
    return Costs(1, turn[0], turn[1], step[0], step[1], slower[0], slower[1], *store, median(https))


def predicted(costs: Costs, count: int, work: Work, seconds: float) -> float:
    """Tokens a second of as many servers on this machine; the mean of several draws."""
    none = Law(0.0, 0.0)
    prompt, written = (Law(float(tokens), 0.0) for tokens in (work.prompt, work.written))
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
    return mean(Fleet(world, costs, seed).run(seconds, WARM).rate for seed in range(SEEDS))


def rows_of(found: Measured, costs: Costs, seconds: float) -> list[dict[str, Any]]:
    """Of each work and number of servers: tokens a second, and what was said of it."""
    rows = []
    for name, work in WORKS.items():
        for count in COUNTS:
            rates = [each.rate for each in found.loads[count][name]]
            real, said = median(rates), predicted(costs, count, work, 3 * seconds)
            row = {
                "work": name,
                "servers": count,
                "tokens_per_second": rounded(real),
                "rounds": [rounded(rate) for rate in rates],
                "simulated": rounded(said),
                "error": rounded(said / real - 1),
            }
            rows.append(row)
            click.echo(f"{name} {count}: {real:.1f} simulated {said:.1f} ({said / real - 1:+.1%})")
    return rows


@click.command()
@click.option("--rounds", type=click.IntRange(1), default=5)
@click.option("--seconds", type=float, default=15.0, help="That each load is measured a round.")
@out_option
def main(rounds: int, seconds: float, out: Path | None) -> None:
    """Measure fleets of a few servers, and simulate them."""
    check_outputs(out)
    model = load_model()
    ids = model.text.encode(manual_text())
    stored = store(model, ids)
    del model
    found = measured(rounds, seconds, ids)
    costs = costs_of(found, stored)
    rows = rows_of(found, costs, seconds)
    ratios = {
        name: [two.rate / one.rate for two, one in zip(found.loads[2][name], ones, strict=True)]
        for name, ones in found.two.items()
    }
    for name, each in ratios.items():
        click.echo(f"{name}: 2 servers of 1 thread {median(each):.3f} of one engine of 2 threads")
    result = {
        "machine": asdict(describe_machine()),
        "costs": asdict(costs),
        "rows": rows,
        "one_engine_of_two_threads": {
            name: [rounded(each.rate) for each in loads] for name, loads in found.two.items()
        },
        "two_servers_over_one_engine": {
            name: {"median": rounded(median(each)), "rounds": [rounded(one) for one in each]}
            for name, each in ratios.items()
        },
    }
    write_json(out, result)


if __name__ == "__main__":
    main()

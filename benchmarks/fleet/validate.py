"""Servers that run and the simulator's, side by side: how far what it says can be believed.

    python -m benchmarks.fleet.validate --out docs/results/fleet.json

Measures what work costs at one server, and how much more beside others; then has 8 clients ask one
engine of two threads, and fleets of 1, 2 and 4 servers of one thread each; then simulates the
same. All of it on this machine, the clients and Ray included.
"""

import asyncio
import tempfile
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Any

import click

from benchmarks.command import out_option
from benchmarks.figures import rounded
from benchmarks.fleet.costs import Asking, Costs, alone, beside, store
from benchmarks.fleet.load import Load, Work, load
from benchmarks.fleet.servers import fleet, one_engine
from benchmarks.fleet.simulator import Fleet, Law, World
from benchmarks.machine import describe_machine
from kvkeep import load_model
from kvkeep.evaluate.manual import manual_text
from kvkeep.files.whole import write_json

COUNTS = (1, 2, 4)
WORKS = {"completions": Work(8, 64, 64, False), "sessions": Work(8, 64, 64, True)}
WARM, SEEDS = 4.0, 8
_OPTIONS = ("--max-kv-size", "512")


async def _asked(
    url: str, count: int, ids: list[int], seconds: float
) -> tuple[Any, tuple[float, float], dict[str, Load]]:
    asking = Asking(url, ids)
    sessions = list((await asking.servers(count)).values())
    for session in sessions:
        await asking.turn(4, session)
    single = await alone(asking, sessions[0]) if count == 1 else None
    slow = await beside(asking, sessions, seconds / 2)
    return single, slow, {n: await load(url, w, ids, seconds, WARM) for n, w in WORKS.items()}


def measured(seconds: float) -> tuple[Costs, dict[int, dict[str, Load]], dict[str, Load]]:
    """Costs; and loads of fleets by their number, and of one engine with two threads."""
    model = load_model()
    ids = model.text.encode(manual_text())
    commit, read, head, size = store(model, ids)
    del model
    singles, slow, loads = [], {}, {}
    for count in COUNTS:
        with (
            tempfile.TemporaryDirectory() as folder,
            fleet(count, Path(folder).as_uri(), *_OPTIONS) as url,
        ):
            single, slow[count], loads[count] = asyncio.run(_asked(url, count, ids, seconds))
            singles += [single] if single else []
        click.echo(f"{count}: {[round(each.rate, 1) for each in loads[count].values()]}", err=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        one_engine(2, "--store", folder, *_OPTIONS) as url,
    ):
        two = {n: asyncio.run(load(url, w, ids, seconds, WARM)) for n, w in WORKS.items()}
    ((turn, step, http),) = singles
    slower = [
        {count: max(1.0, slow[count][kind] / slow[1][kind]) for count in COUNTS} for kind in (0, 1)
    ]
    costs = Costs(
        1, turn[0], turn[1], step[0], step[1], slower[0], slower[1], commit, read, head, size, http
    )
    return costs, loads, two


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


@click.command()
@click.option("--seconds", type=float, default=20.0, help="That each load is measured.")
@out_option
def main(seconds: float, out: Path | None) -> None:
    """Measure fleets of a few servers, and simulate them."""
    costs, loads, two = measured(seconds)
    rows = []
    for name, work in WORKS.items():
        for count in COUNTS:
            real, said = loads[count][name].rate, predicted(costs, count, work, 3 * seconds)
            rows.append(
                {
                    "work": name,
                    "servers": count,
                    "tokens_per_second": rounded(real),
                    "simulated": rounded(said),
                    "error": rounded(said / real - 1),
                }
            )
            click.echo(f"{name} {count}: {real:.1f} simulated {said:.1f} ({said / real - 1:+.1%})")
    ratios = {name: loads[2][name].rate / two[name].rate for name in WORKS}
    for name, ratio in ratios.items():
        click.echo(f"{name}: 2 servers of 1 thread {ratio:.3f} of one engine of 2 threads")
    result = {
        "machine": asdict(describe_machine()),
        "costs": asdict(costs),
        "rows": rows,
        "one_engine_of_two_threads": {name: rounded(each.rate) for name, each in two.items()},
        "two_servers_over_one_engine": {name: rounded(each) for name, each in ratios.items()},
    }
    write_json(out, result)


if __name__ == "__main__":
    main()

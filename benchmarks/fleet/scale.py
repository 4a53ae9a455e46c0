"""Fleets of 1 to 1,000 servers, on paper: what the simulator says of them.

    python -m benchmarks.fleet.scale --costs docs/results/fleet.json --into docs/fleet.md \
        --out docs/results/fleet_scale.json

Costs are those that were measured of one server here; each server has such a machine to itself. All
else is said in `world`, and in the table's caption.
"""

import json
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import click

from benchmarks.command import out_option
from benchmarks.figures import rounded
from benchmarks.fleet.costs import Costs
from benchmarks.fleet.simulator import Fleet, Found, Law, World
from kvkeep.storage.files.atomic import write_atomic, write_json

SERVERS = (1, 10, 100, 1000)
EACH = 30  # clients of a server
SECONDS = {1: 3600.0, 10: 1800.0, 100: 300.0, 1000: 60.0}
WARM = 60.0
DOLLARS_PUT, DOLLARS_GET = 5e-6, 4e-7  # of a request: S3 Standard's list price in us-east-1
BEGIN, END = "<!-- simulated -->", "<!-- /simulated -->"
HEADER = (
    "| servers | tokens/s | from memory | an answer (median, p99) | taken over (median, p99) "
    "| puts/s, gets/s | MB/s to, from the store | requests, $/h |\n"
    "|---|---|---|---|---|---|---|---|"
)


def world(servers: int) -> World:
    return World(
        servers,
        clients=EACH * servers,
        sessions=True,
        prompt=Law(60.0, 600.0),
        written=Law(120.0, 500.0),
        think=Law(30.0, 300.0),
        http=0.01,
        put=Law(0.030, 0.200),
        get=Law(0.020, 0.150),
        bandwidth=200e6,
        cached=40,
        between_failures=3600.0,
        restart=30.0,
        detect=0.5,
    )


def read_costs(file: Path) -> Costs:
    found = json.loads(file.read_text(encoding="utf-8"))["costs"]
    for name in ("turns_slower", "steps_slower"):
        found[name] = {int(count): slower for count, slower in found[name].items()}
    return Costs(**found)


def row(servers: int, found: Found) -> dict[str, Any]:
    puts, gets = found.puts / found.seconds, found.gets / found.seconds
    asked = max(1, found.hits + found.misses)
    return {
        "servers": servers,
        "tokens_per_second": rounded(found.rate),
        "hit_rate": rounded(found.hits / asked),
        "latency": _two(found.latencies),
        "takeover": _two(found.takeovers),
        "takeovers": len(found.takeovers),
        "puts": rounded(puts),
        "gets": rounded(gets),
        "sent": rounded(found.sent / found.seconds),
        "received": rounded(found.received / found.seconds),
        "dollars_per_hour": rounded(3600 * (puts * DOLLARS_PUT + gets * DOLLARS_GET)),
    }


def _two(values: list[float]) -> list[float]:
    """Median and 99th percentile; nothing of nothing."""
    if not values:
        return []
    ordered = sorted(values)
    return [rounded(median(ordered)), rounded(ordered[int(0.99 * (len(ordered) - 1))])]


def line(found: dict[str, Any]) -> str:
    latency, takeover = (
        " s, ".join(f"{value:.1f}" for value in found[name]) + " s" if found[name] else "-"
        for name in ("latency", "takeover")
    )
    return (
        f"| {found['servers']:,} | {found['tokens_per_second']:,.0f} | {found['hit_rate']:.1%} "
        f"| {latency} | {takeover} | {found['puts']:,.1f}, {found['gets']:,.1f} "
        f"| {found['sent'] / 1e6:,.0f}, {found['received'] / 1e6:,.0f} "
        f"| {found['dollars_per_hour']:,.3g} |"
    )


@click.command()
@click.option("--costs", type=click.Path(exists=True, path_type=Path), required=True)
@click.option("--into", type=click.Path(exists=True, path_type=Path), help="The page's table.")
@out_option
def main(costs: Path, into: Path | None, out: Path | None) -> None:
    """Simulate fleets that cannot be run here."""
    rows = []
    for servers in SERVERS:
        found = Fleet(world(servers), read_costs(costs)).run(SECONDS[servers], WARM)
        rows.append(row(servers, found))
        click.echo(line(rows[-1]))
    if into is not None:
        text = into.read_text(encoding="utf-8")
        before, rest = text.split(BEGIN)
        table = "\n".join([HEADER, *map(line, rows)])
        made = f"{before}{BEGIN}\n\n{table}\n\n{END}{rest.split(END)[1]}"
        write_atomic(into, made.encode())
    write_json(out, {"world": asdict(world(1)), "seconds": SECONDS, "rows": rows})


if __name__ == "__main__":
    main()

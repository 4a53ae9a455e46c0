"""Simulation of fleets of 1 to 1,000 servers.

    python -m benchmarks.fleet.scale --costs docs/results/fleet.json --into docs/fleet.md \
        --out docs/results/fleet_scale.json

Costs are those measured of one server here; each server has such a machine to itself. All other
assumptions are in `world`, and in the table's caption.
"""

import json
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import click

from benchmarks.command import Measurement, check_outputs, out_option
from benchmarks.figures import rounded
from benchmarks.fleet.costs import Costs
from benchmarks.fleet.simulator import Fleet, Lognormal, SimulationResult, World
from kvkeep.errors import InvalidArgument
from kvkeep.evaluate.grid_table import has_section, replace_section
from kvkeep.storage.files.atomic import write_atomic, write_json

SERVERS = (1, 10, 100, 1000)
CLIENTS_PER_SERVER = 30  # clients of a server
SECONDS = {1: 3600.0, 10: 1800.0, 100: 300.0, 1000: 60.0}
WARM_UP = 60.0
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
        clients=CLIENTS_PER_SERVER * servers,
        sessions=True,
        prompt=Lognormal(60.0, 600.0),
        written=Lognormal(120.0, 500.0),
        think=Lognormal(30.0, 300.0),
        http=0.01,
        put=Lognormal(0.030, 0.200),
        get=Lognormal(0.020, 0.150),
        bandwidth=200e6,
        cached=40,
        between_failures=3600.0,
        restart=30.0,
        detect=0.5,
    )


def read_costs(file: Path) -> Costs:
    costs = json.loads(file.read_text(encoding="utf-8"))["costs"]
    for name in ("turns_slower", "steps_slower"):
        costs[name] = {int(count): factor for count, factor in costs[name].items()}
    return Costs(**costs)


def row_json(servers: int, result: SimulationResult) -> dict[str, Any]:
    puts, gets = result.puts / result.seconds, result.gets / result.seconds
    turns = max(1, result.hits + result.misses)
    return {
        "servers": servers,
        "tokens_per_second": rounded(result.rate),
        "hit_rate": rounded(result.hits / turns),
        "latency": _median_and_p99(result.latencies),
        "takeover": _median_and_p99(result.takeovers),
        "takeovers": len(result.takeovers),
        "puts": rounded(puts),
        "gets": rounded(gets),
        "sent": rounded(result.sent / result.seconds),
        "received": rounded(result.received / result.seconds),
        "dollars_per_hour": rounded(3600 * (puts * DOLLARS_PUT + gets * DOLLARS_GET)),
    }


def _median_and_p99(values: list[float]) -> list[float]:
    """Return median and 99th percentile, or an empty list."""
    if not values:
        return []
    ordered = sorted(values)
    return [rounded(median(ordered)), rounded(ordered[int(0.99 * (len(ordered) - 1))])]


def table_row(row: dict[str, Any]) -> str:
    latency, takeover = (
        " s, ".join(f"{value:.1f}" for value in row[name]) + " s" if row[name] else "-"
        for name in ("latency", "takeover")
    )
    return (
        f"| {row['servers']:,} | {row['tokens_per_second']:,.0f} | {row['hit_rate']:.1%} "
        f"| {latency} | {takeover} | {row['puts']:,.1f}, {row['gets']:,.1f} "
        f"| {row['sent'] / 1e6:,.0f}, {row['received'] / 1e6:,.0f} "
        f"| {row['dollars_per_hour']:,.3g} |"
    )


@click.command(cls=Measurement)
@click.option("--costs", type=click.Path(exists=True, path_type=Path), required=True)
@click.option(
    "--into", type=click.Path(exists=True, path_type=Path), help="Page whose table is replaced."
)
@out_option
def main(costs: Path, into: Path | None, out: Path | None) -> None:
    """Simulate fleets that are too large to run here."""
    check_outputs(out, into)
    if into is not None:
        replaced_table(into, [])
    rows = list[dict[str, Any]]()
    for servers in SERVERS:
        result = Fleet(world(servers), read_costs(costs)).run(SECONDS[servers], WARM_UP)
        rows.append(row_json(servers, result))
        write_json(out, {"world": asdict(world(1)), "seconds": SECONDS, "rows": rows})
        click.echo(table_row(rows[-1]))
    if into is not None:
        write_atomic(into, replaced_table(into, rows).encode())


def replaced_table(page: Path, rows: list[dict[str, Any]]) -> str:
    """Return the text of a page with a new table. Raises InvalidArgument without its markers."""
    text = page.read_text(encoding="utf-8")
    if not has_section(text, BEGIN, END):
        raise InvalidArgument(f"{page} must have the lines {BEGIN} and {END}")
    return replace_section(text, BEGIN, END, "\n".join([HEADER, *map(table_row, rows)]))


if __name__ == "__main__":
    main()

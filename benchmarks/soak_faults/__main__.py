"""Simulated users of a server with faults: is anything lost, doubled, mixed up or inexact?

    python -m benchmarks.soak_faults --operations 5000 --out soak-faults.json

Users with two keys create, feed, edit, align, compress, fork, restore, save and delete sessions,
take turns in them, and know after each change what a session must hold. They also ask questions
without a session, whose answers must stay the same. A seeded schedule kills, restarts and stops
the server, fills its disk, makes its store read-only, moves its clock (by libfaketime,
`--clock-library`), takes its memory, and cuts or slows its network. The command ends at the first
violation, with the seed and the operation. With `--fleet`, users send each request to one of two
servers over one store; a fault happens to one of them. With `--object-store`, the store is an S3
server behind such a network.
"""

import shutil
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import click

from benchmarks.command import Measurement, check_outputs, model_option, out_option
from benchmarks.machine import describe_machine
from benchmarks.soak_faults.deployment import Deployment, deployment
from benchmarks.soak_faults.faults import Fault, schedule
from benchmarks.soak_faults.latency import Latencies
from benchmarks.soak_faults.records import Record
from benchmarks.soak_faults.replay import Replayer
from benchmarks.soak_faults.server import KEYS
from benchmarks.soak_faults.users import User
from kvkeep import load_model
from kvkeep.errors import KvkeepError
from kvkeep.models.hub.source import resolve
from kvkeep.storage.files.atomic import write_json


@click.command(cls=Measurement, context_settings={"show_default": True})
@click.option("--operations", default=5000, type=click.IntRange(1), help="Operations in all.")
@click.option("--users", default=6, type=click.IntRange(1), help="Users at the same time.")
@click.option("--fault-every", default=60, type=click.IntRange(2), help="Operations per fault.")
@click.option("--seed", default=1, help="Of the schedule of faults.")
@click.option("--memory", default="60MB", help="The server's memory limit for sessions.")
@click.option(
    "--clock-library",
    metavar="FILE.so",
    type=click.Path(exists=True, path_type=Path),
    help="libfaketimeMT.so.1, to move the server's clock.",
)
@click.option("--replay", is_flag=True, help="Compare saved sessions with lone replays.")
@click.option("--fleet", is_flag=True, help="Two servers over one store, in place of one server.")
@click.option("--object-store", is_flag=True, help="Keep sessions in an S3 server (moto).")
@model_option
@out_option
def soak_faults(
    operations: int,
    users: int,
    fault_every: int,
    seed: int,
    memory: str,
    clock_library: Path | None,
    replay: bool,
    fleet: bool,
    object_store: bool,
    name: str,
    out: Path | None,
) -> None:
    """Let users work on a server with faults; check what every session holds."""
    check_outputs(out)
    if replay and (fleet or object_store):
        raise click.UsageError("--replay reads the files of one server with a folder")
    model, folder = load_model(name), Path(tempfile.mkdtemp(prefix="kvkeep-faults-"))
    record, latencies = Record(operations), Latencies(users)
    replayer = Replayer(model, folder / "store") if replay else None
    path = str(resolve(name, progress=True))
    with deployment(folder, path, memory, clock_library, fleet, object_store) as servers:
        threads = [
            User(n, KEYS[n % 2], servers, record, latencies, model, replayer) for n in range(users)
        ]
        for thread in threads:
            thread.start()
        try:
            faults = schedule(seed, operations, fault_every, servers.kinds)
            applied, resident = _apply_faults(servers, record, latencies, faults)
            while not record.is_over:
                time.sleep(0.05)
            for thread in threads:
                thread.join(0 if record.violations else None)
        finally:
            status = servers.close()
    result = {
        "operations": record.done,
        "faults": {k: n for k, n in applied.items() if k not in servers.skipped},
        "skipped": sorted(servers.skipped),
        "violations": record.violations,
        "went_back_after_kill": record.lost,
        "unanswered": record.unanswered,
        "replayed": record.replayed,
        "hung_without_memory": servers.hung,
        "recovery_seconds": max(latencies.recoveries, default=None),
        "resident": resident,
    }
    settings = {"model": Path(name).name, "users": users, "seed": seed, "every": fault_every}
    settings |= {"fleet": fleet, "object_store": object_store}
    write_json(out, {"machine": asdict(describe_machine()), "settings": settings, **result})
    for key, value in result.items():
        click.echo(f"{key:<22}{value if key != 'resident' else [n // 2**20 for n in resident]}")
    if record.violations or status:
        raise KvkeepError(f"{folder} has the server's log; {status=}; {record.violations[:1]}")
    shutil.rmtree(folder)


def _apply_faults(
    servers: Deployment, record: Record, latencies: Latencies, faults: list[Fault]
) -> tuple[dict[str, int], list[int]]:
    """Apply a schedule, and wait after each fault until users are answered in a normal time.

    Returns the number of faults of each kind, and the servers' resident bytes before each.
    """
    applied, resident = dict[str, int](), list[int]()
    for fault in faults:
        while record.total < fault.at and not record.is_over:
            time.sleep(0.05)
            if (ended := servers.ended()) is not None:
                record.violations.append(f"a server ended by itself, with status {ended}")
        if record.is_over:
            break
        click.echo(f"{record.total:,} operations; {fault.kind}", err=True)
        resident.append(servers.resident_bytes)
        normal = latencies.normal_seconds()
        servers.apply(fault)
        applied[fault.kind] = applied.get(fault.kind, 0) + 1
        if not latencies.wait_for_recovery(normal, lambda: record.is_over):
            late = f"not all users were answered within {normal:.1f} s"
            record.violations.append(f"{late}, a minute after a fault: {fault}")
    return applied, resident


if __name__ == "__main__":
    soak_faults()

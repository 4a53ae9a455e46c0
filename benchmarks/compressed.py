"""What compressing frees: resident memory and file size, before and after.

    python -m benchmarks.compressed --out docs/results/compressed.json

Each ratio is measured in a process of its own: memory that another has freed may still be held.
"""

import dataclasses
import gc
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

import click
import psutil

from benchmarks.apart import run_apart
from benchmarks.command import Measurement, check_outputs, model_option, out_option
from benchmarks.figures import rounded
from benchmarks.machine import describe_machine
from kvkeep import Snapshot, load_model
from kvkeep.evaluate.manual import manual_text
from kvkeep.runtime.memory import trim_heap
from kvkeep.storage.files.atomic import write_json


@dataclass(frozen=True)
class Freed:
    """One reading. rss: of the process, above what it held before it read; file: of a snapshot."""

    ratio: float
    method: str
    tokens: int
    cells_before: int
    cells_after: int
    kv_bytes_before: int
    kv_bytes_after: int
    rss_before: int
    rss_after: int
    file_before: int
    file_after: int
    ms_per_chunk: float


def measure(name: str, tokens: int, ratio: float, method: str) -> Freed:
    """Reads the manual's first tokens, saves, compresses, saves again."""
    process, model = psutil.Process(), load_model(name)
    ids = model.text.encode(manual_text())[:tokens]
    model.session(policy="full").feed(ids[:600])
    model.fingerprint  # noqa: B018 (reads all weights, once)
    start = _resident(process)
    session = model.session(policy="full")
    session.feed(ids)
    rss, before = _resident(process) - start, _file_bytes(session.snapshot())
    report = session.compress(ratio, method)
    rss_after = process.memory_info().rss - start
    times = sorted(chunk.seconds for chunk in report.chunks)
    return Freed(
        ratio=ratio,
        method=method,
        tokens=tokens,
        cells_before=report.cells_before,
        cells_after=report.cells_after,
        kv_bytes_before=report.bytes_before,
        kv_bytes_after=report.bytes_after,
        rss_before=rss,
        rss_after=rss_after,
        file_before=before,
        file_after=_file_bytes(session.snapshot()),
        ms_per_chunk=rounded(1000 * times[len(times) // 2]),
    )


def _resident(process: psutil.Process) -> int:
    """Without what the process has freed already: that would hide what it takes next."""
    gc.collect()
    trim_heap()
    resident: int = process.memory_info().rss
    return resident


def _file_bytes(snapshot: Snapshot) -> int:
    with tempfile.TemporaryDirectory() as folder:
        return snapshot.save(Path(folder) / "session.kvkeep")


def _apart(*asked: object) -> Freed:
    return Freed(**json.loads(run_apart("benchmarks.compressed", "--one", json.dumps(asked))))


@click.command(cls=Measurement, context_settings={"show_default": True})
@model_option
@click.option("--tokens", default=6000)
@click.option("--method", default="fitted")
@out_option
@click.option("--one", hidden=True, help="Measure one ratio in this process.")
def compressed(name: str, tokens: int, method: str, out: Path | None, one: str | None) -> None:
    """Measure what compressing a session frees at ratios 2, 4 and 8."""
    if one is not None:
        print(json.dumps(dataclasses.asdict(measure(*json.loads(one)))))
        return
    check_outputs(out)
    readings = [_apart(name, tokens, ratio, method) for ratio in (2.0, 4.0, 8.0)]
    for each in readings:
        click.echo(
            f"{each.ratio:g}x: {each.cells_before} -> {each.cells_after} cells, keys and values "
            f"{each.kv_bytes_before / 1e6:.1f} -> {each.kv_bytes_after / 1e6:.1f} MB, resident "
            f"{each.rss_before / 1e6:.1f} -> {each.rss_after / 1e6:.1f} MB, file "
            f"{each.file_before / 1e6:.1f} -> {each.file_after / 1e6:.1f} MB, "
            f"{each.ms_per_chunk} ms a chunk"
        )
    machine = dataclasses.asdict(describe_machine())
    write_json(
        out, {"machine": machine, "readings": [dataclasses.asdict(each) for each in readings]}
    )


if __name__ == "__main__":
    compressed()

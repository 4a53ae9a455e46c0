"""Resident memory and file size of a session before and after compression.

    python -m benchmarks.compressed --out docs/results/compressed.json

Each ratio is measured in a new process: memory freed by another may still be resident.
"""

import dataclasses
import gc
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

import click
import psutil

from benchmarks.apart import run_in_new_process
from benchmarks.command import Measurement, ResultFile, model_option, out_option
from benchmarks.figures import rounded
from kvkeep import Snapshot, load_model
from kvkeep.evaluate.haystack import manual_text
from kvkeep.runtime.memory import trim_heap


@dataclass(frozen=True)
class CompressionSavings:
    """One reading. rss: growth of the process since before prefill; file: size of a snapshot."""

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


def measure(name: str, tokens: int, ratio: float, method: str) -> CompressionSavings:
    """Prefill the manual's first tokens, save, compress, save again."""
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
    return CompressionSavings(
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
    """Return resident bytes after returning freed memory to the system."""
    gc.collect()
    trim_heap()
    resident: int = process.memory_info().rss
    return resident


def _file_bytes(snapshot: Snapshot) -> int:
    with tempfile.TemporaryDirectory() as folder:
        return snapshot.save(Path(folder) / "session.kvkeep")


def _measure_in_new_process(*arguments: object) -> CompressionSavings:
    return CompressionSavings(
        **json.loads(run_in_new_process("benchmarks.compressed", "--one", json.dumps(arguments)))
    )


@click.command(cls=Measurement, context_settings={"show_default": True})
@model_option
@click.option("--tokens", default=6000)
@click.option("--method", default="fitted")
@out_option
@click.option("--one", hidden=True, help="Measure one ratio in this process.")
def compressed(name: str, tokens: int, method: str, out: Path | None, one: str | None) -> None:
    """Measure the memory that compressing a session frees at ratios 2, 4 and 8."""
    if one is not None:
        print(json.dumps(dataclasses.asdict(measure(*json.loads(one)))))
        return
    result = ResultFile(out, model=name, tokens=tokens, method=method)
    readings = list[CompressionSavings]()
    for ratio in (2.0, 4.0, 8.0):
        readings.append(reading := _measure_in_new_process(name, tokens, ratio, method))
        result.write(readings=readings)
        click.echo(
            f"{reading.ratio:g}x: {reading.cells_before} -> {reading.cells_after} cells, "
            f"keys and values "
            f"{reading.kv_bytes_before / 1e6:.1f} -> {reading.kv_bytes_after / 1e6:.1f} MB, "
            f"resident {reading.rss_before / 1e6:.1f} -> {reading.rss_after / 1e6:.1f} MB, file "
            f"{reading.file_before / 1e6:.1f} -> {reading.file_after / 1e6:.1f} MB, "
            f"{reading.ms_per_chunk} ms a chunk"
        )


if __name__ == "__main__":
    compressed()

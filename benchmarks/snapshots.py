"""Time and size of snapshots, against evaluating the prompt again and against other formats.

A prompt is evaluated once. Each repeat then saves and loads it in every way in turn, so that a
machine that drifts affects all alike; medians are reported. Files just written are read from the
page cache, not from the disk.
"""

import dataclasses
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import click

from benchmarks.command import Measurement, ResultFile, dtype_option, model_option, out_option
from benchmarks.progress import bar
from benchmarks.snapshots_run import (
    Copy,
    Drift,
    Kvkeep,
    Prefill,
    Progress,
    Way,
    available_peers,
    measure_drift,
)
from kvkeep import load_model
from kvkeep.evaluate.haystack import manual_text
from kvkeep.model import Model
from kvkeep.storage.snapshots.snapshot import Snapshot
from kvkeep.types import DtypeName

OPERATIONS = ("save", "load", "next_token")


@dataclass(frozen=True)
class Result:
    """All timings. repeats: done. int8: None before the last. skipped: missing peers, and why."""

    tokens: int
    repeats: int
    ways: list[Way]
    int8: Drift | None
    skipped: list[str]


def measure_snapshots(
    model: Model,
    ids: list[int],
    following: list[int],
    repeats: int,
    folder: Path,
    gguf: Path | None,
    progress: Progress,
    report: Callable[[Result], None] = lambda result: None,
) -> Result:
    """Measure all ways. ids: the prompt. following: tokens over which drift is measured.

    report: called after each repeat.
    """
    session = model.session(policy="full")
    session.feed(ids, progress=progress)
    uncompressed, *others = (Kvkeep(model, session, folder, c) for c in ("none", "zstd", "int8"))
    peers, skipped = available_peers(session, ids, folder, gguf)
    uncompressed.once()  # warm-up: computes the fingerprint, and writes the file that Copy reads
    uncompressed.way.seconds.clear()
    copy = Copy(folder / "kvkeep-none.kvkeep")
    measured = [uncompressed, *others, copy, *peers, Prefill(model, ids)]
    ways = [contender.way for contender in measured]
    for repeat in range(repeats):
        for contender in measured:
            contender.once()
        progress(len(ids))
        report(Result(len(ids), repeat + 1, ways, None, skipped))
    restored = model.restore(Snapshot.load(folder / "kvkeep-int8.kvkeep"))
    drift = measure_drift(session, restored, following, progress)
    return Result(len(ids), repeats, ways, drift, skipped)


def table(result: Result) -> str:
    """Return the result as text: medians in milliseconds."""
    heads = ("save, ms", "load, ms", "next, ms")
    lines = [f"{'':<34}{'MB':>8}" + "".join(f"{head:>11}" for head in heads)]
    for way in result.ways:
        size = "-" if way.bytes is None else f"{way.bytes / 1e6:.1f}"
        times = [
            f"{median(way.seconds[p]) * 1e3:.1f}" if p in way.seconds else "-" for p in OPERATIONS
        ]
        lines.append(f"{way.name:<34}{size:>8}" + "".join(f"{time:>11}" for time in times))
    if (drift := result.int8) is not None:
        lines.append(
            f"int8, the next {drift.tokens} tokens: logits differ by up to {drift.largest:.3f}, "
            f"KL {drift.kl:.2e}, perplexity {drift.perplexity:.3f} for {drift.perplexity_exact:.3f}"
        )
    return "\n".join(lines + [f"skipped: {reason}" for reason in result.skipped])


@click.command(cls=Measurement, context_settings={"show_default": True})
@click.option("--tokens", default=4096, type=click.IntRange(1), help="Length of the prompt.")
@click.option(
    "--following", default=512, type=click.IntRange(1), help="Tokens over which drift is measured."
)
@click.option("--repeats", default=5, type=click.IntRange(1), help="Repeats of each way.")
@model_option
@dtype_option
@click.option(
    "--gguf",
    metavar="FILE.gguf",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="The same model, for llama.cpp.",
)
@click.option(
    "--folder",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Folder for snapshots; a temporary one by default.",
)
@out_option
def snapshots(
    tokens: int,
    following: int,
    repeats: int,
    name: str,
    dtype: DtypeName,
    gguf: Path | None,
    folder: Path | None,
    out: Path | None,
) -> None:
    """Save and load a long prompt in several ways: time, size, and what int8 costs."""
    file = ResultFile(out, settings={"model": name, "dtype": dtype, "policy": "full"})
    model = load_model(name, dtype=dtype, progress=True)

    def write(result: Result) -> None:
        file.write(**dataclasses.asdict(result))

    ids = model.text.encode(manual_text())[: tokens + following]
    if len(ids) < tokens + following:
        raise click.UsageError(f"the text has only {len(ids)} tokens: ask for fewer")
    steps = tokens * (1 + repeats) + following
    with tempfile.TemporaryDirectory(dir=folder) as place, bar(steps, "snapshots") as progress:
        result = measure_snapshots(
            model, ids[:tokens], ids[tokens:], repeats, Path(place), gguf, progress, write
        )
    click.echo(table(result))
    write(result)


if __name__ == "__main__":
    snapshots()

"""What a snapshot costs and saves, beside evaluating the prompt again and beside others' files.

A prompt is evaluated once. Then each repetition saves and loads it in every way in turn, so that a
drifting machine meets all alike; medians are reported. Files that were just written are read from
the system's cache, not from the disk.
"""

import dataclasses
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import click

from benchmarks.command import Measurement, check_outputs, dtype_option, model_option, out_option
from benchmarks.machine import describe_machine
from benchmarks.progress import bar
from benchmarks.snapshots_run import (
    Copy,
    Drift,
    Kvkeep,
    Prefill,
    Progress,
    Way,
    measure_drift,
    peers,
)
from kvkeep import load_model
from kvkeep.evaluate.manual import manual_text
from kvkeep.model import Model
from kvkeep.storage.files.atomic import write_json
from kvkeep.storage.snapshots.snapshot import Snapshot
from kvkeep.types import DtypeName

PARTS = ("save", "load", "next_token")


@dataclass(frozen=True)
class Result:
    """ways: with all their timings. skipped: peers that are not there, and why."""

    tokens: int
    repeats: int
    ways: list[Way]
    int8: Drift
    skipped: list[str]


def measure_snapshots(
    model: Model,
    ids: list[int],
    following: list[int],
    repeats: int,
    folder: Path,
    gguf: Path | None,
    done: Progress,
) -> Result:
    """ids: the prompt. following: the tokens over which drift is measured."""
    session = model.session(policy="full")
    session.feed(ids, progress=done)
    plain, *others = (Kvkeep(model, session, folder, c) for c in ("none", "zstd", "int8"))
    theirs, skipped = peers(session, ids, folder, gguf)
    plain.once()  # the fingerprint is made once for each process, and there is a file to copy
    plain.way.seconds.clear()
    copy = Copy(folder / "kvkeep-none.kvkeep")
    measured = [plain, *others, copy, *theirs, Prefill(model, ids)]
    for _ in range(repeats):
        for each in measured:
            each.once()
        done(len(ids))
    restored = model.restore(Snapshot.load(folder / "kvkeep-int8.kvkeep"))
    drift = measure_drift(session, restored, following, done)
    return Result(len(ids), repeats, [each.way for each in measured], drift, skipped)


def table(result: Result) -> str:
    """Medians, in milliseconds."""
    heads = ("save, ms", "load, ms", "next, ms")
    lines = [f"{'':<34}{'MB':>8}" + "".join(f"{head:>11}" for head in heads)]
    for way in result.ways:
        size = "-" if way.bytes is None else f"{way.bytes / 1e6:.1f}"
        times = [f"{median(way.seconds[p]) * 1e3:.1f}" if p in way.seconds else "-" for p in PARTS]
        lines.append(f"{way.name:<34}{size:>8}" + "".join(f"{each:>11}" for each in times))
    drift = result.int8
    lines.append(
        f"int8, the next {drift.tokens} tokens: logits differ by up to {drift.largest:.3f}, "
        f"KL {drift.kl:.2e}, perplexity {drift.perplexity:.3f} for {drift.perplexity_exact:.3f}"
    )
    return "\n".join(lines + [f"skipped: {reason}" for reason in result.skipped])


@click.command(cls=Measurement, context_settings={"show_default": True})
@click.option("--tokens", default=4096, type=click.IntRange(1), help="Length of the prompt.")
@click.option("--following", default=512, type=click.IntRange(1), help="Tokens to measure drift.")
@click.option("--repeats", default=5, type=click.IntRange(1), help="Measurements of each way.")
@model_option
@dtype_option
@click.option(
    "--gguf",
    metavar="FILE.gguf",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="The same model for llama.cpp.",
)
@click.option(
    "--folder",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Where snapshots are written; the system's place for temporary files by default.",
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
    check_outputs(out)
    model = load_model(name, dtype=dtype, progress=True)
    ids = model.text.encode(manual_text())[: tokens + following]
    if len(ids) < tokens + following:
        raise click.UsageError(f"the text has only {len(ids)} tokens: ask for fewer")
    machine = describe_machine()
    steps = tokens * (1 + repeats) + following
    with tempfile.TemporaryDirectory(dir=folder) as place, bar(steps, "snapshots") as shown:
        result = measure_snapshots(
            model, ids[:tokens], ids[tokens:], repeats, Path(place), gguf, shown
        )
    click.echo(table(result))
    settings = {"model": name, "dtype": dtype, "policy": "full"}
    write_json(
        out,
        {
            "machine": dataclasses.asdict(machine),
            "settings": settings,
            **dataclasses.asdict(result),
        },
    )


if __name__ == "__main__":
    snapshots()

"""What fewer cells are worth in speed, and what it costs to get there.

    python -m benchmarks.fewer_cells --tokens 4096 --calibration FILE --out fewer-cells.json

Sessions of one text, uncompressed and compressed, write in turn: a machine that drifts meets all
alike. A model that was trained for fewer tokens is told that it was for more:
what it says is then of no worth, what it costs is.
"""

import dataclasses
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import click

from benchmarks.command import Measurement, check_outputs, model_option, out_option
from benchmarks.figures import rounded
from benchmarks.machine import describe_machine
from benchmarks.progress import bar
from kvkeep import Calibration, Session, load_calibration, load_model
from kvkeep.evaluate.docstrings import docstrings_text
from kvkeep.evaluate.manual import manual_text
from kvkeep.evaluate.recall import way
from kvkeep.model import Model
from kvkeep.models.hub.source import pull
from kvkeep.storage.files.atomic import write_json

RATIOS = (2.0, 4.0, 8.0)
IN_TURN = 20  # tokens that one session writes before the next one does


@dataclass(frozen=True)
class Fewer:
    """method, ratio: "none" and 1 of what was not compressed. cells, nbytes: held.

    compress_s: what compressing took; times_reading: the same, by what reading the text took.
    tokens_per_s: written, the median of single tokens. faster: than the uncompressed session.
    """

    method: str
    ratio: float
    cells: int
    nbytes: int
    compress_s: float
    times_reading: float
    tokens_per_s: float = 0.0
    faster: float = 1.0


def measure(
    model: Model,
    tokens: int,
    methods: Sequence[str],
    written: int,
    calibration: Calibration | None = None,
) -> list[Fewer]:
    """Reads a text, compresses forks of the session in each way, and writes with all of them."""
    text = manual_text() + docstrings_text()
    ids = model.text.encode(text)[:tokens]
    model.session(policy="full").feed(ids[:600])
    session = model.session(policy="full")
    begun = time.perf_counter()
    session.feed(ids)
    reading = time.perf_counter() - begun
    sessions, found = [session], [Fewer("none", 1.0, tokens, session.cache.nbytes, 0.0, 0.0)]
    with bar(len(methods) * len(RATIOS) + written, "compressing, writing") as advance:
        for label in methods:
            for ratio in RATIOS:
                fork, (method, budget) = session.fork(), way(label)
                begun = time.perf_counter()
                report = fork.compress(ratio, method, calibration=calibration, budget=budget)
                took = time.perf_counter() - begun
                sessions.append(fork)
                cells, nbytes = report.cells_after, report.bytes_after
                times = rounded(took / reading)
                found.append(Fewer(label, ratio, cells, nbytes, rounded(took), times))
                advance(1)
        speeds = _speeds(sessions, written, advance)
    return [
        dataclasses.replace(each, tokens_per_s=rounded(speed), faster=rounded(speed / speeds[0]))
        for each, speed in zip(found, speeds, strict=True)
    ]


def _speeds(
    sessions: Sequence[Session], written: int, advance: Callable[[int], None]
) -> list[float]:
    """Tokens per second of each.

    They write some tokens each in turn: as in use, what a session reads of its cells may still be
    in the processor's caches when it writes the next token.
    """
    seconds: list[list[float]] = [[] for _ in sessions]
    for first in range(0, written, IN_TURN):
        count = min(IN_TURN, written - first)
        for session, own in zip(sessions, seconds, strict=True):
            for _ in range(count):
                begun = time.perf_counter()
                session.next_token()
                own.append(time.perf_counter() - begun)
        advance(count)
    return [1 / median(own) for own in seconds]


@contextmanager
def _longer(name: str, tokens: int) -> Iterator[Model]:
    """The model, told that it was trained for as many tokens where it was for fewer."""
    model = load_model(name, progress=True)
    if model.spec.max_positions >= tokens:
        yield model
        return
    with tempfile.TemporaryDirectory() as folder:
        there = Path(folder) / "longer"
        shutil.copytree(pull(name, progress=True), there)
        config = json.loads((there / "config.json").read_text())
        config["max_position_embeddings"] = tokens
        (there / "config.json").write_text(json.dumps(config))
        yield load_model(str(there), progress=True)


@click.command(cls=Measurement, context_settings={"show_default": True})
@model_option
@click.option("--tokens", default=4096, type=click.IntRange(1000), help="Read before.")
@click.option("--methods", default="kvzip", help="As NAME[:BUDGET],...")
@click.option("--written", default=60, type=click.IntRange(1), help="Tokens, by each session.")
@click.option("--calibration", type=click.Path(exists=True, path_type=Path), metavar="FILE")
@out_option
def fewer_cells(
    name: str, tokens: int, methods: str, written: int, calibration: Path | None, out: Path | None
) -> None:
    """Measure decoding after compression at ratios 2, 4 and 8, and what compressing costs."""
    check_outputs(out)
    with _longer(name, tokens + 2 * written) as model:
        known = load_calibration(calibration, model) if calibration else None
        found = measure(model, tokens, methods.split(","), written, known)
    for each in found:
        held = f"{each.cells:>7,} cells {each.nbytes / 1e6:>7.1f} MB"
        speed = f"{each.tokens_per_s:>7.1f} tokens/s ({each.faster:.2f}x)"
        cost = f"compressed in {each.compress_s:.2f} s, {each.times_reading:.2f} of reading"
        click.echo(f"{each.method:<14}{each.ratio:>3g}x {held} {speed}, {cost}")
    machine = dataclasses.asdict(describe_machine())
    rows = [dataclasses.asdict(each) for each in found]
    write_json(out, {"machine": machine, "model": name, "tokens": tokens, "readings": rows})


if __name__ == "__main__":
    fewer_cells()

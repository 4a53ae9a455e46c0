"""Decode speed after compression, and the cost of compressing.

    python -m benchmarks.fewer_cells --tokens 4096 --calibration FILE --out fewer-cells.json

Sessions of one text, uncompressed and compressed, decode in turns, so that a machine that drifts
affects all alike. If the text is longer than the model's trained length, the limit is raised: the
generated text is then meaningless, its cost is not.
"""

import dataclasses
import json
import math
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
from kvkeep.evaluate.haystack import docstrings_text, manual_text
from kvkeep.evaluate.recall import parse_method
from kvkeep.model import Model
from kvkeep.models.hub.source import resolve
from kvkeep.storage.files.atomic import write_json

RATIOS = (2.0, 4.0, 8.0)
TURN_TOKENS = 20  # tokens decoded by one session before the next has its turn


@dataclass(frozen=True)
class CompressedSpeed:
    """One session. method, ratio: "none" and 1 if uncompressed. cells, nbytes: held.

    compress_s: seconds to compress; times_reading: relative to the prefill. tokens_per_s: decoded,
    by the median token. faster: speed relative to the uncompressed session.
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
    repeats: int = 1,
) -> list[CompressedSpeed]:
    """Prefill a text, compress a fork of the session in each way, and decode with all of them.

    Times are the best of `repeats`; the methods take turns.
    """
    text = manual_text() + docstrings_text()
    ids = model.text.encode(text)[:tokens]
    model.session(policy="full").feed(ids[:600])
    prefill_seconds = math.inf
    for _ in range(repeats):
        session = model.session(policy="full")
        start = time.perf_counter()
        session.feed(ids)
        prefill_seconds = min(prefill_seconds, time.perf_counter() - start)
    sessions, measured = (
        [session],
        [CompressedSpeed("none", 1.0, tokens, session.cache.nbytes, 0.0, 0.0)],
    )
    with bar(len(methods) * len(RATIOS) * repeats + written, "compress, decode") as advance:
        for ratio in RATIOS:
            for fork, result in _compress(session, ratio, methods, calibration, repeats, advance):
                sessions.append(fork)
                relative = rounded(result.compress_s / prefill_seconds)
                measured.append(dataclasses.replace(result, times_reading=relative))
        speeds = _speeds(sessions, written, advance)
    return [
        dataclasses.replace(result, tokens_per_s=rounded(speed), faster=rounded(speed / speeds[0]))
        for result, speed in zip(measured, speeds, strict=True)
    ]


def _compress(
    session: Session,
    ratio: float,
    methods: Sequence[str],
    calibration: Calibration | None,
    repeats: int,
    advance: Callable[[int], None],
) -> list[tuple[Session, CompressedSpeed]]:
    """Compress forks by each method in turn; return each one's last fork and its best time."""
    results: dict[str, tuple[Session, CompressedSpeed]] = {}
    for _ in range(repeats):
        for label in methods:
            fork, (method, budget) = session.fork(), parse_method(label)
            start = time.perf_counter()
            report = fork.compress(ratio, method, calibration=calibration, budget=budget)
            seconds = time.perf_counter() - start
            if label in results:
                seconds = min(seconds, results[label][1].compress_s)
            cells, nbytes = report.cells_after, report.bytes_after
            speed = CompressedSpeed(label, ratio, cells, nbytes, rounded(seconds), 0.0)
            results[label] = fork, speed
            advance(1)
    return list(results.values())


def _speeds(
    sessions: Sequence[Session], written: int, advance: Callable[[int], None]
) -> list[float]:
    """Return tokens per second of each session.

    Sessions decode several tokens per turn: as in normal use, their cells may still be in the
    processor's caches at the next token.
    """
    seconds: list[list[float]] = [[] for _ in sessions]
    for position in range(0, written, TURN_TOKENS):
        count = min(TURN_TOKENS, written - position)
        for session, session_times in zip(sessions, seconds, strict=True):
            for _ in range(count):
                start = time.perf_counter()
                session.next_token()
                session_times.append(time.perf_counter() - start)
        advance(count)
    return [1 / median(session_times) for session_times in seconds]


@contextmanager
def _with_longer_context(name: str, tokens: int) -> Iterator[Model]:
    """Load the model, with its trained length raised to `tokens` if it is shorter."""
    model = load_model(name, progress=True)
    if model.spec.max_positions >= tokens:
        yield model
        return
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "longer"
        shutil.copytree(resolve(name, progress=True, refresh_hub=True), copy)
        config = json.loads((copy / "config.json").read_text())
        config["max_position_embeddings"] = tokens
        (copy / "config.json").write_text(json.dumps(config))
        yield load_model(str(copy), progress=True)


@click.command(cls=Measurement, context_settings={"show_default": True})
@model_option
@click.option("--tokens", default=4096, type=click.IntRange(1000), help="Tokens to prefill.")
@click.option("--methods", default="kvzip", help="Methods, NAME[:BUDGET],...")
@click.option("--written", default=60, type=click.IntRange(1), help="Tokens decoded per session.")
@click.option("--calibration", type=click.Path(exists=True, path_type=Path), metavar="FILE")
@click.option("--repeats", default=1, type=click.IntRange(1), help="Times are the best of these.")
@out_option
def fewer_cells(
    name: str,
    tokens: int,
    methods: str,
    written: int,
    calibration: Path | None,
    repeats: int,
    out: Path | None,
) -> None:
    """Measure decoding after compression at ratios 2, 4 and 8, and what compressing costs."""
    check_outputs(out)
    with _with_longer_context(name, tokens + 2 * written) as model:
        loaded_calibration = load_calibration(calibration, model) if calibration else None
        labels = methods.split(",")
        measured = measure(model, tokens, labels, written, loaded_calibration, repeats)
    for result in measured:
        held = f"{result.cells:>7,} cells {result.nbytes / 1e6:>7.1f} MB"
        speed = f"{result.tokens_per_s:>7.1f} tokens/s ({result.faster:.2f}x)"
        cost = f"compressed in {result.compress_s:.2f} s, {result.times_reading:.2f} of reading"
        click.echo(f"{result.method:<14}{result.ratio:>3g}x {held} {speed}, {cost}")
    machine = dataclasses.asdict(describe_machine())
    rows = [dataclasses.asdict(result) for result in measured]
    settings = {"model": name, "tokens": tokens, "written": written, "repeats": repeats}
    settings["calibration"] = calibration.name if calibration else None
    write_json(out, {"machine": machine, **settings, "readings": rows})


if __name__ == "__main__":
    fewer_cells()

"""Resident memory over a chat whose turns all have different lengths.

Anything that a library caches per prompt length adds up when lengths differ, as in real chats. The
cells do not grow: the budget is full after the first turns.
"""

import dataclasses
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import click
import psutil

from benchmarks.command import Measurement, check_outputs, dtype_option, model_option, out_option
from benchmarks.figures import rounded
from benchmarks.machine import describe_machine
from benchmarks.progress import bar
from kvkeep import load_model
from kvkeep.evaluate.haystack import manual_text
from kvkeep.model import Model
from kvkeep.storage.files.atomic import write_json
from kvkeep.types import DtypeName

SHORTEST = 5  # tokens of a turn


@dataclass(frozen=True)
class ChatPoint:
    """One reading. rss_bytes: of the process. tokens_per_s: prefill speed since the last."""

    turns: int
    tokens: int
    rss_bytes: int
    tokens_per_s: float


def chat(
    model: Model, turns: int, max_kv_size: int, progress: Callable[[int], None], points: int = 5
) -> list[ChatPoint]:
    """Feed turns of `SHORTEST` tokens and more, each length once, in a fixed random order."""
    lengths = list(range(SHORTEST, SHORTEST + turns))
    random.Random(0).shuffle(lengths)
    ids = model.text.encode(manual_text())
    session, process, measured = model.session(max_kv_size), psutil.Process(), list[ChatPoint]()
    reported_turns = {10, *(turns * (index + 1) // points for index in range(points))}
    start, tokens_since = time.perf_counter(), 0
    for turn, length in enumerate(lengths, 1):
        first = len(session.tokens) % (len(ids) - length)
        session.feed(ids[first : first + length])
        tokens_since += length
        progress(length)
        if turn in reported_turns:
            speed, rss = tokens_since / (time.perf_counter() - start), process.memory_info().rss
            measured.append(ChatPoint(turn, len(session.tokens), rss, rounded(speed)))
            start, tokens_since = time.perf_counter(), 0
    return measured


@click.command(cls=Measurement, context_settings={"show_default": True})
@click.option("--turns", default=250, type=click.IntRange(1), help="Number of turns.")
@click.option("--max-kv-size", default=512, type=click.IntRange(5), help="Budget in cells.")
@model_option
@dtype_option
@out_option
def turns(turns: int, max_kv_size: int, name: str, dtype: DtypeName, out: Path | None) -> None:
    """Print resident memory over the turns of a chat."""
    check_outputs(out)
    model = load_model(name, dtype=dtype, progress=True)
    total = sum(range(SHORTEST, SHORTEST + turns))
    with bar(total, "chat") as shown:
        measured = chat(model, turns, max_kv_size, shown)
    for point in measured:
        click.echo(
            f"{point.turns:>5} turns  {point.rss_bytes / 1e6:>7,.0f} MB  "
            f"{point.tokens_per_s:>6,.0f} tokens/s"
        )
    settings = {"model": name, "dtype": dtype, "max_kv_size": max_kv_size}
    result = {
        "machine": dataclasses.asdict(describe_machine()),
        "settings": settings,
        "points": [dataclasses.asdict(point) for point in measured],
    }
    write_json(out, result)


if __name__ == "__main__":
    turns()

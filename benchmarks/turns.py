"""Whether a chat takes more memory with each turn: one session, turns of which no two are as long.

What a library keeps for each length of a prompt adds up where lengths differ, as they do when
people write. The session's own cells do not grow: its budget is full after the first turns.
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
from kvkeep.evaluate.manual import manual_text
from kvkeep.model import Model
from kvkeep.storage.files.atomic import write_json
from kvkeep.types import DtypeName

SHORTEST = 5  # tokens of a turn


@dataclass(frozen=True)
class Turns:
    """Where a chat stands. rss_bytes: of the process. tokens_per_s: fed since the point before."""

    turns: int
    tokens: int
    rss_bytes: int
    tokens_per_s: float


def chat(
    model: Model, turns: int, max_kv_size: int, done: Callable[[int], None], points: int = 5
) -> list[Turns]:
    """Feeds turns of `SHORTEST` tokens and more, each length once, in an order drawn once."""
    lengths = list(range(SHORTEST, SHORTEST + turns))
    random.Random(0).shuffle(lengths)
    ids = model.text.encode(manual_text())
    session, process, found = model.session(max_kv_size), psutil.Process(), list[Turns]()
    told = {10, *(turns * (index + 1) // points for index in range(points))}
    begun, since = time.perf_counter(), 0
    for turn, length in enumerate(lengths, 1):
        first = len(session.tokens) % (len(ids) - length)
        session.feed(ids[first : first + length])
        since += length
        done(length)
        if turn in told:
            speed, rss = since / (time.perf_counter() - begun), process.memory_info().rss
            found.append(Turns(turn, len(session.tokens), rss, rounded(speed)))
            begun, since = time.perf_counter(), 0
    return found


@click.command(cls=Measurement, context_settings={"show_default": True})
@click.option("--turns", default=250, type=click.IntRange(1), help="Each of a length of its own.")
@click.option("--max-kv-size", default=512, type=click.IntRange(5), help="Of the budget.")
@model_option
@dtype_option
@out_option
def turns(turns: int, max_kv_size: int, name: str, dtype: DtypeName, out: Path | None) -> None:
    """Print resident memory over the turns of a chat."""
    check_outputs(out)
    model = load_model(name, dtype=dtype, progress=True)
    total = sum(range(SHORTEST, SHORTEST + turns))
    with bar(total, "chat") as shown:
        found = chat(model, turns, max_kv_size, shown)
    for each in found:
        click.echo(
            f"{each.turns:>5} turns  {each.rss_bytes / 1e6:>7,.0f} MB  "
            f"{each.tokens_per_s:>6,.0f} tokens/s"
        )
    settings = {"model": name, "dtype": dtype, "max_kv_size": max_kv_size}
    result = {
        "machine": dataclasses.asdict(describe_machine()),
        "settings": settings,
        "points": [dataclasses.asdict(each) for each in found],
    }
    write_json(out, result)


if __name__ == "__main__":
    turns()

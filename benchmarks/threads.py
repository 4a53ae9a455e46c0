"""What it costs to use sessions from several threads, against one after the other.

One thread computes at a time, so nothing is to be won; what is measured is that nothing is lost.
"""

import dataclasses
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import click

from benchmarks.command import Measurement, check_outputs, dtype_option, model_option, out_option
from benchmarks.figures import rounded
from benchmarks.machine import describe_machine
from kvkeep import load_model
from kvkeep.evaluate.manual import manual_text
from kvkeep.files.whole import write_json
from kvkeep.model import Model
from kvkeep.session.session import Session

PROMPT = 200  # tokens of each session


@dataclass(frozen=True)
class Round:
    """Seconds for the same work. ratio: in threads, to one after the other."""

    in_turn: float
    in_threads: float
    ratio: float


def measure(model: Model, sessions: int, tokens: int) -> Round:
    """Each session reads a prompt of its own and writes `tokens`."""
    ids = model.text.encode(manual_text())
    prompts = [ids[index * PROMPT : (index + 1) * PROMPT] for index in range(sessions)]
    begun = time.perf_counter()
    expected = [_written(model.session(512), prompt, tokens) for prompt in prompts]
    in_turn = time.perf_counter() - begun

    made = [model.session(512) for _ in prompts]
    found: dict[int, list[int]] = {}

    def work(index: int) -> None:
        found[index] = _written(made[index], prompts[index], tokens)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(sessions)]
    begun = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    in_threads = time.perf_counter() - begun
    assert [found[index] for index in range(sessions)] == expected
    return Round(rounded(in_turn), rounded(in_threads), rounded(in_threads / in_turn))


def _written(session: Session, prompt: list[int], tokens: int) -> list[int]:
    session.feed(prompt)
    return [session.next_token() for _ in range(tokens)]


@click.command(cls=Measurement, context_settings={"show_default": True})
@click.option("--sessions", default=4, type=click.IntRange(1), help="Each in its thread.")
@click.option("--tokens", default=64, type=click.IntRange(1), help="Written by each.")
@click.option("--rounds", default=5, type=click.IntRange(1), help="Measurements of both ways.")
@model_option
@dtype_option
@out_option
def threads(
    sessions: int, tokens: int, rounds: int, name: str, dtype: str, out: Path | None
) -> None:
    """Print how much longer sessions take in threads than one after the other."""
    check_outputs(out)
    model = load_model(name, dtype=dtype, progress=True)
    found = [measure(model, sessions, tokens) for _ in range(rounds)]
    for each in found:
        click.echo(f"{each.in_turn:.2f} s in turn, {each.in_threads:.2f} s in threads")
    click.echo(f"ratio {median(each.ratio for each in found):.2f}")
    result = {
        "machine": dataclasses.asdict(describe_machine()),
        "settings": {"model": name, "dtype": dtype, "sessions": sessions, "tokens": tokens},
        "rounds": [dataclasses.asdict(each) for each in found],
    }
    write_json(out, result)


if __name__ == "__main__":
    threads()

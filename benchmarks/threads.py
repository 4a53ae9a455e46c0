"""What it costs to use sessions from several threads, against one after the other.

One thread computes at a time, so nothing is to be won; what is measured is that nothing is lost.
Each way has a process of its own, since who computed first in one decides who computes there.
"""

import dataclasses
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import click

from benchmarks.apart import run_apart
from benchmarks.command import Measurement, check_outputs, dtype_option, model_option, out_option
from benchmarks.figures import rounded
from benchmarks.machine import describe_machine
from kvkeep import load_model
from kvkeep.errors import KvkeepError
from kvkeep.evaluate.manual import manual_text
from kvkeep.session.session import Session
from kvkeep.storage.files.atomic import write_json
from kvkeep.types import DtypeName

PROMPT = 200  # tokens of each session
IN_TURN, IN_THREADS, AFTER = "in turn", "in threads", "in threads after one in turn"


@dataclass(frozen=True)
class Round:
    """Seconds for the same work: in one thread, one session after the other; each in a thread; and
    the same after the main thread has computed, too. ratio: in threads, to in turn.
    """

    in_turn: float
    in_threads: float
    after: float
    ratio: float
    ratio_after: float


@dataclass(frozen=True)
class Work:
    """sessions: that read a prompt of their own and write so many tokens each."""

    name: str
    dtype: DtypeName
    sessions: int
    tokens: int


@dataclass(frozen=True)
class Done:
    """written: tokens of each session."""

    seconds: float
    written: list[list[int]]


def measure(work: Work) -> Round:
    found = {way: _apart(work, way) for way in (IN_TURN, IN_THREADS, AFTER)}
    written = [each.written for each in found.values()]
    if written != [written[0]] * len(written):
        raise KvkeepError("sessions wrote other tokens in threads than in turn")
    in_turn, in_threads, after = (each.seconds for each in found.values())
    times = (in_turn, in_threads, after, in_threads / in_turn, after / in_turn)
    return Round(*map(rounded, times))


def _apart(work: Work, way: str) -> Done:
    asked = json.dumps([dataclasses.astuple(work), way])
    return Done(**json.loads(run_apart("benchmarks.threads", "--one", asked)))


def _one(work: Work, way: str) -> Done:
    """Twice, of which the second counts: the first prepares products and reads weights."""
    model = load_model(work.name, dtype=work.dtype)
    ids = model.text.encode(manual_text())
    prompts = [ids[index * PROMPT : (index + 1) * PROMPT] for index in range(work.sessions)]
    written: list[list[int]] = [[] for _ in prompts]

    def write(index: int) -> None:
        written[index] = _written(model.session(512), prompts[index], work.tokens)

    if way == AFTER:
        write(0)
    run = in_turn if way == IN_TURN else in_threads
    seconds = 0.0
    for _ in range(2):
        begun = time.perf_counter()
        run(write, work.sessions)
        seconds = time.perf_counter() - begun
    return Done(seconds, written)


def in_turn(write: Callable[[int], None], count: int) -> None:
    for index in range(count):
        write(index)


def in_threads(write: Callable[[int], None], count: int) -> None:
    threads = [threading.Thread(target=write, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _written(session: Session, prompt: list[int], tokens: int) -> list[int]:
    session.feed(prompt)
    return [session.next_token() for _ in range(tokens)]


@click.command(cls=Measurement, context_settings={"show_default": True})
@click.option("--sessions", default=8, type=click.IntRange(1), help="Each in its thread.")
@click.option("--tokens", default=64, type=click.IntRange(1), help="Written by each.")
@click.option("--rounds", default=5, type=click.IntRange(1), help="Measurements of each way.")
@click.option("--one", hidden=True, help="One way of one round, in this process.")
@model_option
@dtype_option
@out_option
def threads(
    sessions: int,
    tokens: int,
    rounds: int,
    one: str | None,
    name: str,
    dtype: DtypeName,
    out: Path | None,
) -> None:
    """Print how much longer sessions take in threads than one after the other."""
    if one is not None:
        asked, way = json.loads(one)
        click.echo(json.dumps(dataclasses.asdict(_one(Work(*asked), way))))
        return
    check_outputs(out)
    load_model(name, dtype=dtype, progress=True)
    work = Work(name, dtype, sessions, tokens)
    found = [measure(work) for _ in range(rounds)]
    for each in found:
        click.echo(
            f"{each.in_turn:.2f} s {IN_TURN}, {each.in_threads:.2f} s {IN_THREADS}, "
            f"{each.after:.2f} s {AFTER}"
        )
    ratios = [median(each.ratio for each in found), median(each.ratio_after for each in found)]
    click.echo(f"ratio {ratios[0]:.2f}, {ratios[1]:.2f} after one in turn")
    result = {
        "machine": dataclasses.asdict(describe_machine()),
        "settings": dataclasses.asdict(work),
        "rounds": [dataclasses.asdict(each) for each in found],
    }
    write_json(out, result)


if __name__ == "__main__":
    threads()

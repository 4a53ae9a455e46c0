"""Sessions used from several threads, against one after the other.

One thread computes at a time, so threads gain nothing; this measures that they lose nothing. Each
way runs in a new process, since the first thread that computes in a process becomes its compute
worker.
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

from benchmarks.apart import run_in_new_process
from benchmarks.command import Measurement, check_outputs, dtype_option, model_option, out_option
from benchmarks.figures import rounded
from benchmarks.machine import describe_machine
from kvkeep import load_model
from kvkeep.errors import KvkeepError
from kvkeep.evaluate.haystack import manual_text
from kvkeep.session.session import Session
from kvkeep.storage.files.atomic import write_json
from kvkeep.types import DtypeName

PROMPT = 200  # tokens of each session
SEQUENTIAL, THREADED, THREADED_AFTER_MAIN = "in turn", "in threads", "in threads after one in turn"


@dataclass(frozen=True)
class Round:
    """Seconds for the same work: sequentially; in one thread per session; and so after the main
    thread has computed. ratio, ratio_after: relative to `in_turn`.
    """

    in_turn: float
    in_threads: float
    after: float
    ratio: float
    ratio_after: float


@dataclass(frozen=True)
class Workload:
    """A workload: `sessions`, each with its own prompt, that generate `tokens` each."""

    name: str
    dtype: DtypeName
    sessions: int
    tokens: int


@dataclass(frozen=True)
class Output:
    """Result of one run. written: tokens of each session."""

    seconds: float
    written: list[list[int]]


def measure(work: Workload) -> Round:
    outputs = {
        way: _measure_in_new_process(work, way)
        for way in (SEQUENTIAL, THREADED, THREADED_AFTER_MAIN)
    }
    written = [output.written for output in outputs.values()]
    if written != [written[0]] * len(written):
        raise KvkeepError("sessions wrote other tokens in threads than in turn")
    in_turn, in_threads, after = (output.seconds for output in outputs.values())
    times = (in_turn, in_threads, after, in_threads / in_turn, after / in_turn)
    return Round(*map(rounded, times))


def _measure_in_new_process(work: Workload, way: str) -> Output:
    arguments = json.dumps([dataclasses.astuple(work), way])
    return Output(**json.loads(run_in_new_process("benchmarks.threads", "--one", arguments)))


def _run_once(work: Workload, way: str) -> Output:
    """Run a workload twice and report the second run: the first warms up."""
    model = load_model(work.name, dtype=work.dtype)
    ids = model.text.encode(manual_text())
    prompts = [ids[index * PROMPT : (index + 1) * PROMPT] for index in range(work.sessions)]
    written: list[list[int]] = [[] for _ in prompts]

    def write(index: int) -> None:
        written[index] = _generate(model.session(512), prompts[index], work.tokens)

    if way == THREADED_AFTER_MAIN:
        write(0)
    run = run_sequentially if way == SEQUENTIAL else run_in_threads
    seconds = 0.0
    for _ in range(2):
        start = time.perf_counter()
        run(write, work.sessions)
        seconds = time.perf_counter() - start
    return Output(seconds, written)


def run_sequentially(write: Callable[[int], None], count: int) -> None:
    for index in range(count):
        write(index)


def run_in_threads(write: Callable[[int], None], count: int) -> None:
    threads = [threading.Thread(target=write, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _generate(session: Session, prompt: list[int], tokens: int) -> list[int]:
    session.feed(prompt)
    return [session.next_token() for _ in range(tokens)]


@click.command(cls=Measurement, context_settings={"show_default": True})
@click.option(
    "--sessions", default=8, type=click.IntRange(1), help="Number of sessions and threads."
)
@click.option("--tokens", default=64, type=click.IntRange(1), help="Tokens per session.")
@click.option("--rounds", default=5, type=click.IntRange(1), help="Repeats of each way.")
@click.option("--one", hidden=True, help="Run one way once, in this process.")
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
    """Compare sessions in threads with sessions one after the other."""
    if one is not None:
        workload, way = json.loads(one)
        click.echo(json.dumps(dataclasses.asdict(_run_once(Workload(*workload), way))))
        return
    check_outputs(out)
    load_model(name, dtype=dtype, progress=True)
    work = Workload(name, dtype, sessions, tokens)
    rounds_measured = [measure(work) for _ in range(rounds)]
    for round_ in rounds_measured:
        click.echo(
            f"{round_.in_turn:.2f} s {SEQUENTIAL}, {round_.in_threads:.2f} s {THREADED}, "
            f"{round_.after:.2f} s {THREADED_AFTER_MAIN}"
        )
    ratios = [
        median(round_.ratio for round_ in rounds_measured),
        median(round_.ratio_after for round_ in rounds_measured),
    ]
    click.echo(f"ratio {ratios[0]:.2f}, {ratios[1]:.2f} after one in turn")
    result = {
        "machine": dataclasses.asdict(describe_machine()),
        "settings": dataclasses.asdict(work),
        "rounds": [dataclasses.asdict(round_) for round_ in rounds_measured],
    }
    write_json(out, result)


if __name__ == "__main__":
    threads()

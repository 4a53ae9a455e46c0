"""Time until a chat's prompt, and until the first token of a fresh process.

    python -m benchmarks.first_token --rounds 5

Each round starts one process of each kind: `kvkeep chat` at a terminal, until its prompt and until
its model is loaded; `kvkeep generate` for one token; and `import torch` alone.
"""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from benchmarks.command import Measurement, check_outputs, model_option, out_option, write_record
from benchmarks.figures import rounded
from tools.terminal import Terminal

_TIMEOUT_SECONDS = 120


@dataclass(frozen=True)
class Wait:
    """Seconds of one kind of wait: medians and least of all rounds.

    cpu_seconds: of the process and its children until it ended; None for one that is stopped.
    """

    kind: str
    seconds: float
    least_seconds: float
    cpu_seconds: float | None


def chat_seconds(model: str) -> tuple[float, float]:
    """Return the seconds until a chat's prompt, and until its model is loaded."""
    start = time.perf_counter()
    with Terminal("chat", "--model", model) as terminal:
        terminal.wait(">", _TIMEOUT_SECONDS, settles=False)
        prompt = time.perf_counter() - start
        terminal.wait("Ctrl-D ends", _TIMEOUT_SECONDS, settles=False)
        return prompt, time.perf_counter() - start


def process_seconds(command: Sequence[str]) -> tuple[float, float]:
    """Run a command; return its seconds, and those of processor time."""
    start, before = time.perf_counter(), os.times()
    subprocess.run(command, check=True, capture_output=True, timeout=_TIMEOUT_SECONDS)
    after = os.times()
    cpu = after.children_user + after.children_system
    return time.perf_counter() - start, cpu - before.children_user - before.children_system


def measure(model: str, rounds: int) -> list[Wait]:
    """Measure each kind in turn, as often as there are rounds."""
    generate = [sys.executable, "-m", "kvkeep", "generate", "-p", "hello", "-n", "1", "-m", model]
    chats, processes = list[tuple[float, float]](), dict[str, list[tuple[float, float]]]()
    commands = {
        "first token of kvkeep generate": generate,
        "import torch": [sys.executable, "-c", "import torch"],
    }
    for _ in range(rounds):
        chats.append(chat_seconds(model))
        for kind, command in commands.items():
            processes.setdefault(kind, []).append(process_seconds(command))
    kinds = ("prompt of kvkeep chat", "kvkeep chat, loaded")
    waits = [_wait(kind, [each[index] for each in chats], None) for index, kind in enumerate(kinds)]
    for kind, seconds in processes.items():
        waits.append(_wait(kind, [s for s, _ in seconds], [cpu for _, cpu in seconds]))
    return waits


def _wait(kind: str, seconds: Sequence[float], cpu: Sequence[float] | None) -> Wait:
    median: Callable[[Sequence[float]], float] = statistics.median
    cpu_seconds = None if cpu is None else rounded(median(cpu))
    return Wait(kind, rounded(median(seconds)), rounded(min(seconds)), cpu_seconds)


@click.command(cls=Measurement)
@model_option
@click.option("--rounds", default=5, show_default=True)
@out_option
def main(name: str, rounds: int, out: Path | None) -> None:
    """Measure the waits of a user who starts kvkeep."""
    check_outputs(out)
    waits = measure(name, rounds)
    for wait in waits:
        click.echo(str(wait))
    write_record(out, name, rounds=rounds, waits=list(map(asdict, waits)))


if __name__ == "__main__":
    main()

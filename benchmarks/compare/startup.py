"""A fresh process, from nothing to its first token: what a command that is run once costs."""

import subprocess
import sys
from pathlib import Path
from time import perf_counter

from benchmarks import startup as programs
from benchmarks.compare.bench import Bench, Found
from benchmarks.compare.results import Measure, Reading
from benchmarks.peers.base import Setup, Variant
from benchmarks.progress import bar
from kvkeep.errors import KvkeepError

PROGRAMS = Path(programs.__file__).parent


def startup_measures(bench: Bench) -> list[Measure]:
    return [Measure("startup/token", "first token of a fresh process", "s", more=False)]


def startup(bench: Bench) -> Found:
    """The first start of each is not counted: it finds files that are not in memory yet."""
    left, rounds = list(bench.variants), bench.plan.rounds
    with bar((rounds + 1) * len(left), "startup") as shown:
        for index in range(-1, rounds):
            first = index % len(left) if left else 0
            for variant in left[first:] + left[:first]:
                begun = perf_counter()
                done = subprocess.run(
                    program(bench.setup, variant),
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    text=True,
                    check=False,
                )
                seconds = perf_counter() - begun
                shown(1)
                if done.returncode:
                    _give_up(variant, done.stderr, bench.skipped)
                    left.remove(variant)
                elif index >= 0:
                    yield Reading("startup/token", variant.label, index, seconds)


def program(setup: Setup, variant: Variant) -> list[str]:
    """The command line of a variant."""
    if variant.peer == "llama.cpp":
        own = ["with_llama_cpp.py", str(variant.file), str(setup.threads)]
    elif variant.peer == "transformers":
        own = ["with_transformers.py", str(setup.folder), setup.device]
    elif variant.peer == "mlx-lm":
        own = ["with_mlx_lm.py", str(setup.folder)]
    else:
        generate = ["generate", "-p", "hello", "-n", "1", "--quiet", "--temperature", "0"]
        model = ["--model", setup.model, "--device", setup.device]
        return [sys.executable, "-m", "kvkeep", *generate, *model]
    return [sys.executable, str(PROGRAMS / own[0]), *own[1:]]


def _give_up(variant: Variant, said: str, skipped: list[str]) -> None:
    last = (said.strip().splitlines() or ["it said nothing"])[-1]
    if variant.peer == "kvkeep":
        raise KvkeepError(f"{variant.label} does not start: {last}")
    skipped.append(f"{variant.label} does not start: {last}")

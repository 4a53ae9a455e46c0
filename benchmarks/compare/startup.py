"""Time of a new process until its first token."""

import subprocess
import sys
from pathlib import Path
from time import perf_counter

from benchmarks import startup as programs
from benchmarks.compare.bench import Bench, Results
from benchmarks.compare.results import Measure, Reading
from benchmarks.peers.base import Setup, Variant
from benchmarks.progress import bar
from kvkeep.errors import KvkeepError

PROGRAMS = Path(programs.__file__).parent


def startup_measures(bench: Bench) -> list[Measure]:
    return [Measure("startup/token", "first token of a fresh process", "s", more=False)]


def startup(bench: Bench) -> Results:
    """Measure start-up. The first start of each variant warms the page cache and is not counted."""
    bench.describe(bench.variants)
    remaining, rounds = list(bench.variants), bench.plan.rounds
    with bar((rounds + 1) * len(remaining), "startup") as progress:
        for index in range(-1, rounds):
            first = index % len(remaining) if remaining else 0
            for variant in remaining[first:] + remaining[:first]:
                start = perf_counter()
                process = subprocess.run(
                    program(bench.setup, variant),
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    text=True,
                    check=False,
                )
                seconds = perf_counter() - start
                progress(1)
                if process.returncode:
                    _skip(variant, process.stderr, bench.skipped)
                    remaining.remove(variant)
                elif index >= 0:
                    yield Reading("startup/token", variant.label, index, seconds)


def program(setup: Setup, variant: Variant) -> list[str]:
    """Return the command line of a variant."""
    if variant.peer == "llama.cpp":
        script = ["with_llama_cpp.py", str(variant.file), str(setup.threads)]
    elif variant.peer == "transformers":
        script = ["with_transformers.py", str(setup.folder), setup.device]
    elif variant.peer == "mlx-lm":
        script = ["with_mlx_lm.py", str(setup.folder)]
    else:
        generate = ["generate", "-p", "hello", "-n", "1", "--quiet", "--temperature", "0"]
        model = ["--model", setup.model, "--device", setup.device]
        return [sys.executable, "-m", "kvkeep", *generate, *model]
    return [sys.executable, str(PROGRAMS / script[0]), *script[1:]]


def _skip(variant: Variant, stderr: str, skipped: list[str]) -> None:
    last = (stderr.strip().splitlines() or ["no output"])[-1]
    if variant.peer == "kvkeep":
        raise KvkeepError(f"{variant.label} does not start: {last}")
    skipped.append(f"{variant.label} does not start: {last}")

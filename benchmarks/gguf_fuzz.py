"""Compare kvkeep and llama.cpp on random GGUF files: do both load them, with the same logits?

    python -m benchmarks.gguf_fuzz --count 1000 --seed 0 --llama-python /path/to/python

llama.cpp runs in a process of another Python, whose environment has llama-cpp-python. Both compute
in float32 from float32 tensors. Some files also have a metadata field of a wrong type: kvkeep must
load them or raise a KvkeepError. With --keep, files on which the two differ, and those that only
kvkeep refuses, are kept in a folder, named by their seed.
"""

import json
import os
import subprocess
import tempfile
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import click
import numpy as np
from numpy.typing import NDArray

from benchmarks.command import Measurement
from benchmarks.gguf_fuzz_cases import Case, draw
from benchmarks.progress import bar

TOKENS = [(17 * i * i + 5 * i) % 250 for i in range(48)]
_WORKER = Path(__file__).with_name("gguf_fuzz_llama.py")
# Relative to the largest logit. llama.cpp reads GELU from a float16 table.
_TOLERANCE = 2e-3
_GELU_TOLERANCE = 2e-2
_SHOWN_NOTES = 40  # shown at most
_GELU = ("gemma2", "gemma3", "gemma3n", "gemma4")


class Llama:
    """llama.cpp in a child process, restarted after a file crashed it."""

    def __init__(self, python: str, folder: Path) -> None:
        self._python, self._out, self._log = python, folder / "logits.npy", folder / "llama.log"
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def logits(self, path: Path) -> "NDArray[np.float32] | str":
        """Return logits `[len(TOKENS), vocabulary]`, or the error."""
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [self._python, str(_WORKER)],
                # Modules of this folder must not hide those of Python, such as `trace`.
                env=os.environ | {"PYTHONSAFEPATH": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log.open("w"),
                text=True,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        begin = self._log.stat().st_size
        job = {"path": str(path), "tokens": TOKENS, "out": str(self._out)}
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer or json.loads(answer)["error"]:
            if not answer:
                self._process.wait()
            return _error_line(self._log.read_text(errors="replace")[begin:])
        logits = np.load(self._out)
        return logits if np.isfinite(logits).all() else "non-finite logits"


def _error_line(log: str) -> str:
    """Return the line of llama.cpp's log that reports the error."""
    lines = [line for line in log.splitlines() if "error" in line.lower() or "ASSERT" in line]
    return lines[0].strip().rpartition("/src/")[2][-160:] if lines else "ended without a message"


def kvkeep_logits(path: Path, home: Path) -> "NDArray[np.float32] | str":
    """Return kvkeep's logits of the last token of each half of TOKENS, or its error."""
    from kvkeep import load_model
    from kvkeep.errors import KvkeepError

    os.environ["KVKEEP_HOME"] = str(home)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            session = load_model(str(path), dtype="float32").session(policy="full")
        logits = []
        for half in (TOKENS[:24], TOKENS[24:]):
            session.feed(half)
            assert session.logits is not None
            logits.append(session.logits.numpy())
    except KvkeepError as error:
        return f"{type(error).__name__}: {error}".replace(str(path), "FILE")
    return np.stack(logits)


@dataclass
class Tally:
    """Counts of verdicts, and of the notes with them. differing: notes of files that differ."""

    counts: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    differing: list[str] = field(default_factory=list)

    def add(self, verdict: str, note: str = "") -> None:
        self.counts[verdict] += 1
        if note:
            self.notes[f"{verdict}: {note}"] += 1


def damaged(case: Case, seed: int) -> Case:
    """Return the case with one metadata field of a wrong type."""
    random = np.random.default_rng([seed, 1])
    key = str(random.choice(list(case.fields)))
    wrong_values: list[Any] = [-1.5, "text", [1, 2, 3], ["a"], True, float("nan"), 2**31]
    return Case(
        case.architecture,
        case.fields | {key: wrong_values[random.integers(len(wrong_values))]},
        case.tensors,
    )


def judge(case: Case, kvkeep_logits: Any, theirs: Any) -> tuple[str, str]:
    """Compare the results for one file; return a verdict and a note."""
    if isinstance(kvkeep_logits, str):
        return ("both refuse" if isinstance(theirs, str) else "only kvkeep refuses"), kvkeep_logits
    if isinstance(theirs, str):
        return "only llama.cpp refuses", f"{case.architecture}: {theirs}"
    theirs = theirs[[len(TOKENS) // 2 - 1, -1], : kvkeep_logits.shape[1]]
    error = float(np.abs(kvkeep_logits - theirs).max() / np.abs(theirs).max())
    if error <= (_GELU_TOLERANCE if case.architecture in _GELU else _TOLERANCE):
        return "same", ""
    metadata = {key.partition(".")[2]: value for key, value in case.fields.items()}
    return (
        "differ",
        f"{case.architecture} by {error:.2g}: {metadata}, {sorted(set(case.tensors) & _ROPE)}",
    )


_ROPE = {"rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"}


@click.command(cls=Measurement)
@click.option("--count", default=1000, show_default=True, help="Number of files.")
@click.option("--seed", default=0, show_default=True, help="Seed of the first file.")
@click.option("--llama-python", required=True, help="Python with llama-cpp-python.")
@click.option("--keep", type=click.Path(path_type=Path), help="Folder for files that differ.")
@click.option("--one-in", default=10, show_default=True, help="Damage one file in so many.")
def main(count: int, seed: int, llama_python: str, keep: Path | None, one_in: int) -> None:
    """Write random GGUF files, and compare how kvkeep and llama.cpp load them."""
    tally = Tally()
    with (
        tempfile.TemporaryDirectory() as folder,
        Llama(llama_python, Path(folder)) as llama,
        bar(count, "comparing", " files") as advance,
    ):
        for number in range(seed, seed + count):
            case = draw(number)
            if number % one_in == one_in - 1:
                case = damaged(case, number)
            path = Path(folder) / f"{number}.gguf"
            case.write(path)
            with tempfile.TemporaryDirectory() as home:
                verdict, note = judge(case, kvkeep_logits(path, Path(home)), llama.logits(path))
            tally.add(verdict, note if verdict != "differ" else "")
            if verdict == "differ":
                tally.differing.append(f"{number} {note}")
            if keep is not None and verdict in ("differ", "only kvkeep refuses"):
                keep.mkdir(parents=True, exist_ok=True)
                path.rename(keep / path.name)
            path.unlink(missing_ok=True)
            advance(1)
    click.echo("\n".join(f"{number:6} {label}" for label, number in tally.counts.most_common()))
    click.echo(
        "\n".join(f"{number:6} {label}" for label, number in tally.notes.most_common(_SHOWN_NOTES))
    )
    click.echo("\n".join(tally.differing))


if __name__ == "__main__":
    main()

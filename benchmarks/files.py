"""GGUF files read by kvkeep and by llama.cpp in turn: speed, and memory.

    python -m benchmarks.files --out files.json llama-1b-Q4_K_M.gguf llama-1b-Q4_0.gguf

For models that are larger than the default one, in the formats that people have;
`benchmarks.random_gguf` writes such files.
"""

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import click
import torch

from benchmarks.command import Measurement, check_outputs, out_option
from benchmarks.figures import rounded
from benchmarks.machine import describe_machine
from benchmarks.peers.base import About, Setup, Variant
from benchmarks.peers.remote import Remote
from benchmarks.peers.worker_pool import WorkerPool
from benchmarks.progress import bar
from kvkeep.evaluate.manual import manual_text
from kvkeep.files.whole import write_json
from kvkeep.models.source import resolve
from kvkeep.models.text import TextCodec

PROMPT, CONTEXTS, WRITTEN, ROUNDS = 512, (128, 2048), 32, 3


@dataclass(frozen=True)
class Speed:
    """One reader of one file. tokens/s, medians. resident: bytes while it decodes, the most."""

    file: str
    file_bytes: int
    reader: str
    prefill: float
    decode: dict[int, float]
    resident: int


@click.command(cls=Measurement)
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--rounds", default=ROUNDS, show_default=True, type=click.IntRange(min=1))
@click.option("--kvkeep-alone", is_flag=True, help="Without llama.cpp.")
@out_option
def main(files: Sequence[Path], rounds: int, kvkeep_alone: bool, out: Path | None) -> None:
    """Measure reading and writing by GGUF FILES."""
    check_outputs(out)
    found, about = list[Speed](), dict[str, About]()
    for file in files:
        found += measure(file, rounds, kvkeep_alone, about)
    _show(found)
    if out:
        written = {
            "machine": dataclasses.asdict(describe_machine()),
            "readers": {label: dataclasses.asdict(each) for label, each in about.items()},
            "speeds": [dataclasses.asdict(each) for each in found],
        }
        write_json(out, written)


def measure(file: Path, rounds: int, alone: bool, about: dict[str, About]) -> list[Speed]:
    """A round is one context of each reader, which grows from one length to the next."""
    folder, skipped = resolve(str(file), progress=True), list[str]()
    ids = TextCodec.open(folder).encode(manual_text())[: max(PROMPT, *CONTEXTS)]
    setup = Setup(str(file), folder, "cpu", torch.get_num_threads())
    variants = [Variant("kvkeep"), Variant("llama.cpp", None, file)]
    read: dict[str, list[float]] = {}
    written: dict[tuple[str, int], list[float]] = {}
    resident: dict[str, int] = {}
    with WorkerPool(setup, variants[: 1 if alone else 2], skipped, about, patience=600) as pool:
        pool.warm_up(ids, max(CONTEXTS) + len(CONTEXTS) * WRITTEN + 1)
        with bar(rounds * len(pool.remotes) * (1 + len(CONTEXTS)), file.name) as advance:
            for index in range(rounds):
                for remote in pool.turns(index):
                    remote.open(max(CONTEXTS) + len(CONTEXTS) * WRITTEN + 1)
                    read.setdefault(remote.label, []).append(remote.read(ids[:PROMPT]))
                    remote.open(max(CONTEXTS) + len(CONTEXTS) * WRITTEN + 1)
                    advance(1)
                for key, seconds in _decode(pool, index, ids):
                    written.setdefault(key, []).append(seconds)
                    advance(1)
                for remote in pool.remotes:
                    resident[remote.label] = max(resident.get(remote.label, 0), remote.resident())
    for line in skipped:
        print(line, file=sys.stderr)
    return [
        Speed(
            file.name,
            file.stat().st_size,
            label,
            rounded(PROMPT / median(read[label])),
            {c: rounded(1 / median(written[label, c])) for c in CONTEXTS},
            resident[label],
        )
        for label in read
    ]


def _decode(
    pool: WorkerPool, index: int, ids: list[int]
) -> Sequence[tuple[tuple[str, int], float]]:
    """Of each reader and context, the median seconds of a token."""
    held, found = dict[str, int](), []
    for context in CONTEXTS:
        for remote in pool.turns(index):
            found.append(((remote.label, context), _grown(remote, ids, held, context)))
    return found


def _grown(remote: Remote, ids: list[int], held: dict[str, int], context: int) -> float:
    remote.read(ids[held.get(remote.label, 0) : context])
    held[remote.label] = context + WRITTEN
    return median(remote.write(WRITTEN))


def _show(found: Sequence[Speed]) -> None:
    contexts = "".join(f"{f'decode@{c}':>13}" for c in CONTEXTS)
    print(f"{'':<28}{'':<12}{f'prefill {PROMPT}':>12}{contexts}{'resident':>12}{'file':>10}")
    for each in found:
        decode = "".join(f"{speed:>13.1f}" for speed in each.decode.values())
        sizes = f"{each.resident / 1e6:>9,.0f} MB{each.file_bytes / 1e6:>7,.0f} MB"
        print(f"{each.file:<28}{each.reader:<12}{each.prefill:>12.1f}{decode}{sizes}")


if __name__ == "__main__":
    main()

r"""GGUF files read by kvkeep and by llama.cpp in turn: speed, and memory.

    python -m benchmarks.files --out files.json llama-1b-Q4_K_M.gguf llama-1b-Q4_0.gguf

For models that are larger than the default one, in the formats that people have;
`benchmarks.random_gguf` writes such files. Which instructions each uses is said to it: as in

    KVKEEP_ISA=avx2 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 \
      python -m benchmarks.files smollm2-135m-instruct --prompt 512 --prompt 4096 --context 4096

beside a llama.cpp that was built without AVX-512.
"""

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import click
import torch

from benchmarks.command import Measurement, check_outputs, out_option
from benchmarks.figures import rounded
from benchmarks.machine import describe_machine
from benchmarks.peers.base import About, Setup, Variant
from benchmarks.peers.gguf_files import own_file
from benchmarks.peers.remote import Remote
from benchmarks.peers.worker_pool import WorkerPool
from benchmarks.progress import bar
from kvkeep.evaluate.manual import manual_text
from kvkeep.models.hub.source import resolve
from kvkeep.models.text.codec import TextCodec
from kvkeep.storage.files.atomic import write_json

PROMPTS, CONTEXTS, WRITTEN, ROUNDS = (512,), (128, 2048), 32, 3


@dataclass(frozen=True)
class Speed:
    """One reader of one file. tokens/s, medians, of prompts and after contexts of so many tokens.

    resident: bytes while it decodes, the most.
    """

    file: str
    file_bytes: int
    reader: str
    prefill: dict[int, float]
    decode: dict[int, float]
    resident: int


@dataclass(frozen=True)
class Plan:
    """prompts, contexts: their lengths, in tokens, contexts in ascending order."""

    rounds: int
    prompts: Sequence[int]
    contexts: Sequence[int]

    @property
    def most(self) -> int:
        """Tokens that a reader takes in at once."""
        return max(*self.prompts, max(self.contexts) + len(self.contexts) * WRITTEN) + 1


@click.command(cls=Measurement, context_settings={"show_default": True})
@click.argument("files", nargs=-1, required=True)
@click.option("--rounds", default=ROUNDS, type=click.IntRange(min=1))
@click.option(
    "--prompt", "prompts", multiple=True, default=PROMPTS, type=click.IntRange(64), help="Read."
)
@click.option(
    "--context", "contexts", multiple=True, default=CONTEXTS, type=click.IntRange(64), help="Held."
)
@click.option("--kvkeep-alone", is_flag=True, help="Without llama.cpp.")
@out_option
def main(
    files: Sequence[str],
    rounds: int,
    prompts: Sequence[int],
    contexts: Sequence[int],
    kvkeep_alone: bool,
    out: Path | None,
) -> None:
    """Measure reading and writing by GGUF FILES; a known model's name is its own file."""
    check_outputs(out)
    plan = Plan(rounds, prompts, sorted(contexts))
    found, about = list[Speed](), dict[str, About]()
    for file in files:
        found += measure(_found(file), plan, kvkeep_alone, about)
    _show(found, plan)
    if out:
        written = {
            "machine": dataclasses.asdict(describe_machine()),
            "readers": {label: dataclasses.asdict(each) for label, each in about.items()},
            "speeds": [dataclasses.asdict(each) for each in found],
        }
        write_json(out, written)


def _found(file: str) -> Path:
    """Raises ModelError for what is neither a file nor a known model's name."""
    return Path(file) if Path(file).exists() else own_file(file, progress=True)


def measure(file: Path, plan: Plan, alone: bool, about: dict[str, About]) -> list[Speed]:
    """A round is one context of each reader, which grows from one length to the next."""
    folder, skipped = resolve(str(file), progress=True), list[str]()
    ids = TextCodec.open(folder).encode(manual_text())[: plan.most]
    setup = Setup(str(file), folder, "cpu", torch.get_num_threads())
    variants = [Variant("kvkeep"), Variant("llama.cpp", None, file)]
    read: dict[tuple[str, int], list[float]] = {}
    written: dict[tuple[str, int], list[float]] = {}
    resident: dict[str, int] = {}
    readings = len(plan.prompts) + len(plan.contexts)
    with WorkerPool(setup, variants[: 1 if alone else 2], skipped, about, patience=600) as pool:
        pool.warm_up(ids, plan.most)
        with bar(plan.rounds * len(pool.remotes) * readings, file.name) as advance:
            for index in range(plan.rounds):
                for key, seconds in _prefill(pool, index, ids, plan):
                    read.setdefault(key, []).append(seconds)
                    advance(1)
                for key, seconds in _decode(pool, index, ids, plan.contexts):
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
            {n: rounded(n / median(read[label, n])) for n in plan.prompts},
            {n: rounded(1 / median(written[label, n])) for n in plan.contexts},
            resident[label],
        )
        for label in resident
    ]


def _prefill(
    pool: WorkerPool, index: int, ids: list[int], plan: Plan
) -> Iterator[tuple[tuple[str, int], float]]:
    """Of each prompt and reader, the seconds that it takes. Contexts are empty at the end."""
    for length in plan.prompts:
        for remote in pool.turns(index):
            remote.open(plan.most)
            yield (remote.label, length), remote.read(ids[:length])
            remote.open(plan.most)


def _decode(
    pool: WorkerPool, index: int, ids: list[int], contexts: Sequence[int]
) -> Iterator[tuple[tuple[str, int], float]]:
    """Of each context and reader, the median seconds of a token."""
    held = dict[str, int]()
    for context in contexts:
        for remote in pool.turns(index):
            yield (remote.label, context), _grown(remote, ids, held, context)


def _grown(remote: Remote, ids: list[int], held: dict[str, int], context: int) -> float:
    remote.read(ids[held.get(remote.label, 0) : context])
    held[remote.label] = context + WRITTEN
    return median(remote.write(WRITTEN))


def _show(found: Sequence[Speed], plan: Plan) -> None:
    prompts = "".join(f"{f'prefill {n}':>14}" for n in plan.prompts)
    contexts = "".join(f"{f'decode@{n}':>13}" for n in plan.contexts)
    print(f"{'':<34}{'':<12}{prompts}{contexts}{'resident':>12}{'file':>10}")
    for each in found:
        prefill = "".join(f"{speed:>14.1f}" for speed in each.prefill.values())
        decode = "".join(f"{speed:>13.1f}" for speed in each.decode.values())
        sizes = f"{each.resident / 1e6:>9,.0f} MB{each.file_bytes / 1e6:>7,.0f} MB"
        print(f"{each.file:<34}{each.reader:<12}{prefill}{decode}{sizes}")


if __name__ == "__main__":
    main()

r"""Speed and memory of kvkeep, llama.cpp and others on GGUF files, alternately.

    python -m benchmarks.files --out files.json llama-1b-Q4_K_M.gguf llama-1b-Q4_0.gguf

`benchmarks.random_gguf` writes files of larger models than the default one. Instruction sets are
chosen through the environment, for example:

    KVKEEP_ISA=avx2 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 \
      python -m benchmarks.files smollm2-135m-instruct --prompt 512 --prompt 4096 --context 4096

compares AVX2 kernels with a llama.cpp built without AVX-512. Several builds of llama.cpp are
compared by `--llama FOLDER` each. `--beside ik_llama.cpp` needs ik-llama-cpp-python
(`IK_LLAMA_CPP_LIB_PATH` names another build of its library), `--beside openvino` needs
openvino-genai, which converts the files once.
"""

import dataclasses
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import click
import torch

from benchmarks.command import Measurement, ResultFile, out_option
from benchmarks.figures import rounded
from benchmarks.peers.base import About, Setup, Variant
from benchmarks.peers.gguf_files import gguf_file
from benchmarks.peers.remote import Remote
from benchmarks.peers.worker_pool import WorkerPool
from benchmarks.progress import bar
from kvkeep.errors import InvalidArgument
from kvkeep.evaluate.haystack import manual_text
from kvkeep.models.hub.source import resolve
from kvkeep.models.text.codec import TextCodec

PROMPTS, CONTEXTS, DECODE_TOKENS, ROUNDS = (512,), (128, 2048), 32, 3
WARM_UP_TOKENS = 1024  # longer prompts are not warmed up: they would take minutes
ISA_VARIABLES = (
    *("KVKEEP_ISA", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS"),
    *("KVKEEP_PROMPT_BITS", "OMP_NUM_THREADS"),
)


@dataclass(frozen=True)
class Speed:
    """One program with one file. prefill, decode: median tokens/s by prompt or context length.

    resident: bytes of the process at the end of a round, the most of all rounds.
    """

    file: str
    file_bytes: int
    reader: str
    prefill: dict[int, float]
    decode: dict[int, float]
    resident: int


@dataclass(frozen=True)
class Plan:
    """Sizes. prompts, contexts: lengths in tokens; contexts in ascending order."""

    rounds: int
    prompts: Sequence[int]
    contexts: Sequence[int]

    @property
    def most(self) -> int:
        """Context size that is needed, in tokens."""
        return max(*self.prompts, max(self.contexts) + len(self.contexts) * DECODE_TOKENS) + 1


@click.command(cls=Measurement, context_settings={"show_default": True})
@click.argument("files", nargs=-1, required=True)
@click.option("--rounds", default=ROUNDS, type=click.IntRange(min=1))
@click.option(
    "--prompt",
    "prompts",
    multiple=True,
    default=PROMPTS,
    type=click.IntRange(64),
    help="Prompt length; repeatable.",
)
@click.option(
    "--context",
    "contexts",
    multiple=True,
    default=CONTEXTS,
    type=click.IntRange(64),
    help="Context length; repeatable.",
)
@click.option("--kvkeep-alone", is_flag=True, help="Without llama.cpp.")
@click.option(
    "--llama",
    "builds",
    multiple=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder with the libraries of a build of llama.cpp; repeatable.",
)
@click.option(
    "--beside",
    multiple=True,
    type=click.Choice(["ik_llama.cpp", "openvino"]),
    help="Another program that reads the files; repeatable.",
)
@out_option
def main(
    files: Sequence[str],
    rounds: int,
    prompts: Sequence[int],
    contexts: Sequence[int],
    kvkeep_alone: bool,
    builds: Sequence[Path],
    beside: Sequence[str],
    out: Path | None,
) -> None:
    """Measure prefill and decode with GGUF FILES (paths or names of known models)."""
    plan, names = Plan(rounds, prompts, sorted(contexts)), build_names(builds)
    environment = {name: os.environ[name] for name in ISA_VARIABLES if name in os.environ}
    result = ResultFile(out, settings=dataclasses.asdict(plan) | {"environment": environment})
    speeds, versions = list[Speed](), dict[str, About]()
    variants = [Variant("kvkeep"), *(Variant(name) for name in beside)]
    if builds:
        pairs = zip(builds, names, strict=True)
        variants += [Variant("llama.cpp", None, None, *pair) for pair in pairs]
    elif not kvkeep_alone:
        variants.append(Variant("llama.cpp"))
    for file in files:
        speeds += measure(_gguf_path(file), plan, variants, versions)
        result.write(readers=versions, speeds=speeds)
    _show(speeds, plan)


def build_names(builds: Sequence[Path]) -> list[str]:
    """Return the shortest ends of the folders' paths that tell them apart.

    Raises InvalidArgument for a folder that is named twice.
    """
    paths = [Path(os.path.abspath(build)) for build in builds]
    for length in range(1, max((len(path.parts) for path in paths), default=0) + 1):
        names = ["/".join(path.parts[-length:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    if builds:
        raise InvalidArgument("--llama names a folder twice: leave one out")
    return []


def _gguf_path(file: str) -> Path:
    """Return the path of a file. Raises ModelError if it is neither a path nor a known model."""
    return Path(file) if Path(file).exists() else gguf_file(file, progress=True)


def measure(
    file: Path,
    plan: Plan,
    variants: Sequence[Variant],
    versions: dict[str, About],
) -> list[Speed]:
    """Measure one file. In each round, every program grows one context through all lengths."""
    folder, skipped = resolve(str(file), progress=True), list[str]()
    ids = TextCodec.open(folder).encode(manual_text())[: plan.most]
    setup = Setup(str(file), folder, "cpu", torch.get_num_threads())
    variants = [dataclasses.replace(variant, file=file) for variant in variants]
    prefill_seconds: dict[tuple[str, int], list[float]] = {}
    decode_seconds: dict[tuple[str, int], list[float]] = {}
    resident: dict[str, int] = {}
    steps = len(plan.prompts) + len(plan.contexts)
    with WorkerPool(setup, variants, skipped, versions, patience=600) as pool:
        pool.warm_up(ids, plan.most)
        _warm_up_prefill(pool, ids, plan)
        with bar(plan.rounds * len(pool.remotes) * steps, file.name) as advance:
            for index in range(plan.rounds):
                for key, seconds in _prefill(pool, index, ids, plan):
                    prefill_seconds.setdefault(key, []).append(seconds)
                    advance(1)
                for key, seconds in _decode(pool, index, ids, plan.contexts):
                    decode_seconds.setdefault(key, []).append(seconds)
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
            {n: rounded(n / median(prefill_seconds[label, n])) for n in plan.prompts},
            {n: rounded(1 / median(decode_seconds[label, n])) for n in plan.contexts},
            resident[label],
        )
        for label in resident
    ]


def _warm_up_prefill(pool: WorkerPool, ids: list[int], plan: Plan) -> None:
    """Prefill the shorter prompts once, since some programs compile a step for each length."""
    for length in plan.prompts:
        for remote in pool.turns(0) if length <= WARM_UP_TOKENS else ():
            remote.open(plan.most)
            remote.read(ids[:length])
            remote.open(plan.most)


def _prefill(
    pool: WorkerPool, index: int, ids: list[int], plan: Plan
) -> Iterator[tuple[tuple[str, int], float]]:
    """Yield the prefill seconds of each program and prompt. Contexts are empty at the end."""
    for length in plan.prompts:
        for remote in pool.turns(index):
            remote.open(plan.most)
            yield (remote.label, length), remote.read(ids[:length])
            remote.open(plan.most)


def _decode(
    pool: WorkerPool, index: int, ids: list[int], contexts: Sequence[int]
) -> Iterator[tuple[tuple[str, int], float]]:
    """Yield the median seconds per token of each program and context."""
    tokens_held = dict[str, int]()
    for context in contexts:
        for remote in pool.turns(index):
            yield (remote.label, context), _extend_and_decode(remote, ids, tokens_held, context)


def _extend_and_decode(
    remote: Remote, ids: list[int], tokens_held: dict[str, int], context: int
) -> float:
    remote.read(ids[tokens_held.get(remote.label, 0) : context])
    tokens_held[remote.label] = context + DECODE_TOKENS
    return median(remote.write(DECODE_TOKENS))


def _show(speeds: Sequence[Speed], plan: Plan) -> None:
    prompts = "".join(f"{f'prefill {n}':>14}" for n in plan.prompts)
    contexts = "".join(f"{f'decode@{n}':>13}" for n in plan.contexts)
    print(f"{'':<34}{'':<18}{prompts}{contexts}{'resident':>12}{'file':>10}")
    for row in speeds:
        prefill = "".join(f"{speed:>14.1f}" for speed in row.prefill.values())
        decode = "".join(f"{speed:>13.1f}" for speed in row.decode.values())
        sizes = f"{row.resident / 1e6:>9,.0f} MB{row.file_bytes / 1e6:>7,.0f} MB"
        print(f"{row.file:<34}{row.reader:<18}{prefill}{decode}{sizes}")


if __name__ == "__main__":
    main()

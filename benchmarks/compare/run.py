"""A run of the comparison, part by part; a run that ends early keeps its results."""

import dataclasses
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks.compare.bench import Bench, Results
from benchmarks.compare.decode import decode, decode_measures
from benchmarks.compare.endless import endless, endless_measures
from benchmarks.compare.memory import memory, memory_measures
from benchmarks.compare.plan import PARTS, Plan
from benchmarks.compare.prefill import prefill, prefill_measures
from benchmarks.compare.results import Measure, Result, Trace
from benchmarks.compare.startup import startup, startup_measures
from benchmarks.compare.steps import steps, steps_measures
from benchmarks.machine import describe_machine
from benchmarks.peers.available import find_variants
from benchmarks.peers.base import DTYPE, Setup
from benchmarks.peers.unpacked import unpacked_folder
from kvkeep.errors import InvalidArgument, KvkeepError
from kvkeep.evaluate.haystack import manual_text
from kvkeep.models.hub.source import resolve
from kvkeep.models.spec.config import read_spec
from kvkeep.models.text.codec import TextCodec

PARTS_BY_NAME: dict[str, tuple[Callable[[Bench], list[Measure]], Callable[[Bench], Results]]] = {
    "prefill": (prefill_measures, prefill),
    "steps": (steps_measures, steps),
    "decode": (decode_measures, decode),
    "endless": (endless_measures, endless),
    "memory": (memory_measures, memory),
    "startup": (startup_measures, startup),
}


@dataclasses.dataclass(frozen=True)
class BenchmarkOptions:
    """Options of the command. gguf: file for llama.cpp; None: the model's own."""

    parts: Sequence[str]
    peers: Sequence[str]
    model: str
    device: str
    gguf: Path | None
    plan: Plan
    quick: bool


def prepare(options: BenchmarkOptions, folder: Path) -> Bench:
    """Fetch all files and find the variants. Raises KvkeepError if nothing can be measured."""
    source = resolve(options.model, progress=True)
    ids = TextCodec.open(source).encode(manual_text())
    trained = read_spec(source).max_positions
    if min(trained, len(ids)) < options.plan.longest:
        raise InvalidArgument(
            f"the benchmark makes contexts of {options.plan.longest:,} tokens; {options.model} is "
            f"trained for {trained:,} and the text has {len(ids):,}: try --quick, or another model"
        )
    needs_unpacked = {"transformers", "mlx-lm"} & {*options.peers}
    model_folder = unpacked_folder(source, progress=True) if needs_unpacked else source
    setup = Setup(options.model, model_folder, options.device, torch.get_num_threads())
    variants, skipped = find_variants(list(options.peers), setup, options.gguf, progress=True)
    if not variants:
        raise InvalidArgument(f"there is nothing to measure: {'; '.join(skipped)}")
    return Bench(setup, options.plan, ids, variants, folder, skipped)


def run_benchmark(
    options: BenchmarkOptions, starting: Callable[[str], None] = lambda part: None
) -> Result:
    """Measure all parts. Ctrl-C, or a peer that fails, ends the run with the results so far.

    starting: called with the name of each part.
    """
    with tempfile.TemporaryDirectory(prefix="kvkeep-bench-") as folder:
        bench = prepare(options, Path(folder))
        parts = [part for part in PARTS if part in options.parts]
        measures = [measure for part in parts for measure in PARTS_BY_NAME[part][0](bench)]
        machine = dataclasses.asdict(describe_machine())
        result = Result(machine, _settings(options), measures, options.quick, skipped=bench.skipped)
        try:
            for part in parts:
                starting(part)
                for value in PARTS_BY_NAME[part][1](bench):
                    target = result.traces if isinstance(value, Trace) else result.readings
                    target.append(value)  # type: ignore[arg-type]
            result.ended = "whole"
        except KeyboardInterrupt:
            result.ended = "interrupted"
        except KvkeepError as error:
            result.ended = str(error)
        result.about = {
            label: dataclasses.asdict(measure) for label, measure in bench.about.items()
        }
    return result


def _settings(options: BenchmarkOptions) -> dict[str, object]:
    settings = {"model": options.model, "device": options.device, "dtype": DTYPE}
    return {**settings, **dataclasses.asdict(options.plan)}

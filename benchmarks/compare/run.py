"""A whole run: part after part, with whatever was found kept when it ends early."""

import dataclasses
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks.compare.bench import Bench, Found
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
from benchmarks.peers.unpacked import unpacked
from kvkeep.errors import InvalidArgument, KvkeepError
from kvkeep.evaluate.haystack import manual_text
from kvkeep.models.hub.source import resolve
from kvkeep.models.spec.config import read_spec
from kvkeep.models.text.codec import TextCodec

MEASURING: dict[str, tuple[Callable[[Bench], list[Measure]], Callable[[Bench], Found]]] = {
    "prefill": (prefill_measures, prefill),
    "steps": (steps_measures, steps),
    "decode": (decode_measures, decode),
    "endless": (endless_measures, endless),
    "memory": (memory_measures, memory),
    "startup": (startup_measures, startup),
}


@dataclasses.dataclass(frozen=True)
class Asked:
    """What the user asked for. gguf: llama.cpp's file; None for the model's own."""

    parts: Sequence[str]
    peers: Sequence[str]
    model: str
    device: str
    gguf: Path | None
    plan: Plan
    quick: bool


def prepare(asked: Asked, folder: Path) -> Bench:
    """Fetches what is to be fetched. Raises KvkeepError for what cannot be measured at all."""
    where = resolve(asked.model, progress=True)
    ids = TextCodec.open(where).encode(manual_text())
    trained = read_spec(where).max_positions
    if min(trained, len(ids)) < asked.plan.longest:
        raise InvalidArgument(
            f"the benchmark makes contexts of {asked.plan.longest:,} tokens; {asked.model} is "
            f"trained for {trained:,} and the text has {len(ids):,}: try --quick, or another model"
        )
    plain = unpacked(where, progress=True) if {"transformers", "mlx-lm"} & {*asked.peers} else where
    setup = Setup(asked.model, plain, asked.device, torch.get_num_threads())
    variants, skipped = find_variants(list(asked.peers), setup, asked.gguf, progress=True)
    if not variants:
        raise InvalidArgument(f"there is nothing to measure: {'; '.join(skipped)}")
    return Bench(setup, asked.plan, ids, variants, folder, skipped)


def run_benchmark(asked: Asked, starting: Callable[[str], None] = lambda part: None) -> Result:
    """Every part in its turn. Ctrl-C or a peer that fails ends it with what there is.

    starting: is told of each part.
    """
    with tempfile.TemporaryDirectory(prefix="kvkeep-bench-") as folder:
        bench = prepare(asked, Path(folder))
        parts = [part for part in PARTS if part in asked.parts]
        measures = [each for part in parts for each in MEASURING[part][0](bench)]
        machine = dataclasses.asdict(describe_machine())
        result = Result(machine, _settings(asked), measures, asked.quick, skipped=bench.skipped)
        try:
            for part in parts:
                starting(part)
                for found in MEASURING[part][1](bench):
                    kind = result.traces if isinstance(found, Trace) else result.readings
                    kind.append(found)  # type: ignore[arg-type]
            result.ended = "whole"
        except KeyboardInterrupt:
            result.ended = "interrupted"
        except KvkeepError as error:
            result.ended = str(error)
        result.about = {label: dataclasses.asdict(each) for label, each in bench.about.items()}
    return result


def _settings(asked: Asked) -> dict[str, object]:
    settings = {"model": asked.model, "device": asked.device, "dtype": DTYPE}
    return {**settings, **dataclasses.asdict(asked.plan)}

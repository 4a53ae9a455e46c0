"""One prefill, measured by the process that it runs in; `benchmarks.prefill` starts it.

A process measures once: memory that an earlier prefill has freed may still belong to it, and would
hide what the next one takes.
"""

import dataclasses
import gc
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import psutil

from benchmarks.apart import run_apart
from benchmarks.figures import rounded
from kvkeep import load_model
from kvkeep.evaluate.manual import manual_text
from kvkeep.runtime.memory import peak_rss
from kvkeep.types import DtypeName, PolicyName


@dataclass(frozen=True)
class Way:
    """How a prompt is read. budget: the most cells held; None to hold them all."""

    prefill_step: int
    budget: int | None = None


@dataclass(frozen=True)
class Prefill:
    """One reading, of one way.

    peak_bytes: the most that the process held above what it held with the weights in memory, keys
    and values included. kv_bytes: those alone.
    """

    prefill_step: int
    budget: int | None
    tokens: int
    seconds: float
    tokens_per_s: float
    peak_bytes: int
    kv_bytes: int


def measure_prefill(name: str, dtype: DtypeName, tokens: int, way: Way) -> Prefill:
    """Reads the first `tokens` of the manual: policy `full`, or `sliding` on a budget."""
    model = load_model(name, dtype=dtype)
    ids = model.text.encode(manual_text())[:tokens]
    # All weights are in memory before: they are mapped, and a row of the embedding would come with
    # the first token that needs it. A few tokens make the kernels, without taking room that the
    # measured prefill could use again.
    model.fingerprint  # noqa: B018 (reads all weights)
    model.session(policy="full").feed(ids[:8])
    policy: PolicyName = "full" if way.budget is None else "sliding"
    session = model.session(way.budget, policy=policy, prefill_step=way.prefill_step)
    gc.collect()
    _forget_peak()
    before = psutil.Process().memory_info().rss
    report = session.feed(ids)
    return Prefill(
        prefill_step=way.prefill_step,
        budget=way.budget,
        tokens=report.tokens,
        seconds=rounded(report.seconds),
        tokens_per_s=rounded(report.tokens_per_second),
        peak_bytes=peak_rss() - before,
        kv_bytes=session.cache.nbytes,
    )


def measure_apart(name: str, dtype: DtypeName, tokens: int, way: Way) -> Prefill:
    """As `measure_prefill`, in a process of its own.

    Raises KvkeepError if that process fails; what it said went to standard error.
    """
    asked = [name, dtype, str(tokens), json.dumps(dataclasses.asdict(way))]
    return Prefill(**json.loads(run_apart("benchmarks.one_prefill", *asked)))


def _forget_peak() -> None:
    """Loading may have peaked higher than a prefill will. Elsewhere than on Linux it counts."""
    if sys.platform == "linux":
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


if __name__ == "__main__":
    model_name, dtype_name, length, asked_way = sys.argv[1:]
    way_given = Way(**json.loads(asked_way))
    measured = measure_prefill(model_name, cast(DtypeName, dtype_name), int(length), way_given)
    print(json.dumps(dataclasses.asdict(measured)))

"""One prefill, measured in its own process, which `benchmarks.prefill` starts.

A process measures once: memory freed by an earlier prefill may still be resident and would hide
what the next one allocates.
"""

import dataclasses
import gc
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import psutil

from benchmarks.apart import run_in_new_process
from benchmarks.figures import rounded
from kvkeep import load_model
from kvkeep.evaluate.haystack import manual_text
from kvkeep.runtime.memory import peak_rss_bytes
from kvkeep.types import DtypeName, PolicyName


@dataclass(frozen=True)
class Way:
    """The settings of a prefill. budget: maximum cells held; None: all."""

    prefill_step: int
    budget: int | None = None


@dataclass(frozen=True)
class Prefill:
    """One reading.

    peak_bytes: peak resident memory above that with only the weights loaded, keys and values
    included. kv_bytes: keys and values alone.
    """

    prefill_step: int
    budget: int | None
    tokens: int
    seconds: float
    tokens_per_s: float
    peak_bytes: int
    kv_bytes: int


def measure_prefill(name: str, dtype: DtypeName, tokens: int, way: Way) -> Prefill:
    """Prefill the first `tokens` of the manual: policy `full`, or `sliding` with a budget."""
    model = load_model(name, dtype=dtype)
    ids = model.text.encode(manual_text())[:tokens]
    # Load all weights first: they are memory-mapped, and an embedding row would otherwise be read
    # with its first token. A few tokens warm up, without leaving memory that the measured prefill
    # could reuse.
    model.fingerprint  # noqa: B018 (reads all weights)
    model.session(policy="full").feed(ids[:8])
    policy: PolicyName = "full" if way.budget is None else "sliding"
    session = model.session(way.budget, policy=policy, prefill_step=way.prefill_step)
    gc.collect()
    _reset_peak_memory()
    before = psutil.Process().memory_info().rss
    report = session.feed(ids)
    return Prefill(
        prefill_step=way.prefill_step,
        budget=way.budget,
        tokens=report.tokens,
        seconds=rounded(report.seconds),
        tokens_per_s=rounded(report.tokens_per_second),
        peak_bytes=peak_rss_bytes() - before,
        kv_bytes=session.cache.nbytes,
    )


def measure_in_new_process(name: str, dtype: DtypeName, tokens: int, way: Way) -> Prefill:
    """Run `measure_prefill` in a new process.

    Raises KvkeepError if that process fails; its standard error is passed through.
    """
    arguments = [name, dtype, str(tokens), json.dumps(dataclasses.asdict(way))]
    return Prefill(**json.loads(run_in_new_process("benchmarks.one_prefill", *arguments)))


def _reset_peak_memory() -> None:
    """Reset the peak, which loading may have set. Only Linux can; elsewhere loading counts."""
    if sys.platform == "linux":
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


if __name__ == "__main__":
    model_name, dtype_name, length, way_json = sys.argv[1:]
    requested_way = Way(**json.loads(way_json))
    measured = measure_prefill(model_name, cast(DtypeName, dtype_name), int(length), requested_way)
    print(json.dumps(dataclasses.asdict(measured)))

"""Shared state of the parts of a benchmark."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.compare.plan import Plan
from benchmarks.compare.results import Reading, Trace
from benchmarks.peers.base import About, Setup, Variant
from benchmarks.peers.worker_pool import WorkerPool

Results = Iterator[Reading | Trace]


@dataclass(frozen=True)
class Bench:
    """ids: a real text, long enough for the plan. folder: for temporary files. skipped: collects a
    line for everything left out. about: collects version and settings of each variant.
    """

    setup: Setup
    plan: Plan
    ids: list[int]
    variants: Sequence[Variant]
    folder: Path
    skipped: list[str]
    about: dict[str, About] = field(default_factory=dict)

    def pool(self) -> WorkerPool:
        return WorkerPool(self.setup, self.variants, self.skipped, self.about, self.plan.patience)

    def describe(self, variants: Sequence[Variant]) -> None:
        """Fill in the version and settings of variants that no part has started in a pool."""
        missing = [variant for variant in variants if variant.label not in self.about]
        with self.only(missing).pool():
            pass

    def only(self, variants: Sequence[Variant]) -> "Bench":
        return replace(self, variants=variants)

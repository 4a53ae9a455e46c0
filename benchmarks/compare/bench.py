"""What every part of a benchmark works with."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.compare.plan import Plan
from benchmarks.compare.results import Reading, Trace
from benchmarks.peers.base import About, Setup, Variant
from benchmarks.peers.worker_pool import WorkerPool

Found = Iterator[Reading | Trace]


@dataclass(frozen=True)
class Bench:
    """ids: a real text, long enough for the plan. folder: for files that last as long as the run.
    skipped: gets a line for whatever is left out, and about what each variant says of itself.
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

    def only(self, variants: Sequence[Variant]) -> "Bench":
        return replace(self, variants=variants)

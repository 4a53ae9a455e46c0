"""Tokens without end on a fixed budget: the same cost for ever?

Each variant reads a text that fills its budget, and writes on. They take turns in blocks, so that
a machine that drifts meets all of them alike.
"""

from collections.abc import Iterator
from statistics import median

from benchmarks.compare.bench import Bench, Found
from benchmarks.compare.plan import KEEP
from benchmarks.compare.results import Measure, Reading, Trace
from benchmarks.figures import rounded
from benchmarks.peers.base import Variant
from benchmarks.peers.remote import Remote
from benchmarks.peers.worker_pool import WorkerPool
from benchmarks.progress import bar

WARMING = 100  # first tokens, among which no slowest one is looked for
FEW = 8
TRIAL = 32  # tokens
REREADING = ("transformers",)  # evaluate their window anew where others forget


def endless_measures(bench: Bench) -> list[Measure]:
    plan = bench.plan
    group, budget = plan.group, f"on {plan.budget:,} cells"
    return [
        Measure("endless/speed", f"write without end {budget}", "tokens/s", more=True),
        Measure("endless/early", f"median, tokens {group:,} to {2 * group:,}", "ms", more=False),
        Measure("endless/late", f"median, last {group:,} of {plan.endless:,}", "ms", more=False),
        Measure("endless/growth", "last against early", "x", more=False),
        Measure("endless/slowest", "slowest token against the median", "x", more=False),
        Measure("endless/held", "memory above the weights", "MB", more=False),
    ]


def endless(bench: Bench) -> Found:
    """One round. Of a peer's variants, the one that is fastest on a full budget goes on."""
    plan = bench.plan
    with bench.only(_fastest(bench)).pool() as pool:
        empty = {remote: _held_empty(remote, bench.ids) for remote in pool.turns(0)}
        pool.warm_up(bench.ids, plan.budget)
        runs = {
            remote: _begin(pool, remote, bench, empty[remote])
            for remote in pool.turns(0, plan.budget)
        }
        with bar(sum(run.wanted for run in runs.values()), "endless") as shown:
            for index in range(-(-plan.endless // plan.block)):
                for remote in pool.turns(index, among=[r for r in runs if runs[r].left]):
                    shown(runs[remote].go_on(plan.block))
    for run in runs.values():
        yield run.trace()
        yield from run.readings(plan.group, plan.endless)


def _held_empty(remote: Remote, ids: list[int]) -> int:
    """Bytes held with the weights in memory and kernels made, by a few tokens that take no room.

    Twice, since settling also takes what every token needs again.
    """
    for _ in range(2):
        remote.settle()
        remote.open(2 * FEW)
        remote.read(ids[:FEW])
        remote.close()
    return remote.held()


def _begin(pool: WorkerPool, remote: Remote, bench: Bench, empty: int) -> "_Run":
    """A full budget, from which the run goes on."""
    plan, wanted = bench.plan, bench.plan.endless
    expected = pool.writing(remote) * plan.endless
    if remote.variant.peer in REREADING or expected > plan.endless_patience:
        wanted //= plan.shorter
        line = f"{remote.label}: wrote {wanted:,} endless tokens, not {plan.endless:,}"
        bench.skipped.append(line)
    remote.open_endless(plan.budget, KEEP)
    remote.read(bench.ids[: plan.budget])
    return _Run(remote, wanted, empty)


def _fastest(bench: Bench) -> list[Variant]:
    """One variant of each peer, by a short trial where there are several."""
    peers = list(dict.fromkeys(each.peer for each in bench.variants))
    several = [p for p in peers if sum(v.peer == p for v in bench.variants) > 1]
    tried: dict[str, float] = {}
    contested = [each for each in bench.variants if each.peer in several]
    if contested:
        with bench.only(contested).pool() as pool:
            pool.warm_up(bench.ids, bench.plan.budget)
            for remote in pool.turns(0):
                remote.open_endless(bench.plan.budget, KEEP)
                remote.read(bench.ids[: bench.plan.budget])
                tried[remote.label] = median(remote.write(TRIAL))
    alone = [each for each in bench.variants if each.peer not in several]
    best = [
        min(mine, key=lambda each: tried[each.label])
        for peer in several
        if (mine := [v for v in contested if v.peer == peer and v.label in tried])
    ]
    return sorted(alone + best, key=lambda each: peers.index(each.peer))


class _Run:
    """One variant's run, as far as it has come.

    wanted: tokens that it is to write. empty: bytes held before there was a context.
    """

    def __init__(self, remote: Remote, wanted: int, empty: int):
        self.remote, self.wanted, self._empty = remote, wanted, empty
        self.seconds: list[float] = []
        self._blocks: list[tuple[int, float, float, int]] = []

    @property
    def left(self) -> int:
        """Tokens that are still to be written."""
        return self.wanted - len(self.seconds)

    def go_on(self, block: int) -> int:
        """Writes the next block; how many tokens that were."""
        new = self.remote.write(min(block, self.left))
        self.seconds += new
        held = self.remote.held() - self._empty
        milliseconds = (rounded(median(new) * 1e3), rounded(max(new) * 1e3))
        self._blocks.append((len(self.seconds), *milliseconds, held))
        return len(new)

    def trace(self) -> Trace:
        tokens, medians, slowest, held = zip(*self._blocks, strict=True)
        return Trace(self.remote.label, list(tokens), list(medians), list(slowest), list(held))

    def readings(self, group: int, whole: int) -> Iterator[Reading]:
        """Medians of groups only of a run of the `whole` length."""
        found = {"speed": len(self.seconds) / sum(self.seconds)}
        if len(self.seconds) == whole:
            found["early"] = median(self.seconds[group : 2 * group]) * 1e3
            found["late"] = median(self.seconds[-group:]) * 1e3
            found["growth"] = found["late"] / found["early"]
        warm = self.seconds[min(WARMING, len(self.seconds) // 2) :]
        found["slowest"] = max(warm) / median(self.seconds)
        found["held"] = self._blocks[-1][3] / 1e6
        for key, value in found.items():
            yield Reading(f"endless/{key}", self.remote.label, 0, value)

"""Endless generation in a fixed budget: time per token, growth and memory.

Each variant prefills a text that fills its budget, and generates. Variants take turns in blocks, so
that a machine that drifts affects all alike.
"""

from collections.abc import Iterable, Iterator
from statistics import median

from benchmarks.compare.bench import Bench, Results
from benchmarks.compare.plan import KEEP, Plan
from benchmarks.compare.results import Measure, Reading, Trace
from benchmarks.figures import rounded
from benchmarks.peers.base import Variant
from benchmarks.peers.remote import PeerFailed, Remote
from benchmarks.peers.worker_pool import WorkerPool
from benchmarks.progress import bar

WARM_UP_TOKENS = 100  # first tokens, ignored when looking for the slowest
PROBE_TOKENS = 8
TRIAL_TOKENS = 32  # tokens
RE_EVALUATING_PEERS = ("transformers",)  # evaluate their window again where others evict


def endless_measures(bench: Bench) -> list[Measure]:
    plan = bench.plan
    group, budget = plan.group, f"on {plan.budget:,} cells"
    return [
        Measure("endless/speed", f"endless decode {budget}", "tokens/s", more=True),
        Measure("endless/early", f"median, tokens {group:,} to {2 * group:,}", "ms", more=False),
        Measure("endless/late", f"median, last {group:,} of {plan.endless:,}", "ms", more=False),
        Measure("endless/growth", "last against early", "x", more=False),
        Measure("endless/slowest", "slowest token against the median", "x", more=False),
        Measure("endless/held", "memory above the weights", "MB", more=False),
    ]


def endless(bench: Bench) -> Results:
    """Measure one round, with the variant of each peer that is fastest with a full budget."""
    plan, runs = bench.plan, dict[Remote, _EndlessRun]()
    try:
        with bench.only(_fastest(bench)).pool() as pool:
            empty = {remote: _empty_bytes(remote, bench.ids) for remote in pool.turns(0)}
            pool.warm_up(bench.ids, plan.budget)
            for remote in pool.turns(0, plan.budget):
                runs[remote] = _start_run(pool, remote, bench, empty[remote])
            with bar(sum(run.wanted for run in runs.values()), "endless") as progress:
                for index in range(-(-plan.endless // plan.block)):
                    for remote in pool.turns(index, among=[r for r in runs if runs[r].left]):
                        progress(runs[remote].go_on(plan.block))
    except (KeyboardInterrupt, PeerFailed):
        yield from _results(runs.values(), plan)
        raise
    yield from _results(runs.values(), plan)


def _results(runs: Iterable["_EndlessRun"], plan: Plan) -> Results:
    """Yield what the runs measured; nothing of a run that ended before its first block."""
    for run in runs:
        if run.has_begun:
            yield run.trace()
            yield from run.readings(plan.group, plan.endless)


def _empty_bytes(remote: Remote, ids: list[int]) -> int:
    """Return resident bytes of a warm process without a context.

    Settles twice, since settling also frees memory that every token needs again.
    """
    for _ in range(2):
        remote.settle()
        remote.open(2 * PROBE_TOKENS)
        remote.read(ids[:PROBE_TOKENS])
        remote.close()
    return remote.held()


def _start_run(pool: WorkerPool, remote: Remote, bench: Bench, empty: int) -> "_EndlessRun":
    """Prefill a full budget, and return the run that continues from it."""
    plan, wanted = bench.plan, bench.plan.endless
    expected = pool.writing(remote) * plan.endless
    if remote.variant.peer in RE_EVALUATING_PEERS or expected > plan.endless_patience:
        wanted //= plan.shorter
        line = f"{remote.label}: generated {wanted:,} endless tokens instead of {plan.endless:,}"
        bench.skipped.append(line)
    remote.open_endless(plan.budget, KEEP)
    remote.read(bench.ids[: plan.budget])
    return _EndlessRun(remote, wanted, empty)


def _fastest(bench: Bench) -> list[Variant]:
    """Return the fastest variant of each peer, by a short trial if it has several."""
    peers = list(dict.fromkeys(variant.peer for variant in bench.variants))
    peers_with_variants = [p for p in peers if sum(v.peer == p for v in bench.variants) > 1]
    trial_seconds: dict[str, float] = {}
    candidates = [variant for variant in bench.variants if variant.peer in peers_with_variants]
    if candidates:
        with bench.only(candidates).pool() as pool:
            pool.warm_up(bench.ids, bench.plan.budget)
            for remote in pool.turns(0):
                remote.open_endless(bench.plan.budget, KEEP)
                remote.read(bench.ids[: bench.plan.budget])
                trial_seconds[remote.label] = median(remote.write(TRIAL_TOKENS))
    single = [variant for variant in bench.variants if variant.peer not in peers_with_variants]
    best = [
        min(of_peer, key=lambda variant: trial_seconds[variant.label])
        for peer in peers_with_variants
        if (of_peer := [v for v in candidates if v.peer == peer and v.label in trial_seconds])
    ]
    return sorted(single + best, key=lambda variant: peers.index(variant.peer))


class _EndlessRun:
    """The run of one variant.

    wanted: tokens to generate. empty: resident bytes without a context.
    """

    def __init__(self, remote: Remote, wanted: int, empty: int):
        self.remote, self.wanted, self._empty = remote, wanted, empty
        self.seconds: list[float] = []
        self._blocks: list[tuple[int, float, float, int]] = []

    @property
    def has_begun(self) -> bool:
        return bool(self._blocks)

    @property
    def left(self) -> int:
        """Number of tokens still to generate."""
        return self.wanted - len(self.seconds)

    def go_on(self, block: int) -> int:
        """Generate the next block; return the number of its tokens."""
        new = self.remote.write(min(block, self.left))
        self.seconds += new
        held = self.remote.held() - self._empty
        milliseconds = (rounded(median(new) * 1e3), rounded(max(new) * 1e3))
        self._blocks.append((len(self.seconds), *milliseconds, held))
        return len(new)

    def trace(self) -> Trace:
        tokens, medians, slowest, held = zip(*self._blocks, strict=True)
        return Trace(self.remote.label, list(tokens), list(medians), list(slowest), list(held))

    def readings(self, group: int, full_length: int) -> Iterator[Reading]:
        """Yield the readings; medians of groups only if the run has its full length."""
        values = {"speed": len(self.seconds) / sum(self.seconds)}
        if len(self.seconds) == full_length:
            values["early"] = median(self.seconds[group : 2 * group]) * 1e3
            values["late"] = median(self.seconds[-group:]) * 1e3
            values["growth"] = values["late"] / values["early"]
        warm = self.seconds[min(WARM_UP_TOKENS, len(self.seconds) // 2) :]
        values["slowest"] = max(warm) / median(self.seconds)
        values["held"] = self._blocks[-1][3] / 1e6
        for key, value in values.items():
            yield Reading(f"endless/{key}", self.remote.label, 0, value)

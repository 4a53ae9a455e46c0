"""Decode speed after contexts of several lengths."""

from statistics import median

from benchmarks.compare.bench import Bench, Results
from benchmarks.compare.results import Measure, Reading
from benchmarks.progress import bar


def decode_measures(bench: Bench) -> list[Measure]:
    return [
        Measure(f"decode/{context}", f"decode after {context:,} tokens", "tokens/s", more=True)
        for context in bench.plan.contexts
    ]


def decode(bench: Bench) -> Results:
    """Measure decoding. In each round, every variant grows one context through all lengths."""
    plan = bench.plan
    with bench.pool() as pool:
        pool.warm_up(bench.ids, plan.longest)
        total = plan.rounds * len(pool.remotes) * (plan.contexts[-1] + plan.written)
        with bar(total, "decode") as progress:
            for index in range(plan.rounds):
                tokens_held = 0
                for context in plan.contexts:
                    for remote in pool.turns(index, context):
                        if tokens_held == 0:
                            remote.open(plan.longest)
                        remote.read(bench.ids[tokens_held:context])
                        seconds = median(remote.write(plan.written))
                        progress(context + plan.written - tokens_held)
                        yield Reading(f"decode/{context}", remote.label, index, 1 / seconds)
                    tokens_held = context + plan.written

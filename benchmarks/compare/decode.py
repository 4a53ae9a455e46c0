"""Tokens written after contexts of several lengths."""

from statistics import median

from benchmarks.compare.bench import Bench, Found
from benchmarks.compare.results import Measure, Reading
from benchmarks.progress import bar


def decode_measures(bench: Bench) -> list[Measure]:
    return [
        Measure(f"decode/{context}", f"write after {context:,} tokens", "tokens/s", more=True)
        for context in bench.plan.contexts
    ]


def decode(bench: Bench) -> Found:
    """A round is one context of each variant, which grows from one length to the next."""
    plan = bench.plan
    with bench.pool() as pool:
        pool.warm_up(bench.ids, plan.longest)
        total = plan.rounds * len(pool.remotes) * (plan.contexts[-1] + plan.written)
        with bar(total, "decode") as shown:
            for index in range(plan.rounds):
                held = 0
                for context in plan.contexts:
                    for remote in pool.turns(index, context):
                        if held == 0:
                            remote.open(plan.longest)
                        remote.read(bench.ids[held:context])
                        seconds = median(remote.write(plan.written))
                        shown(context + plan.written - held)
                        yield Reading(f"decode/{context}", remote.label, index, 1 / seconds)
                    held = context + plan.written

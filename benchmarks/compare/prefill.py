"""Prompts of several lengths, from nothing to the logits of their last token."""

from benchmarks.compare.bench import Bench, Found
from benchmarks.compare.results import Measure, Reading
from benchmarks.progress import bar


def prefill_measures(bench: Bench) -> list[Measure]:
    return [
        Measure(f"prefill/{length}", f"read {length:,} tokens", "tokens/s", more=True)
        for length in bench.plan.prefill
    ]


def prefill(bench: Bench) -> Found:
    plan = bench.plan
    with bench.pool() as pool:
        pool.warm_up(bench.ids, plan.longest)
        total = plan.rounds * len(pool.remotes) * sum(plan.prefill)
        with bar(total, "prefill") as shown:
            for index in range(plan.rounds):
                for length in plan.prefill:
                    for remote in pool.turns(index, length):
                        remote.open(plan.longest)
                        seconds = remote.read(bench.ids[:length])
                        shown(length)
                        yield Reading(f"prefill/{length}", remote.label, index, length / seconds)

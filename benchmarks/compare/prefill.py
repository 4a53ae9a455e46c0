"""Prefill of prompts of several lengths, until the logits of the last token."""

from benchmarks.compare.bench import Bench, Results
from benchmarks.compare.results import Measure, Reading
from benchmarks.progress import bar


def prefill_measures(bench: Bench) -> list[Measure]:
    return [
        Measure(f"prefill/{length}", f"prefill {length:,} tokens", "tokens/s", more=True)
        for length in bench.plan.prefill
    ]


def prefill(bench: Bench) -> Results:
    plan = bench.plan
    with bench.pool() as pool:
        pool.warm_up(bench.ids, plan.longest)
        total = plan.rounds * len(pool.remotes) * sum(plan.prefill)
        with bar(total, "prefill") as progress:
            for index in range(plan.rounds):
                for length in plan.prefill:
                    for remote in pool.turns(index, length):
                        remote.open(plan.longest)
                        seconds = remote.read(bench.ids[:length])
                        progress(length)
                        yield Reading(f"prefill/{length}", remote.label, index, length / seconds)

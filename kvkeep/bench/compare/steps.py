"""kvkeep alone: a prompt evaluated in steps against the same prompt evaluated whole."""

from kvkeep.bench.compare.bench import Bench, Found
from kvkeep.bench.compare.results import Measure, Reading
from kvkeep.bench.peers.base import DTYPE
from kvkeep.bench.prefill import measurements
from kvkeep.bench.progress import bar


def steps_measures(bench: Bench) -> list[Measure]:
    length = f"{bench.plan.stepped:,} tokens"
    ways = {"stepped": f"{length} by {bench.plan.step}", "whole": f"{length} at once"}
    return [
        measure
        for key, title in ways.items()
        for measure in (
            Measure(f"steps/{key}-speed", f"read {title}", "tokens/s", more=True),
            Measure(f"steps/{key}-peak", f"read {title}, peak above weights", "MB", more=False),
        )
    ]


def steps(bench: Bench) -> Found:
    """Each reading has a process of its own; see `kvkeep.bench.one_prefill`."""
    plan = bench.plan
    if not any(each.peer == "kvkeep" for each in bench.variants):
        return
    if bench.setup.device != "cpu":
        bench.skipped.append("steps: measured on the CPU only")
        return
    sizes = (plan.step, plan.stepped)
    with bar(2 * plan.rounds * plan.stepped, "steps") as shown:
        found = measurements(bench.setup.model, DTYPE, plan.stepped, sizes, plan.rounds)
        for order, each in enumerate(found):
            way = "stepped" if each.prefill_step == plan.step else "whole"
            shown(plan.stepped)
            yield Reading(f"steps/{way}-speed", "kvkeep", order // 2, each.tokens_per_s)
            yield Reading(f"steps/{way}-peak", "kvkeep", order // 2, each.peak_bytes / 1e6)

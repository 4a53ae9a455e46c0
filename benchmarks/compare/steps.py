"""kvkeep only: prefill in steps against prefill of the whole prompt at once."""

from benchmarks.compare.bench import Bench, Results
from benchmarks.compare.results import Measure, Reading
from benchmarks.one_prefill import Way
from benchmarks.peers.base import DTYPE
from benchmarks.prefill import measurements, ways_to_compare
from benchmarks.progress import bar

_KEYS = ("stepped", "bounded", "whole")  # in the order of `ways_to_compare`


def steps_measures(bench: Bench) -> list[Measure]:
    plan = bench.plan
    length, cut = f"{plan.stepped:,} tokens", f"by {plan.step:,}"
    titles = (f"{length} {cut}", f"{length} {cut} on {plan.budget:,} cells", f"{length} at once")
    return [
        measure
        for key, title in zip(_KEYS, titles, strict=True)
        for measure in (
            Measure(f"steps/{key}-speed", f"prefill {title}", "tokens/s", more=True),
            Measure(f"steps/{key}-peak", f"prefill {title}, peak above weights", "MB", more=False),
        )
    ]


def steps(bench: Bench) -> Results:
    """Measure each way in new processes; see `benchmarks.one_prefill`."""
    plan = bench.plan
    own = [variant for variant in bench.variants if variant.peer == "kvkeep"]
    if not own:
        return
    if bench.setup.device != "cpu":
        bench.skipped.append("steps: measured on the CPU only")
        return
    bench.describe(own)
    compared = ways_to_compare(plan.stepped, plan.step, plan.budget)
    with bar(len(compared) * plan.rounds * plan.stepped, "steps") as progress:
        readings = measurements(bench.setup.model, DTYPE, plan.stepped, compared, plan.rounds)
        for order, reading in enumerate(readings):
            index = order // len(compared)
            key = _KEYS[compared.index(Way(reading.prefill_step, reading.budget))]
            progress(plan.stepped)
            yield Reading(f"steps/{key}-speed", "kvkeep", index, reading.tokens_per_s)
            yield Reading(f"steps/{key}-peak", "kvkeep", index, reading.peak_bytes / 1e6)

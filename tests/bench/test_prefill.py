"""Stepped against whole prefill: what is made of the measurements."""

from kvkeep.bench.one_prefill import Prefill
from kvkeep.bench.prefill import Spread, summarise, table


def test_measurements_are_summarised_by_prefill_step() -> None:
    found = [
        Prefill(512, 4232, 4.0, speed, peak, 100)
        for speed, peak in ((900.0, 130_000_000), (1100.0, 125_000_000), (1000.0, 120_000_000))
    ]
    found.append(Prefill(4232, 4232, 5.0, 800.0, 260_000_000, 100))
    stepped, whole = summarise(found, 512), summarise(found, 4232)
    assert stepped.rounds == 3
    assert stepped.tokens_per_s == Spread(1000.0, 900.0, 1100.0)
    assert stepped.peak_bytes == Spread(125_000_000, 120_000_000, 130_000_000)
    assert whole.rounds == 1
    assert "1,000 (900 to 1,100)" in table([stepped, whole])
    assert "125 (120 to 130)" in table([stepped, whole])

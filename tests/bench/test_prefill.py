"""The benchmark of prefill steps: summary of measurements."""

from benchmarks.one_prefill import Prefill
from benchmarks.prefill import Spread, summarise, table, ways_to_compare


def test_measurements_are_summarised_by_prefill_step() -> None:
    measured = [
        Prefill(512, None, 4232, 4.0, speed, peak, 100)
        for speed, peak in ((900.0, 130_000_000), (1100.0, 125_000_000), (1000.0, 120_000_000))
    ]
    measured.append(Prefill(4232, None, 4232, 5.0, 800.0, 260_000_000, 100))
    measured.append(Prefill(512, 1024, 4232, 3.0, 1400.0, 60_000_000, 24))
    stepped, bounded, whole = (summarise(measured, way) for way in ways_to_compare(4232, 512, 1024))
    assert stepped.rounds == 3
    assert stepped.tokens_per_s == Spread(1000.0, 900.0, 1100.0)
    assert stepped.peak_bytes == Spread(125_000_000, 120_000_000, 130_000_000)
    assert (whole.rounds, bounded.rounds) == (1, 1)
    assert bounded.peak_bytes.median == 60_000_000
    assert "1,000 (900 to 1,100)" in table([stepped, bounded, whole])
    assert "125 (120 to 130)" in table([stepped, bounded, whole])

"""The benchmark of alignment in place, on a small model and a short prompt."""

from small_models import small_model

from benchmarks.alignment import REREADS, measure, prompt, sample, table

MODEL = small_model(max_positions=8192)


def test_an_aligned_prompt_is_compared_with_a_fresh_one_for_each_reread():
    each = sample(MODEL, "reminder removed", fact_count=1, seed=0)
    readings = measure(MODEL, "reminder removed", [each], share=1.0)
    assert [reading.reread for reading in readings] == list(REREADS)
    assert all(reading.seams >= 1 for reading in readings)
    shares = [reading.evaluated for reading in readings]
    assert shares == sorted(shares)
    assert shares[-1] < readings[0].exact
    assert all(reading.kl >= 0 and 0 <= reading.agreement <= 1 for reading in readings)
    assert len(table(readings).splitlines()) == 1 + len(REREADS)


def test_each_case_rewrites_the_prompt_in_its_own_places():
    facts = sample(MODEL, "header changed", fact_count=1, seed=0).facts
    old = MODEL.text.decode(prompt(MODEL, "all", False, facts, 0))
    new = MODEL.text.decode(prompt(MODEL, "all", True, facts, 0))
    for text in ("Monday", "<system-reminder>", "<think>"):
        assert (text in old, text in new) == (True, False)
    assert ("search_10" in old, "search_10" in new) == (False, True)
    assert facts[0].sentence in new

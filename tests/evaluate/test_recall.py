"""A memory is asked in forks of it, and what it answers is what it would write."""

import dataclasses

import pytest
from small_models import small_model

from kvkeep.evaluate.facts import Fact, Where
from kvkeep.evaluate.passkey import Passkey
from kvkeep.evaluate.recall import (
    Compressing,
    Recall,
    compress_after_reading,
    compress_while_reading,
    recall,
)
from kvkeep.evaluate.recall_plot import by_depth, draw_depths
from kvkeep.evaluate.recall_summary import summarise

MODEL = small_model(max_positions=8192)
SAMPLE = Passkey(junk=6, task="second").sample(0)


def test_the_answer_is_what_would_be_written_and_as_likely() -> None:
    session = MODEL.session(policy="full")
    session.feed(SAMPLE.text)
    held = session.tokens
    answer = recall(session, SAMPLE.asked).answers[1]
    assert session.tokens == held
    session.feed(SAMPLE.asked[1].question)
    fork = session.fork()
    assert "".join(session.stream(len(answer.text) + 20)).startswith(answer.text)
    scores = []
    for token in MODEL.text.encode(f" {SAMPLE.asked[1].answer}"):
        scores.append(float(fork.logits.double().log_softmax(-1)[token]))
        fork.feed([token])
    assert answer.log_probability == pytest.approx(sum(scores) / len(scores), rel=1e-4)


def test_found_is_a_text_that_begins_with_the_key() -> None:
    session = MODEL.session(policy="full")
    session.feed(SAMPLE.text)
    question = SAMPLE.asked[0].question
    written = recall(session, [Fact("", question, "12345")]).answers[0].text.strip()
    assert written
    found = recall(session, [Fact("", question, written[:3]), Fact("", question, "12345")])
    assert [answer.found for answer in found.answers] == [True, False]
    assert not found.found


def test_compressed_and_not_are_asked_the_same() -> None:
    measured = compress_after_reading(MODEL, SAMPLE, Compressing("keydiff", 2))
    whole = measured.uncompressed
    assert whole is not None
    assert measured.tokens == whole.cells == len(MODEL.text.encode(SAMPLE.text))
    assert measured.compressed.cells <= -(-measured.tokens // 2)
    assert len(measured.compressed.answers) == len(whole.answers) == 2
    assert measured.chunks
    assert measured.compressed.log_probability != whole.log_probability


def test_no_question_is_read_before_compression() -> None:
    other = dataclasses.replace(SAMPLE, asked=(Fact("", " Who?", "Nobody"), *SAMPLE.asked))
    how = Compressing("keydiff", 2)
    asked_first = compress_after_reading(MODEL, SAMPLE, how).compressed.answers
    assert compress_after_reading(MODEL, other, how).compressed.answers[1:] == asked_first


def test_while_reading_it_is_compressed_in_a_memory_of_its_own() -> None:
    sample = Passkey(junk=25).sample(0)
    how = Compressing("keydiff", 4, max_kv_size=1024)
    measured = compress_while_reading(MODEL, sample, how)
    whole = measured.uncompressed
    assert whole is not None
    assert whole.cells == measured.tokens == len(MODEL.text.encode(sample.text))
    assert measured.compressed.cells <= 1024
    assert measured.chunks


def test_a_text_too_long_to_read_whole_is_read_compressed() -> None:
    model = small_model(max_positions=1024)
    sample = Passkey(junk=15).sample(0)
    measured = compress_while_reading(model, sample, Compressing("keydiff", 4))
    assert measured.uncompressed is None
    assert summarise([measured]).found_uncompressed is None
    assert measured.tokens > 1024 >= measured.compressed.cells


def test_a_summary_counts_and_averages() -> None:
    measured = compress_after_reading(MODEL, SAMPLE, Compressing("keydiff", 2))
    missed, found = (
        _answered(measured.compressed, found=each, likely=likely)
        for each, likely in ((False, -3.0), (True, -1.0))
    )
    both = [dataclasses.replace(measured, compressed=each) for each in (missed, found)]
    summary = summarise(both)
    assert (summary.found, summary.samples, summary.rate) == (1, 2, 0.5)
    assert summary.log_probability == -2.0
    assert summary.cells_before == measured.tokens
    assert len(summary.ms_per_chunk) == 2 * len(measured.chunks)
    assert [row["found"] for row in summary.each] == [False, True]


def _answered(recalled: Recall, found: bool, likely: float) -> Recall:
    answers = tuple(
        dataclasses.replace(answer, found=found, log_probability=likely)
        for answer in recalled.answers
    )
    return dataclasses.replace(recalled, answers=answers)


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_a_plot_shows_each_depth(suffix: str) -> None:
    pytest.importorskip("matplotlib")
    measured = compress_after_reading(MODEL, SAMPLE, Compressing("keydiff", 2))
    few = [_at(measured, depth) for depth in (0, 50, 100, 100)]
    assert {depth: len(group) for depth, group in by_depth(few).items()} == {0: 1, 50: 1, 100: 2}
    many = [_at(measured, depth) for depth in range(0, 101, 5)]
    assert list(by_depth(many)) == [5, 15, 25, 35, 45, 55, 65, 75, 85, 95]
    assert len(draw_depths(many, "a title", suffix)) > 5000


def _at(measured, depth: int):
    sample = dataclasses.replace(measured.sample, position=depth, places=101)
    return dataclasses.replace(measured, sample=sample)


def test_the_place_asked_for_is_the_place_reported() -> None:
    sample = Passkey(junk=6, where=Where(4)).sample(0)
    row = summarise([compress_after_reading(MODEL, sample, Compressing("keydiff", 2))]).each[0]
    assert (row["position"], row["places"], row["depth"]) == (4, 6, 80.0)

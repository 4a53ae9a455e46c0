"""Recall: answers of forks, before and after compression."""

import dataclasses

import pytest
from small_models import small_model

from kvkeep.evaluate.datasets import PasskeyDataset
from kvkeep.evaluate.plots import draw_recall, group_by_depth
from kvkeep.evaluate.recall import (
    CompressionSettings,
    Recall,
    measure_compression,
    measure_recall,
    measure_streaming_compression,
    summarise,
)
from kvkeep.evaluate.samples import Fact, Placement

MODEL = small_model(max_positions=8192)
SAMPLE = PasskeyDataset(junk=6, task="second").sample(0)


def test_an_answer_has_the_text_and_probability_of_greedy_decoding() -> None:
    session = MODEL.session(policy="full")
    session.feed(SAMPLE.text)
    tokens = session.tokens
    answer = measure_recall(session, SAMPLE.facts).answers[1]
    assert session.tokens == tokens
    session.feed(SAMPLE.facts[1].question)
    fork = session.fork()
    assert "".join(session.stream(len(answer.text) + 20)).startswith(answer.text)
    scores = []
    for token in MODEL.text.encode(f" {SAMPLE.facts[1].answer}"):
        scores.append(float(fork.logits.double().log_softmax(-1)[token]))
        fork.feed([token])
    assert answer.log_probability == pytest.approx(sum(scores) / len(scores), rel=1e-4)


def test_a_key_is_found_if_the_answer_begins_with_it() -> None:
    session = MODEL.session(policy="full")
    session.feed(SAMPLE.text)
    question = SAMPLE.facts[0].question
    written = measure_recall(session, [Fact("", question, "12345")]).answers[0].text.strip()
    assert written
    recalled = measure_recall(
        session, [Fact("", question, written[:3]), Fact("", question, "12345")]
    )
    assert [answer.found for answer in recalled.answers] == [True, False]
    assert not recalled.found


def test_compressed_and_uncompressed_sessions_get_the_same_questions() -> None:
    result = measure_compression(MODEL, SAMPLE, CompressionSettings("keydiff", 2))
    full = result.uncompressed
    assert full is not None
    assert result.tokens == full.cells == len(MODEL.text.encode(SAMPLE.text))
    assert result.compressed.cells <= -(-result.tokens // 2)
    assert len(result.compressed.answers) == len(full.answers) == 2
    assert result.chunks
    assert result.compressed.log_probability != full.log_probability


def test_compression_precedes_all_questions() -> None:
    other = dataclasses.replace(SAMPLE, facts=(Fact("", " Who?", "Nobody"), *SAMPLE.facts))
    settings = CompressionSettings("keydiff", 2)
    answers = measure_compression(MODEL, SAMPLE, settings).compressed.answers
    assert measure_compression(MODEL, other, settings).compressed.answers[1:] == answers


def test_compression_during_prefill_leaves_the_uncompressed_session_alone() -> None:
    sample = PasskeyDataset(junk=25).sample(0)
    settings = CompressionSettings("keydiff", 4, max_kv_size=1024)
    result = measure_streaming_compression(MODEL, sample, settings)
    full = result.uncompressed
    assert full is not None
    assert full.cells == result.tokens == len(MODEL.text.encode(sample.text))
    assert result.compressed.cells <= 1024
    assert result.chunks


def test_random_methods_take_the_seed_in_streams_too() -> None:
    sample = PasskeyDataset(junk=25).sample(0)
    settings = CompressionSettings("random", 4, max_kv_size=1024)
    answers = [
        measure_streaming_compression(
            MODEL, sample, dataclasses.replace(settings, seed=seed)
        ).compressed.log_probability
        for seed in (0, 0, 1)
    ]
    assert answers[0] == answers[1] != answers[2]


def test_a_text_too_long_for_the_model_is_measured_compressed_only() -> None:
    model = small_model(max_positions=1024)
    sample = PasskeyDataset(junk=15).sample(0)
    result = measure_streaming_compression(model, sample, CompressionSettings("keydiff", 4))
    assert result.uncompressed is None
    assert summarise([result])["found_uncompressed"] is None
    assert result.tokens > 1024 >= result.compressed.cells


def test_a_summary_counts_and_averages() -> None:
    result = measure_compression(MODEL, SAMPLE, CompressionSettings("keydiff", 2))
    results = [
        dataclasses.replace(
            result, compressed=_recall_of(result.compressed, found, log_probability)
        )
        for found, log_probability in ((False, -3.0), (True, -1.0))
    ]
    summary = summarise(results)
    assert [summary[name] for name in ("found", "samples", "rate")] == [1, 2, 0.5]
    assert summary["log_probability"] == -2.0
    assert summary["cells_before"] == result.tokens
    assert len(summary["ms_per_chunk"]) == 2 * len(result.chunks)
    assert [row["found"] for row in summary["each"]] == [False, True]


def _recall_of(recall: Recall, found: bool, log_probability: float) -> Recall:
    answers = tuple(
        dataclasses.replace(answer, found=found, log_probability=log_probability)
        for answer in recall.answers
    )
    return dataclasses.replace(recall, answers=answers)


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_the_recall_plot_shows_few_depths_exactly_and_groups_many(suffix: str) -> None:
    pytest.importorskip("matplotlib")
    result = measure_compression(MODEL, SAMPLE, CompressionSettings("keydiff", 2))
    few = [_at_depth(result, depth) for depth in (0, 50, 100, 100)]
    assert {depth: len(group) for depth, group in group_by_depth(few).items()} == {
        0: 1,
        50: 1,
        100: 2,
    }
    many = [_at_depth(result, depth) for depth in range(0, 101, 5)]
    assert list(group_by_depth(many)) == [5, 15, 25, 35, 45, 55, 65, 75, 85, 95]
    assert len(draw_recall(many, "a title", suffix)) > 5000


def _at_depth(result, depth: int):
    sample = dataclasses.replace(result.sample, position=depth, position_count=101)
    return dataclasses.replace(result, sample=sample)


def test_the_requested_position_is_reported() -> None:
    sample = PasskeyDataset(junk=6, placement=Placement(4)).sample(0)
    result = measure_compression(MODEL, sample, CompressionSettings("keydiff", 2))
    row = summarise([result])["each"][0]
    assert (row["position"], row["places"], row["depth"]) == (4, 6, 80.0)

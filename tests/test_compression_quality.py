"""Recall and perplexity of compressed sessions on the real model, against measured figures."""

import pytest
from test_quality import perplexity
from topics import topic_ids

from kvkeep.evaluate.datasets import PasskeyDataset
from kvkeep.evaluate.recall import CompressionSettings, measure_compression, measure_recall
from kvkeep.evaluate.samples import Placement
from kvkeep.model import Model


def test_fitted_keeps_a_pass_key_at_ratio_4_and_averaging_loses_it_at_ratio_2(
    smollm2: Model,
) -> None:
    sample = PasskeyDataset(junk=40, placement=Placement(depths=(50.0,)), seed=3).sample(0)
    fitted = measure_compression(smollm2, sample, CompressionSettings("fitted", 4.0))
    assert fitted.uncompressed is not None
    assert fitted.uncompressed.found
    assert fitted.compressed.found
    assert fitted.compressed.cells * 4 <= fitted.uncompressed.cells + 3
    for failing in ("average", "sum"):
        evaluation = measure_compression(smollm2, sample, CompressionSettings(failing, 2.0))
        assert not evaluation.compressed.found


@pytest.mark.slow
def test_an_archive_recalls_a_key_6000_tokens_back_that_a_window_forgot(
    smollm2: Model,
) -> None:
    samples, hits = 5, 0
    for index in range(samples):
        sample = PasskeyDataset(junk=250, placement=Placement(position=index), seed=11).sample(
            index
        )
        archive = smollm2.session(1024, policy="archive")
        window = smollm2.session(1024, policy="sliding")
        for session in (archive, window):
            session.feed(sample.text)
            assert session.cache.cells <= 1024
        hits += measure_recall(archive, sample.facts).found
        assert not measure_recall(window, sample.facts).found
    assert hits >= samples - 1


@pytest.mark.slow
def test_an_archive_has_lower_perplexity_than_a_window_of_the_same_size(smollm2: Model) -> None:
    archive = perplexity(smollm2, 512, 4, "archive", 1024, 8192)
    assert archive < perplexity(smollm2, 512, 4, "sliding", 1024, 8192)


@pytest.mark.slow
@pytest.mark.parametrize(("bits", "limit"), [("8", 1.005), ("8/4", 1.02), ("4", 1.05)])
def test_fewer_bits_cost_little_perplexity(smollm2: Model, bits: str, limit: float) -> None:
    def perplexity_with(kv_bits: str | None) -> float:
        session = smollm2.session(policy="full", prefill_step=32, kv_bits=kv_bits)
        return float((-session.score(topic_ids(smollm2)[:2000])[256:].mean()).exp())

    assert perplexity_with(bits) < limit * perplexity_with(None)

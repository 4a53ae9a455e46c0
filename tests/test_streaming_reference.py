"""Bounded logits equal a naive StreamingLLM on the real model, for any prefill step."""

import pytest
import torch
from reference import streaming_logits
from topics import topic_ids

from kvkeep.model import Model

LAST = 3


@pytest.mark.parametrize(
    ("max_kv_size", "keep"),
    [
        (24, 4),
        pytest.param(64, 4, marks=pytest.mark.slow),
        pytest.param(16, 8, marks=pytest.mark.slow),
        pytest.param(130, 0, marks=pytest.mark.slow),
    ],
)
def test_bounded_logits_equal_the_naive_reference(
    smollm2_fp32: Model, max_kv_size: int, keep: int
) -> None:
    tokens = topic_ids(smollm2_fp32)[: max_kv_size + 20]
    expected = streaming_logits(smollm2_fp32.decoder, tokens, max_kv_size, keep, LAST)
    assert expected.abs().max() > 15  # so that a difference of 1e-3 is small
    for prefill_step in (1, 7, 512):
        session = smollm2_fp32.session(max_kv_size, keep, prefill_step=prefill_step)
        session.feed(tokens[: 1 - LAST])
        logits = [session.logits]
        for token in tokens[1 - LAST :]:
            session.feed([token])
            logits.append(session.logits)
        assert (torch.stack(logits) - expected).abs().max() <= 1e-3
        assert session.cache.cells == max_kv_size

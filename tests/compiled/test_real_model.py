"""The quality of the compiled path and of 4-bit weights on the default model."""

import pytest
import torch
from topics import topic_ids
from torch import Tensor

import kvkeep
from kvkeep.compiled.binding import kernel_library
from kvkeep.model import Model
from kvkeep.models.layers.decoder import Decoder

pytestmark = pytest.mark.skipif(kernel_library() is None, reason="no compiled kernels here")

READ, SCORED = 512, 768


def by_torch(model: Model) -> Model:
    """Return the same weights without the compiled kernels."""
    decoder = Decoder(model.spec, dict(model.decoder.weights))
    return Model(model.name, model.folder, decoder, model.text)


def perplexity(model: Model, written: bool) -> float:
    ids = topic_ids(model)
    session = model.session(policy="full")
    session.feed(ids[:READ])
    return float((-session.score(ids[READ:SCORED], token_by_token=written).mean()).exp())


def test_four_bit_weights_have_the_perplexity_of_their_unpacked_values(smollm2: Model) -> None:
    assert smollm2.weights == "Q4_1"
    expected = perplexity(by_torch(kvkeep.load_model(weights="bf16")), False)
    assert perplexity(smollm2, True) == pytest.approx(expected, rel=0.01)
    assert perplexity(smollm2, False) == pytest.approx(expected, rel=0.01)


def logits_of(model: Model) -> Tensor:
    """Return the logits of 16 tokens after 200 others, one by one, `[16, vocab]`."""
    ids, session, rows = topic_ids(model), model.session(), list[Tensor]()
    session.feed(ids[:200])
    for token in ids[200:216]:
        session.score([token], token_by_token=True)
        assert session.logits is not None
        rows.append(session.logits)
    return torch.stack(rows)


@pytest.fixture(scope="module")
def exact(smollm2_fp32: Model) -> Tensor:
    return logits_of(smollm2_fp32)


@pytest.fixture(scope="module")
def reference() -> Tensor:
    return logits_of(by_torch(kvkeep.load_model()))


@pytest.mark.parametrize("weights", [None, "int4", "bf16"])
def test_logits_are_as_near_to_float32_as_torch(
    weights: str | None, exact: Tensor, reference: Tensor
) -> None:
    compiled = logits_of(kvkeep.load_model(weights=weights))
    assert (compiled - exact).square().mean() <= (reference - exact).square().mean()

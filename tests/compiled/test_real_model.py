"""The compiled path and 4-bit weights on the default model: what they cost in quality."""

import pytest
import torch
from topics import topic_ids

import kvkeep
from kvkeep.compiled.library import library
from kvkeep.model import Model
from kvkeep.models.llama import Decoder

pytestmark = pytest.mark.skipif(library() is None, reason="no compiled kernels here")

READ, SCORED = 1024, 1536


def by_torch(model: Model) -> Model:
    """The same tensors without the compiled kernels."""
    decoder = Decoder(model.spec, model.decoder.tensors)
    return Model(model.name, model.folder, decoder, model.text)


def perplexity(model: Model, written: bool) -> float:
    ids = topic_ids(model)
    session = model.session(policy="full")
    session.feed(ids[:READ])
    return float((-session.score(ids[READ:SCORED], written=written).mean()).exp())


def test_four_bit_weights_read_as_well_as_what_they_were_unpacked_to(smollm2: Model) -> None:
    assert smollm2.weights == "int4"
    wanted = perplexity(by_torch(kvkeep.load_model(weights="bf16")), False)
    assert perplexity(smollm2, True) == pytest.approx(wanted, rel=0.01)
    assert perplexity(smollm2, False) == pytest.approx(wanted, rel=0.01)


@pytest.mark.parametrize("weights", ["int4", "bf16"])
def test_logits_are_no_further_from_float32_than_those_of_torch(
    weights: str, smollm2_fp32: Model
) -> None:
    model = kvkeep.load_model(weights=weights)
    ids = topic_ids(model)[:640]
    found = []
    for each in (smollm2_fp32, by_torch(model), model):
        session = each.session()
        session.feed(ids[:600])
        rows = []
        for token in ids[600:]:
            session.score([token], written=True)
            logits = session.logits
            assert logits is not None
            rows.append(logits)
        found.append(torch.stack(rows))
    exact, reference, compiled = found
    assert (compiled - exact).square().mean() <= (reference - exact).square().mean()

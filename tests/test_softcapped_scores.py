"""Scores by attention with softcapped logits, against transformers' attention and loops."""

import math

import pytest
import torch
import transformers
from methods.candidates import HEAD_INDICES, attention_shares, random_candidates
from models.family_checkpoints import open_model, write_checkpoint
from small_models import small_model
from torch import Tensor

from kvkeep import Session
from kvkeep.compression.methods.attention import attention_weights, newest_queries
from kvkeep.model import Model
from kvkeep.policies import Archive
from kvkeep.session.compression_plan import RECENT_CELLS, SINK_CELLS
from kvkeep.session.reconstruction import FIRST_PROMPT, reconstruction_scores

IDS = [(17 * i * i + 5 * i) % 255 + 1 for i in range(150)]


@pytest.fixture(scope="module")
def models(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Model, transformers.PreTrainedModel]:
    """Return a random Gemma 2 with products above its softcap of 2, here and in transformers."""
    folder = tmp_path_factory.mktemp("gemma2")
    reference = write_checkpoint(folder, "gemma2")
    with torch.no_grad():
        for name, weight in reference.named_parameters():
            if name.endswith("q_proj.weight"):
                weight *= 4
    reference.save_pretrained(folder)
    reference.set_attn_implementation("eager")
    return open_model(folder, small_model().text), reference


def attention(model: Model, reference: transformers.PreTrainedModel, ids: list[int]) -> Tensor:
    """Return transformers' attention of the global layers, `[layers, kv_heads, groups, n, n]`."""
    with torch.no_grad():
        weights = reference(torch.tensor([ids]), output_attentions=True).attentions
    layers = model.spec.layers_with_cells(model.spec.groups[0])
    stacked = torch.stack([weights[layer][0] for layer in layers])
    return stacked.unflatten(1, (model.spec.kv_heads, -1))


def fed(model: Model) -> Session:
    session = model.session(policy="full")
    session.feed(IDS)
    return session


def test_reconstruction_scores_are_softcapped_attention(
    models: tuple[Model, transformers.PreTrainedModel],
) -> None:
    model, reference = models
    scores = reconstruction_scores(fed(model).core.memory, model.text)
    ids = [*IDS, *model.text.encode(FIRST_PROMPT), *IDS]
    weights = attention(model, reference, ids)[..., -len(IDS) - 1 :, : len(IDS)]
    torch.testing.assert_close(scores, weights.amax((2, 3)).log(), rtol=1e-3, atol=1e-3)


def test_h2o_keeps_cells_by_softcapped_attention(
    models: tuple[Model, transformers.PreTrainedModel],
) -> None:
    model, reference = models
    session = fed(model)
    session.compress(1.5, "h2o")
    old = slice(SINK_CELLS, len(IDS) - RECENT_CELLS)
    weights = attention(model, reference, IDS)[..., -128:, old]
    sums = (weights / weights.sum(-1, keepdim=True)).nan_to_num().mean(2).sum(2)
    count = math.ceil(len(IDS) / 1.5) - SINK_CELLS - RECENT_CELLS
    expected = sums.topk(count).indices.sort().values + SINK_CELLS
    compressed = next(segment for segment in session.cache.segments if segment.compressed)
    assert torch.equal(compressed.read(0, count).positions, expected)


def test_an_archive_keeps_cells_by_softcapped_attention(
    models: tuple[Model, transformers.PreTrainedModel],
) -> None:
    model, reference = models
    policy = Archive(64, keep=4, method="h2o", ratio=2.0, window=32, block=16)
    session, fed_ids = model.session(policy=policy), list[int]()
    while not any(segment.compressed for segment in session.cache.segments):
        fed_ids.append(IDS[len(fed_ids)])
        session.feed(fed_ids[-1:])
    weights = attention(model, reference, fed_ids)[..., 4:20]
    sums = (weights / weights.sum(-1, keepdim=True)).nan_to_num().mean(2).sum(2)
    expected = sums.topk(8).indices.sort().values + 4
    compressed = next(segment for segment in session.cache.segments if segment.compressed)
    assert torch.equal(compressed.read(0, 8).positions, expected)


@pytest.mark.parametrize("compressed", [False, True], ids=["as-fed", "compressed"])
def test_biases_are_added_after_the_softcap(compressed: bool) -> None:
    candidates = random_candidates(40, compressed=compressed, queries=12, softcap=0.7)
    weights = attention_weights(candidates, newest_queries(candidates, 12))
    for layer, head in HEAD_INDICES:
        expected = torch.tensor(attention_shares(candidates, layer, head, 12))
        torch.testing.assert_close(weights[layer, head], expected, rtol=1e-4, atol=1e-6)

"""Layers without RoPE: their keys are never rotated when cells move."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from edit_actions import NOPE_MODEL
from topics import topic_text

from kvkeep.cache import Cells, KVCache, RaggedCells
from kvkeep.compression.methods.base import Candidates
from kvkeep.model import Model
from kvkeep.models.layers.decoder import Decoder
from kvkeep.session.session import Session

TEXT = NOPE_MODEL.text.encode(topic_text())[:150]
UNROTATED = (1, 3)  # layers without RoPE


def fed(policy: str = "full", budget: int = 256, **settings) -> Session:
    session = NOPE_MODEL.session(budget, policy=policy, **settings)
    session.feed(TEXT)
    return session


def held(cache: KVCache) -> Cells:
    return Cells.concatenate([cells for _, cells in cache.read(0, cache.cells)])


@pytest.mark.parametrize("kind", ["even", "ragged"])
def test_shifting_cells_keeps_the_keys_of_unrotated_layers(kind: str) -> None:
    session = fed()
    cells, rope = held(session.cache), session.cache.rope
    shape = (*cells.keys.shape[:2], len(cells))
    if kind == "ragged":
        mask = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.3
        cells = RaggedCells.select_from(cells, mask)
    shifted = cells.shift(rope, torch.full_like(cells.positions, -3))
    unrotated = Candidates(cells, rope, 1.0).unrotated_keys
    for layer in range(4):
        part = slice(layer, layer + 1)
        if isinstance(cells, RaggedCells):
            part = cells.head_slice(layer, 0)
        assert torch.equal(shifted.keys[part], cells.keys[part]) == (layer in UNROTATED)
        assert torch.equal(unrotated[part], cells.keys[part]) == (layer in UNROTATED)
    assert torch.equal(shifted.positions, cells.positions - 3)


@pytest.mark.parametrize("method", ["kvzip", "snapkv", "expected_attention", "average", "keydiff"])
def test_a_session_with_unrotated_layers_can_be_compressed(method: str) -> None:
    session = fed()
    session.compress(3, method=method, recent=20)
    for _ in range(5):
        session.next_token()
    assert torch.isfinite(session.logits).all()


def scaled_models() -> tuple[Model, Model]:
    """Return two models that compute the same.

    One has a RoPE attention factor of 2, which multiplies rotated queries and keys. In the other,
    the queries of rotated layers are 4 times as large.
    """
    spec, tensors = NOPE_MODEL.spec, NOPE_MODEL.decoder.tensors
    rope = replace(spec.rope, kind="yarn", attention_scaling=2.0)
    larger = dict(tensors)
    for layer in set(range(spec.layers)) - set(UNROTATED):
        name = f"model.layers.{layer}.self_attn.q_proj.weight"
        larger[name] = 4 * tensors[name]
    decoders = Decoder(replace(spec, rope=rope), tensors), Decoder(spec, larger)
    by_factor, by_queries = (Model("a", Path("a"), each, NOPE_MODEL.text) for each in decoders)
    return by_factor, by_queries


@pytest.mark.parametrize("method", ["kvzip", "snapkv", "expected_attention", "h2o", "tova"])
def test_an_attention_factor_applies_to_rotated_layers_only(method: str) -> None:
    sessions = [model.session(256, policy="full") for model in scaled_models()]
    logits = []
    for session in sessions:
        session.feed(TEXT)
        logits.append(session.logits)
        session.compress(3, method=method, recent=20)
        session.feed(TEXT[:7])
        logits.append(session.logits)
    whole, compressed, same_whole, same_compressed = logits
    assert torch.equal(whole, same_whole)
    assert torch.equal(compressed, same_compressed)

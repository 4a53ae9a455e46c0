"""Layers without RoPE: their keys are never turned, whatever moves the cells."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from edit_actions import NOPE_MODEL
from topics import topic_text

from kvkeep.cache import Cells, KVCache, Ragged
from kvkeep.compression.methods.base import Candidates
from kvkeep.model import Model
from kvkeep.models.layers.decoder import Decoder
from kvkeep.session.session import Session

TEXT = NOPE_MODEL.text.encode(topic_text())[:150]
PLAIN = (1, 3)  # layers without it


def fed(policy: str = "full", budget: int = 256, **settings) -> Session:
    session = NOPE_MODEL.session(budget, policy=policy, **settings)
    session.feed(TEXT)
    return session


def held(cache: KVCache) -> Cells:
    return Cells.concatenate([cells for _, cells in cache.read(0, cache.cells)])


@pytest.mark.parametrize("kind", ["even", "ragged"])
def test_cells_that_move_keep_their_keys_there(kind: str) -> None:
    session = fed()
    cells, rope = held(session.cache), session.cache.rope
    shape = (*cells.keys.shape[:2], len(cells))
    if kind == "ragged":
        which = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.3
        cells = Ragged.select_from(cells, which)
    moved = cells.shifted(rope, torch.full_like(cells.positions, -3))
    back = Candidates(cells, rope, 1.0).unrotated
    for layer in range(4):
        own = slice(layer, layer + 1)
        if isinstance(cells, Ragged):
            own = cells.head_slice(layer, 0)
        assert torch.equal(moved.keys[own], cells.keys[own]) == (layer in PLAIN)
        assert torch.equal(back[own], cells.keys[own]) == (layer in PLAIN)
    assert torch.equal(moved.positions, cells.positions - 3)


@pytest.mark.parametrize("method", ["kvzip", "snapkv", "expected_attention", "average", "keydiff"])
def test_it_can_be_compressed(method: str) -> None:
    session = fed()
    session.compress(3, method=method, recent=20)
    for _ in range(5):
        session.next_token()
    assert torch.isfinite(session.logits).all()


def scaled_models() -> tuple[Model, Model]:
    """One with a RoPE attention factor of 2, and one whose rotating layers have queries 4 times as
    large: the same model, since the factor multiplies rotated queries and keys alike.
    """
    spec, plain = NOPE_MODEL.spec, NOPE_MODEL.decoder.tensors
    rope = replace(spec.rope, kind="yarn", attention_scaling=2.0)
    larger = dict(plain)
    for layer in set(range(spec.layers)) - set(PLAIN):
        name = f"model.layers.{layer}.self_attn.q_proj.weight"
        larger[name] = 4 * plain[name]
    decoders = Decoder(replace(spec, rope=rope), plain), Decoder(spec, larger)
    by_factor, by_queries = (Model("a", Path("a"), each, NOPE_MODEL.text) for each in decoders)
    return by_factor, by_queries


@pytest.mark.parametrize("method", ["kvzip", "snapkv", "expected_attention", "h2o", "tova"])
def test_an_attention_factor_is_of_rotating_layers_alone(method: str) -> None:
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

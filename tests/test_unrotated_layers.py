"""Layers without RoPE: their keys are never turned, whatever moves the cells."""

import pytest
import torch
from edit_actions import NOPE_MODEL
from topics import topic_text

from kvkeep.cache import Cells, KVCache, Ragged
from kvkeep.methods.base import Candidates
from kvkeep.session.session import Session

TEXT = NOPE_MODEL.text.encode(topic_text())[:150]
PLAIN = (1, 3)  # layers without it


def fed(policy: str = "full", budget: int = 256, **settings) -> Session:
    session = NOPE_MODEL.session(budget, policy=policy, **settings)
    session.feed(TEXT)
    return session


def held(cache: KVCache) -> Cells:
    return Cells.joined([cells for _, cells in cache.read(0, cache.cells)])


@pytest.mark.parametrize("kind", ["even", "ragged"])
def test_cells_that_move_keep_their_keys_there(kind: str) -> None:
    session = fed()
    cells, rope = held(session.cache), session.cache.rope
    shape = (*cells.keys.shape[:2], len(cells))
    if kind == "ragged":
        which = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.3
        cells = Ragged.some(cells, which)
    moved = cells.moved(rope, torch.full_like(cells.positions, -3))
    back = Candidates(cells, rope, 1.0).unrotated
    for layer in range(4):
        own = slice(layer, layer + 1)
        if isinstance(cells, Ragged):
            own = cells.of_head(layer, 0)
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

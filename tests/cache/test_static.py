"""The step that a CUDA graph replays, run eagerly: the same values, and the same cells written."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvkeep.cache import (
    AttentionConfig,
    KVCache,
    Layout,
    PositionMap,
    Ragged,
    Rope,
    Segment,
    Window,
)
from kvkeep.cache.static import StaticStep, geometry
from kvkeep.cache.step import DecodeStep

LAYOUT = Layout(layers=2, kv_heads=2, head_dim=8, dtype=torch.float32, device=torch.device("cpu"))
HEADS, KEPT, WINDOW = 6, 3, 7
ROPE = Rope((1.0, 0.3, 0.1, 0.03), LAYOUT.device)


def random_qkv(n: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    shapes = ((n, heads, LAYOUT.head_dim) for heads in (HEADS, LAYOUT.kv_heads, LAYOUT.kv_heads))
    q, k, v = (torch.randn(shape, generator=random) for shape in shapes)
    return q, k, v


def feed(cache: KVCache, count: int, seed: int) -> None:
    with cache.step(count) as step:
        for layer in range(LAYOUT.layers):
            step.attend(layer, *random_qkv(count, seed + layer))


def full(anchored: bool, compressed: str = "") -> KVCache:
    """A full ring; before it an anchor, and cells that each KV head chose, with biases.

    compressed: "evenly", as many in each head, or "ragged", where one head has none.
    """
    cache = KVCache(LAYOUT, AttentionConfig(HEADS, ROPE, 0.3))
    cache.window = Window(WINDOW)
    if anchored:
        cache.segments.append(Segment(LAYOUT, KEPT, anchor=True))
        feed(cache, KEPT, seed=1)
    if compressed:
        held = cache.segments[0].read(0, KEPT)
        cells = replace(
            held,
            positions=held.positions.expand(2, 2, -1).clone(),
            bias=torch.randn(2, 2, KEPT, generator=torch.Generator().manual_seed(5)),
        )
        if compressed == "ragged":
            which = torch.arange(4 * KEPT).remainder(4) < 3
            which[:KEPT] = False
            cells = Ragged.from_cells(cells).select(which)
        cache.segments = [Segment.from_cells(LAYOUT, cells, PositionMap(), True)]
    cache.segments.append(Segment(LAYOUT, WINDOW))
    feed(cache, WINDOW + 4, seed=2)
    return cache


@pytest.mark.parametrize(
    ("anchored", "compressed"), [(False, ""), (True, ""), (True, "evenly"), (True, "ragged")]
)
def test_token_by_token_it_writes_and_finds_what_the_ordinary_step_does(
    anchored: bool, compressed: str
) -> None:
    here, there = full(anchored, compressed), full(anchored, compressed)
    static, known = None, None
    for token in range(2 * WINDOW + 3):  # more than once around the ring
        with here.step(1) as step, there.step(1) as ordinary:
            assert isinstance(step, DecodeStep)
            if static is None:
                static, known = StaticStep(step), geometry(step)
            assert known is not None
            assert geometry(step) == known
            static.load(step)
            for layer in range(LAYOUT.layers):
                qkv = random_qkv(1, 100 * token + layer)
                found, wanted = static.attend(layer, *qkv), ordinary.attend(layer, *qkv)
                torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
        assert here.serials() == there.serials()
        for one, other in zip(here.segments, there.segments, strict=True):
            found_cells, wanted_cells = (s.read(0, s.length) for s in (one, other))
            torch.testing.assert_close(found_cells.keys, wanted_cells.keys)
            assert torch.equal(found_cells.values, wanted_cells.values)
            assert torch.equal(found_cells.positions, wanted_cells.positions)


def test_a_static_step_reads_its_buffers_when_it_runs_and_nothing_else() -> None:
    """What a recorded graph does: it was made at one token, and is replayed at others."""
    cache = full(True)
    with cache.step(1) as step:
        assert isinstance(step, DecodeStep)
        static = StaticStep(step)
        static.load(step)
        buffers = [static.slot, static.cosine, static.sine]
        addresses = [buffer.data_ptr() for buffer in buffers]
        for layer in range(LAYOUT.layers):
            static.attend(layer, *random_qkv(1, layer))
    with cache.step(1) as step:
        assert isinstance(step, DecodeStep)
        before = [buffer.clone() for buffer in buffers]
        static.load(step)
        assert [buffer.data_ptr() for buffer in buffers] == addresses
        assert not any(torch.equal(a, b) for a, b in zip(buffers, before, strict=True))
        for layer in range(LAYOUT.layers):
            static.attend(layer, *random_qkv(1, layer))


def test_what_a_ring_without_an_end_or_with_queries_to_keep_does_is_not_replayed() -> None:
    growing = KVCache(LAYOUT, AttentionConfig(HEADS, ROPE, 0.3))
    growing.segments.append(Segment(LAYOUT, 100))
    watched = full(True)
    watched.observe()
    for cache in (growing, watched):
        with cache.step(1) as step:
            assert isinstance(step, DecodeStep)
            assert geometry(step) is None
            for layer in range(LAYOUT.layers):
                step.attend(layer, *random_qkv(1, layer))

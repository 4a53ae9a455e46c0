"""The step that a CUDA graph replays, run eagerly: same outputs and same cells."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvkeep.cache import (
    AttentionConfig,
    KVCache,
    Layout,
    PositionMap,
    RaggedCells,
    Rope,
    Segment,
    Window,
)
from kvkeep.cache.static import StaticStep, replay_key
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


def cache_with_full_ring(anchored: bool, compressed: str = "") -> KVCache:
    """A cache with a full ring, and before it an anchor, of plain or of compressed cells.

    compressed: "evenly" for equal counts, or "ragged", where one head has no cell.
    """
    cache = KVCache(LAYOUT, AttentionConfig(HEADS, ROPE, 0.3))
    cache.window = Window(WINDOW)
    if anchored:
        cache.segments.append(Segment(LAYOUT, KEPT, is_anchor=True))
        feed(cache, KEPT, seed=1)
    if compressed:
        held = cache.segments[0].read(0, KEPT)
        cells = replace(
            held,
            positions=held.positions.expand(2, 2, -1).clone(),
            bias=torch.randn(2, 2, KEPT, generator=torch.Generator().manual_seed(5)),
        )
        if compressed == "ragged":
            mask = torch.arange(4 * KEPT).remainder(4) < 3
            mask[:KEPT] = False
            cells = RaggedCells.select_from(RaggedCells.from_cells(cells), mask)
        cache.segments = [Segment.from_cells(LAYOUT, cells, PositionMap(), True)]
    cache.segments.append(Segment(LAYOUT, WINDOW))
    feed(cache, WINDOW + 4, seed=2)
    return cache


@pytest.mark.parametrize(
    ("anchored", "compressed"), [(False, ""), (True, ""), (True, "evenly"), (True, "ragged")]
)
def test_a_static_step_equals_the_ordinary_step(anchored: bool, compressed: str) -> None:
    static_cache, plain_cache = (
        cache_with_full_ring(anchored, compressed),
        cache_with_full_ring(anchored, compressed),
    )
    static, recorded = None, None
    for token in range(2 * WINDOW + 3):  # more than once around the ring
        with static_cache.step(1) as step, plain_cache.step(1) as ordinary:
            assert isinstance(step, DecodeStep)
            if static is None:
                static, recorded = StaticStep(step), replay_key(step)
            assert recorded is not None
            assert replay_key(step) == recorded
            static.load(step)
            for layer in range(LAYOUT.layers):
                qkv = random_qkv(1, 100 * token + layer)
                actual, expected = static.attend(layer, *qkv), ordinary.attend(layer, *qkv)
                torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
        assert static_cache.serials() == plain_cache.serials()
        for one, other in zip(static_cache.segments, plain_cache.segments, strict=True):
            actual_cells, expected_cells = (s.read(0, s.length) for s in (one, other))
            torch.testing.assert_close(actual_cells.keys, expected_cells.keys)
            assert torch.equal(actual_cells.values, expected_cells.values)
            assert torch.equal(actual_cells.positions, expected_cells.positions)


def test_a_static_step_depends_on_its_buffers_alone() -> None:
    """A recorded graph was made at one token, and is replayed at others."""
    cache = cache_with_full_ring(True)
    with cache.step(1) as step:
        assert isinstance(step, DecodeStep)
        static = StaticStep(step)
        static.load(step)
        buffers = [static.slot_index, static.cosine, static.sine]
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


def test_a_growing_segment_or_recorded_queries_cannot_be_replayed() -> None:
    growing = KVCache(LAYOUT, AttentionConfig(HEADS, ROPE, 0.3))
    growing.segments.append(Segment(LAYOUT, 100))
    watched = cache_with_full_ring(True)
    watched.observe()
    for cache in (growing, watched):
        with cache.step(1) as step:
            assert isinstance(step, DecodeStep)
            assert replay_key(step) is None
            for layer in range(LAYOUT.layers):
                step.attend(layer, *random_qkv(1, layer))

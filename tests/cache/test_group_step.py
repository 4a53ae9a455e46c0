"""Group steps equal single steps, and view shared storage once."""

from collections.abc import Callable
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
from kvkeep.cache.attention import MASK_BIAS
from kvkeep.cache.group_step import GroupStep, SharedView, shared_views

LAYOUT = Layout(layers=2, kv_heads=2, head_dim=8, dtype=torch.float32, device=torch.device("cpu"))
HEADS = 6
ROPE = Rope((1.0, 0.3, 0.1, 0.03), LAYOUT.device)


def random_qkv(n: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    shapes = ((n, heads, LAYOUT.head_dim) for heads in (HEADS, LAYOUT.kv_heads, LAYOUT.kv_heads))
    q, k, v = (torch.randn(shape, generator=random) for shape in shapes)
    return q, k, v


def feed(cache: KVCache, count: int, seed: int = 0) -> KVCache:
    newest = cache.segments[-1] if cache.segments else None
    if newest is None or newest.frozen:
        cache.segments.append(Segment(LAYOUT, 100))
    with cache.step(count) as step:
        for layer in range(LAYOUT.layers):
            step.attend(layer, *random_qkv(count, seed * 10 + layer))
    return cache


def new_cache(window: int | None = None) -> KVCache:
    cache = KVCache(LAYOUT, AttentionConfig(HEADS, ROPE, 0.3))
    if window is not None:
        cache.window = Window(window)
        cache.segments.append(Segment(LAYOUT, window))
    return cache


def forks(count: int) -> list[KVCache]:
    """Caches that share 12 cells and have 1, 2, ... of their own."""
    parent = feed(new_cache(), 12)
    return [feed(parent.fork(), own + 1, seed=own) for own in range(count)]


def forks_with_windows() -> list[KVCache]:
    """Caches that share a window of 12, from which each has evicted a different number of cells."""
    parent = feed(new_cache(window=20), 12)
    return [feed(parent.fork(), count, seed=count) for count in (3, 9, 14)]


def forks_of_forks() -> list[KVCache]:
    first, second = forks(2)
    return [first, second, feed(first.fork(), 2), feed(first.fork(), 3)]


def with_ragged_cells() -> KVCache:
    """A cache with ragged cells, 5, 0, 12 and 7 for each head, and 3 newer cells."""
    cache = feed(new_cache(), 12)
    held = cache.segments[0].read(0, 12)
    compressed = replace(
        held,
        positions=held.positions.expand(2, 2, -1),
        bias=torch.randn(2, 2, 12, generator=torch.Generator().manual_seed(3)),
    )
    mask = torch.arange(12) < torch.tensor([5, 0, 12, 7])[:, None]
    ragged_cells = RaggedCells.select_from(compressed, mask.view(2, 2, -1))
    cache.segments = [Segment.from_cells(LAYOUT, ragged_cells, PositionMap(-2), False)]
    return feed(cache, 3, seed=4)


def forks_of_ragged_cells() -> list[KVCache]:
    parent = with_ragged_cells()
    others = [feed(parent.fork(), own + 1, seed=own) for own in range(3)]
    return [*others, feed(new_cache(), 5)]


def unrelated_caches() -> list[KVCache]:
    return [feed(new_cache(), 5), feed(new_cache(window=4), 9, seed=1), feed(new_cache(), 1)]


def decode_together(caches: list[KVCache], seed: int) -> tuple[list[Tensor], GroupStep]:
    """Decode one token of each cache in one group step; one output for each layer."""
    contexts = [cache.step(1) for cache in caches]
    step = GroupStep([each.__enter__() for each in contexts])  # type: ignore[misc]
    attention = step.layer_attention
    outs = [
        attention.attend(layer, *random_qkv(len(caches), seed + layer))
        for layer in range(LAYOUT.layers)
    ]
    for each in contexts:
        each.__exit__(None, None, None)
    return outs, step


def decode_alone(caches: list[KVCache], seed: int) -> list[Tensor]:
    outs: list[list[Tensor]] = [[] for _ in range(LAYOUT.layers)]
    for index, cache in enumerate(caches):
        with cache.step(1) as step:
            for layer in range(LAYOUT.layers):
                q, k, v = (x[index : index + 1] for x in random_qkv(len(caches), seed + layer))
                outs[layer].append(step.attend(layer, q, k, v))
    return [torch.cat(each) for each in outs]


@pytest.mark.parametrize(
    "make",
    [
        lambda: forks(1),
        lambda: forks(5),
        forks_with_windows,
        forks_of_forks,
        forks_of_ragged_cells,
        unrelated_caches,
    ],
)
def test_a_group_step_equals_single_steps(make: Callable[[], list[KVCache]]) -> None:
    together, alone = make(), make()
    for token in range(25):
        expected = decode_alone(alone, seed=100 + token)
        for actual, expected_segment in zip(
            decode_together(together, 100 + token)[0], expected, strict=True
        ):
            assert (actual - expected_segment).abs().max() <= 1e-5
    for cache, other in zip(together, alone, strict=True):
        assert cache.serials() == other.serials()
        assert cache.time == other.time
        for segment, expected_segment in zip(cache.segments, other.segments, strict=True):
            assert segment.position_map == expected_segment.position_map
            read, expected_cells = (
                segment.read(0, segment.length),
                expected_segment.read(0, expected_segment.length),
            )
            assert torch.equal(read.positions, expected_cells.positions)
            assert (read.keys - expected_cells.keys).abs().max() <= 1e-5


def cells(view: SharedView) -> int:
    return int(view.slot_range.stop - view.slot_range.start)


def test_cells_shared_by_forks_are_viewed_once() -> None:
    step = decode_together(forks(5), 0)[1]
    views = shared_views(step.steps)
    assert [cells(view) for view in views] == [12, 2, 3, 4, 5, 6]
    assert views[0].bias is None


def test_forks_of_forks_share_every_common_range() -> None:
    caches = forks_of_forks()
    step = decode_together(caches, 0)[1]
    # The root's 12 cells, which all see; the first fork's one cell, where its own forks share it
    # (its storage has since grown and moved); and the cells that only one cache has.
    assert [cells(view) for view in shared_views(step.steps)] == [12, 2, 3, 1, 3, 4]


def test_a_shared_window_hides_from_each_cache_what_it_evicted() -> None:
    caches = forks_with_windows()
    step = decode_together(caches, 0)[1]
    shared = max(shared_views(step.steps), key=lambda view: cells(view) * (view.bias is not None))
    assert cells(shared) == 12
    assert shared.bias is not None
    assert (shared.bias == MASK_BIAS).sum(1).tolist() == [0, 2, 7]


def test_ragged_cells_shared_by_forks_are_viewed_once() -> None:
    views = shared_views(decode_together(forks_of_ragged_cells(), 0)[1].steps)
    ragged = [view for view in views if isinstance(view.slots, RaggedCells)]
    assert [len(view.readers) for view in ragged] == [3]
    assert len(views) == 6  # that one, the parent's newer cells, and four caches' own cells


def test_unrelated_caches_share_no_view() -> None:
    assert len(shared_views(decode_together(unrelated_caches(), 0)[1].steps)) == 3

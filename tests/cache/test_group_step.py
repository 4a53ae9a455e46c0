"""What several caches read together, and that it is what each reads alone."""

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
    Ragged,
    Rope,
    Segment,
    Window,
)
from kvkeep.cache.attention import HIDDEN
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
    cache = KVCache(LAYOUT, AttentionConfig(2 * LAYOUT.kv_heads, ROPE, 0.3))
    if window is not None:
        cache.window = Window(window)
        cache.segments.append(Segment(LAYOUT, window))
    return cache


def forks(count: int) -> list[KVCache]:
    """Caches that share 12 cells and have 1, 2, ... of their own."""
    parent = feed(new_cache(), 12)
    return [feed(parent.fork(), own + 1, seed=own) for own in range(count)]


def forks_of_a_window() -> list[KVCache]:
    """Caches that share a window of 12, of which each has forgotten another number of cells."""
    parent = feed(new_cache(window=20), 12)
    return [feed(parent.fork(), count, seed=count) for count in (3, 9, 14)]


def forks_of_forks() -> list[KVCache]:
    first, second = forks(2)
    return [first, second, feed(first.fork(), 2), feed(first.fork(), 3)]


def with_ragged_cells() -> KVCache:
    """A cache with 12 cells, of which heads have 5, 0, 12 and 7 left, and 3 newer ones."""
    cache = feed(new_cache(), 12)
    held = cache.segments[0].read(0, 12)
    compressed = replace(
        held,
        positions=held.positions.expand(2, 2, -1),
        bias=torch.randn(2, 2, 12, generator=torch.Generator().manual_seed(3)),
    )
    which = torch.arange(12) < torch.tensor([5, 0, 12, 7])[:, None]
    left = Ragged.from_cells(compressed).select(which.flatten())
    cache.segments = [Segment.from_cells(LAYOUT, left, PositionMap(-2), False)]
    return feed(cache, 3, seed=4)


def forks_of_ragged_cells() -> list[KVCache]:
    parent = with_ragged_cells()
    others = [feed(parent.fork(), own + 1, seed=own) for own in range(3)]
    return [*others, feed(new_cache(), 5)]


def strangers() -> list[KVCache]:
    return [feed(new_cache(), 5), feed(new_cache(window=4), 9, seed=1), feed(new_cache(), 1)]


def decode_together(caches: list[KVCache], seed: int) -> tuple[list[Tensor], GroupStep]:
    """One token each, of all layers."""
    opened = [cache.step(1) for cache in caches]
    step = GroupStep([each.__enter__() for each in opened], HEADS)  # type: ignore[misc]
    outs = [
        step.attend(layer, *random_qkv(len(caches), seed + layer)) for layer in range(LAYOUT.layers)
    ]
    for each in opened:
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
        forks_of_a_window,
        forks_of_forks,
        forks_of_ragged_cells,
        strangers,
    ],
)
def test_together_equals_each_alone(make: Callable[[], list[KVCache]]) -> None:
    together, alone = make(), make()
    for token in range(25):
        expected = decode_alone(alone, seed=100 + token)
        for found, wanted in zip(decode_together(together, 100 + token)[0], expected, strict=True):
            assert (found - wanted).abs().max() <= 1e-5
    for cache, other in zip(together, alone, strict=True):
        assert cache.serials() == other.serials()
        assert cache.time == other.time
        for segment, wanted in zip(cache.segments, other.segments, strict=True):
            assert segment.map == wanted.map
            read, expected_cells = segment.read(0, segment.length), wanted.read(0, wanted.length)
            assert torch.equal(read.positions, expected_cells.positions)
            assert (read.keys - expected_cells.keys).abs().max() <= 1e-5


def cells(sight: SharedView) -> int:
    return int(sight.span.stop - sight.span.start)


def test_what_forks_share_is_read_once_and_each_tail_by_its_own() -> None:
    step = decode_together(forks(5), 0)[1]
    found = shared_views(step.steps)
    assert [cells(sight) for sight in found] == [12, 2, 3, 4, 5, 6]
    assert found[0].bias is None


def test_forks_of_forks_share_each_stretch_that_they_have_in_common() -> None:
    caches = forks_of_forks()
    step = decode_together(caches, 0)[1]
    # The root's 12, which all see; the first branch's one, where its forks found it (its own
    # storage grew and moved); and what each branch has to itself.
    assert [cells(sight) for sight in shared_views(step.steps)] == [12, 2, 3, 1, 3, 4]


def test_a_shared_window_is_read_once_and_hides_from_each_what_it_forgot() -> None:
    caches = forks_of_a_window()
    step = decode_together(caches, 0)[1]
    shared = max(
        shared_views(step.steps), key=lambda sight: cells(sight) * (sight.bias is not None)
    )
    assert cells(shared) == 12
    assert shared.bias is not None
    assert (shared.bias == HIDDEN).sum(1).tolist() == [0, 2, 7]


def test_what_forks_share_of_ragged_cells_is_read_once() -> None:
    found = shared_views(decode_together(forks_of_ragged_cells(), 0)[1].steps)
    ragged = [sight for sight in found if isinstance(sight.slots, Ragged)]
    assert [len(sight.readers) for sight in ragged] == [3]
    assert len(found) == 6  # that, the newer cells of the parent, and what each has of its own


def test_strangers_share_nothing() -> None:
    assert len(shared_views(decode_together(strangers(), 0)[1].steps)) == 3

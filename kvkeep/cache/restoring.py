"""The contents of one cache for another of its kind, whose storage and device may differ."""

from collections.abc import Sequence
from dataclasses import replace

from kvkeep.cache.cache import KVCache
from kvkeep.cache.checkpoint import Checkpoint
from kvkeep.cache.checks import require
from kvkeep.cache.observer import Queries
from kvkeep.cache.segment import Segment
from kvkeep.cache.state import CacheState


def restored_cache(kind: KVCache, state: CacheState) -> KVCache:
    """Return a cache for the same kind of cells as `kind`, with another one's contents.

    Raises ValueError if no cache of this kind can have them.
    """
    local_layout = None if kind.local_cache is None else kind.local_cache.layout
    state.check(kind.layout, kind.far_layout, kind.attention.heads, local_layout)
    cache, device = kind.new_empty(), kind.layout.device
    cache.segments = [s.share().normalise().to(device) for s in state.segments]
    if (local_cache := cache.local_cache) is not None:
        _require_capacity(local_cache, state.local_segments)
        local_cache.segments = [s.share().normalise().to(device) for s in state.local_segments]
    cache.window, cache.time, cache.serial = state.window, state.time, state.serial
    states = state.recurrent_states
    cache.recurrent_states = {name: value.to(device) for name, value in states.items()}
    if state.observed_queries is not None:
        queries = state.observed_queries.vectors.to(device)
        cache.observe(Queries(queries, state.observed_queries.times))
    return cache


def restored_checkpoint(kind: KVCache, checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint of another cache of this kind, for caches like `kind`.

    Raises ValueError if its local windows are not those of this kind.
    """
    device, local_cache = kind.layout.device, kind.local_cache
    segments = [s.share().normalise().to(device) for s in checkpoint.local_segments]
    if local_cache is not None:
        _require_capacity(local_cache, segments)
        size, cell_count = local_cache.window.size or 0, sum(s.length for s in segments)
        is_whole = cell_count >= min(size - 1, checkpoint.num_tokens)
        require(is_whole, "a checkpoint with a part of a local window")
    states = {name: state.to(device) for name, state in checkpoint.recurrent_states.items()}
    return replace(checkpoint, local_segments=tuple(segments), recurrent_states=states)


def _require_capacity(local_cache: KVCache, segments: Sequence[Segment]) -> None:
    """Raise ValueError if a local cache cannot hold all of these segments."""
    capacity = local_cache.window.capacity or 0
    cell_count = sum(segment.length for segment in segments)
    limit = max((segment.limit for segment in segments), default=0)
    fits = max(cell_count, limit) <= capacity
    require(fits, f"{cell_count} cells of local layers, which have room for {capacity}")

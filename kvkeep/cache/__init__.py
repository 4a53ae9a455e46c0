"""The KV cache: segments, position maps, attention over segments. Pure torch."""

from kvkeep.cache.block import Block, Layout
from kvkeep.cache.cache import KVCache
from kvkeep.cache.position_map import PositionMap
from kvkeep.cache.rope import Rope
from kvkeep.cache.segment import Segment, runs

__all__ = ["Block", "KVCache", "Layout", "PositionMap", "Rope", "Segment", "runs"]

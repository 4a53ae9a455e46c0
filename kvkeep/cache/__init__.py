"""The KV cache: segments, position maps, attention over segments. Pure torch."""

from kvkeep.cache.attending import AttentionConfig
from kvkeep.cache.bits import BITS, Bits
from kvkeep.cache.block import NO_TOKEN, Block, Cells, Layout
from kvkeep.cache.cache import KVCache
from kvkeep.cache.joining import merge_segments, merge_small_segments
from kvkeep.cache.layers import LayerAttention, LayerPlacement
from kvkeep.cache.observer import Observer, Queries
from kvkeep.cache.position_map import PositionMap
from kvkeep.cache.ragged import Ragged
from kvkeep.cache.rope import Rope
from kvkeep.cache.segment import Segment
from kvkeep.cache.state import CacheState
from kvkeep.cache.window import Window

__all__ = [
    "BITS",
    "NO_TOKEN",
    "AttentionConfig",
    "Bits",
    "Block",
    "CacheState",
    "Cells",
    "KVCache",
    "LayerAttention",
    "LayerPlacement",
    "Layout",
    "Observer",
    "PositionMap",
    "Queries",
    "Ragged",
    "Rope",
    "Segment",
    "Window",
    "merge_segments",
    "merge_small_segments",
]

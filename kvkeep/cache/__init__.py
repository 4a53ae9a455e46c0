"""The KV cache: segments, position maps, attention over segments. Pure torch."""

from kvkeep.cache.attention import AttentionConfig, softcapped
from kvkeep.cache.block import NO_TOKEN, Block, Cells
from kvkeep.cache.cache import KVCache
from kvkeep.cache.cell_runs import are_in
from kvkeep.cache.layout import BITS, Bits, Layout
from kvkeep.cache.observer import Queries
from kvkeep.cache.ragged import RaggedCells
from kvkeep.cache.rope import PositionMap, Rope
from kvkeep.cache.segment import Segment
from kvkeep.cache.state import CacheState
from kvkeep.cache.step import LayerAttention, LayerPlacement
from kvkeep.cache.storage import merge_segments, merge_small_segments
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
    "PositionMap",
    "Queries",
    "RaggedCells",
    "Rope",
    "Segment",
    "Window",
    "are_in",
    "merge_segments",
    "merge_small_segments",
    "softcapped",
]

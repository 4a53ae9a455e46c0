"""The KV cache: segments, position maps, attention over segments. Pure torch."""

from kvkeep.cache.attending import Attending
from kvkeep.cache.bits import BITS, Bits
from kvkeep.cache.block import NO_TOKEN, Block, Cells, Layout
from kvkeep.cache.cache import KVCache
from kvkeep.cache.joining import joined, joined_if_small
from kvkeep.cache.layers import Attends, Place
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
    "Attending",
    "Attends",
    "Bits",
    "Block",
    "CacheState",
    "Cells",
    "KVCache",
    "Layout",
    "Observer",
    "Place",
    "PositionMap",
    "Queries",
    "Ragged",
    "Rope",
    "Segment",
    "Window",
    "joined",
    "joined_if_small",
]

"""Compression methods: which cells remain, and what becomes of the others."""

from kvkeep.compression.methods.apply import (
    Compression,
    check_shares,
    compress,
    compress_and_join,
    compress_by_heads,
)
from kvkeep.compression.methods.attention import H2O, TOVA, ExpectedAttention, SnapKV
from kvkeep.compression.methods.base import (
    BUDGETS,
    Budget,
    Candidates,
    Eviction,
    Method,
    as_compressed,
)
from kvkeep.compression.methods.baselines import Average, KeyDiff, KNorm, PickHeads, Random, Sum
from kvkeep.compression.methods.fitted import Fitted
from kvkeep.compression.methods.kvzip import KVzap, KVzip, KVzipPlus
from kvkeep.compression.methods.statistics import Statistics
from kvkeep.errors import InvalidArgument

__all__ = [
    "BEST",
    "BUDGETS",
    "METHODS",
    "Budget",
    "Candidates",
    "Compression",
    "Eviction",
    "Method",
    "Statistics",
    "as_compressed",
    "best_method",
    "check_shares",
    "compress",
    "compress_and_join",
    "compress_by_heads",
    "make_method",
]

_ALL: tuple[type[Method], ...] = (
    Random,
    KNorm,
    KeyDiff,
    ExpectedAttention,
    SnapKV,
    H2O,
    TOVA,
    Average,
    Sum,
    PickHeads,
    Fitted,
    KVzip,
    KVzipPlus,
    KVzap,
)
METHODS = {method.name: method for method in _ALL}
BEST = Fitted.name


def best_method(statistics: Statistics | None) -> str:
    """Return the name of the default method of an archive with these statistics."""
    has_surrogate = statistics is not None and statistics.surrogate is not None
    return KVzap.name if has_surrogate else BEST


def make_method(name: str) -> Method:
    """Return the method of that name. Raises InvalidArgument if there is none."""
    if name not in METHODS:
        raise InvalidArgument(f"method must be one of {', '.join(METHODS)}; found {name!r}")
    return METHODS[name]()

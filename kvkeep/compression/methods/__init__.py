"""Compression methods: which cells stay, and what becomes of the others. One file, one method."""

from kvkeep.compression.methods.average import Average
from kvkeep.compression.methods.base import Candidates, Compressed, Eviction, Method, as_compressed
from kvkeep.compression.methods.budget import BUDGETS, Budget, best_of_all, check_budget
from kvkeep.compression.methods.compression import (
    Compression,
    check_shared,
    compress,
    compress_by_heads,
    fewer_together,
    score,
)
from kvkeep.compression.methods.expected_attention import ExpectedAttention
from kvkeep.compression.methods.fitted import Fitted
from kvkeep.compression.methods.h2o import H2O
from kvkeep.compression.methods.keydiff import KeyDiff
from kvkeep.compression.methods.knorm import KNorm
from kvkeep.compression.methods.kvzap import KVzap
from kvkeep.compression.methods.kvzip import KVzip
from kvkeep.compression.methods.kvzip_plus import KVzipPlus
from kvkeep.compression.methods.pick_heads import PickHeads
from kvkeep.compression.methods.random import Random
from kvkeep.compression.methods.snapkv import SnapKV
from kvkeep.compression.methods.statistics import Statistics
from kvkeep.compression.methods.sum import Sum
from kvkeep.compression.methods.tova import TOVA
from kvkeep.errors import InvalidArgument

__all__ = [
    "BEST",
    "BUDGETS",
    "METHODS",
    "Budget",
    "Candidates",
    "Compressed",
    "Compression",
    "Eviction",
    "Method",
    "Statistics",
    "as_compressed",
    "best_method",
    "best_of_all",
    "check_budget",
    "check_shared",
    "compress",
    "compress_by_heads",
    "fewer_together",
    "make_method",
    "score",
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
    """The one that an archive decides by unless it is told another."""
    known = statistics is not None and statistics.surrogate is not None
    return KVzap.name if known else BEST


def make_method(name: str) -> Method:
    """The method of that name. Raises InvalidArgument where there is none."""
    if name not in METHODS:
        raise InvalidArgument(f"method must be one of {', '.join(METHODS)}; found {name!r}")
    return METHODS[name]()

"""Compression methods: which cells remain, and what becomes of the others."""

from kvkeep.compression.methods.attention import H2O, TOVA, ExpectedAttention, SnapKV
from kvkeep.compression.methods.base import Method
from kvkeep.compression.methods.baselines import Average, KeyDiff, KNorm, PickHeads, Random, Sum
from kvkeep.compression.methods.fitted import Fitted
from kvkeep.compression.methods.kvzip import KVzap, KVzip, KVzipExact, KVzipPlus
from kvkeep.compression.methods.statistics import Statistics
from kvkeep.errors import InvalidArgument

_ALL: tuple[type[Method], ...] = (
    *(Random, KNorm, KeyDiff, ExpectedAttention, SnapKV, H2O, TOVA),
    *(Average, Sum, PickHeads, Fitted, KVzip, KVzipExact, KVzipPlus, KVzap),
)
METHODS = {method.name: method for method in _ALL}
BEST_UNCALIBRATED = Fitted.name


def best_method(statistics: Statistics | None) -> str:
    """Return the name of an archive's default method."""
    has_surrogate = statistics is not None and statistics.surrogate is not None
    return KVzap.name if has_surrogate else BEST_UNCALIBRATED


def make_method(name: str) -> Method:
    """Return a method by its name. Raises InvalidArgument for an unknown name."""
    if not isinstance(name, str) or name not in METHODS:
        raise InvalidArgument(f"method must be one of {', '.join(METHODS)}; found {name!r}")
    return METHODS[name]()

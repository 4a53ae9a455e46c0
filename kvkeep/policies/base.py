"""The interface of a policy: the choice of segments, and what happens at the budget."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

from kvkeep import validation
from kvkeep.cache import KVCache, Segment
from kvkeep.compression.methods.apply import Compression
from kvkeep.compression.methods.statistics import Statistics
from kvkeep.errors import InvalidArgument

# Old hook names and their new ones: a policy that defines an old one raises TypeError.
_RENAMED: Mapping[str, str] = {
    "calibrated": "with_calibration",
    "changed": "reconfigure",
    "check_held": "check_contents",
    "compresses": "allows_compression",
    "discards": "discard_count",
    "exact": "exact_tokens",
    "longest": "max_budget",
    "most_in_window": "window_limit",
    "observed": "query_count",
    "settle": "enforce_bounds",
}


@dataclass(frozen=True)
class Policy(ABC):
    """A rule for where new cells go and which ones stay; an immutable value.

    Sessions may share a policy: the cells are in the cache and the pins in the session, which
    passes both to the methods here. The constructor raises InvalidArgument for settings that are
    out of range or contradict each other.

    allows_compression: whether its caches may have compressed cells.
    max_kv_size: the most cells held after any call.
    """

    name: ClassVar[str]
    allows_compression: ClassVar[bool] = False
    max_kv_size: int

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Raise TypeError for a policy that defines an old hook name, which is never called."""
        super().__init_subclass__(**keywords)
        for name, new_name in _RENAMED.items():
            if hasattr(cls, name):
                raise TypeError(
                    f"{cls.__name__}.{name} is an old hook name that is never called: rename it to "
                    f"{new_name}"
                )

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.type is int:
                value = validation.integer(field.name, getattr(self, field.name))
                object.__setattr__(self, field.name, value)
        self.check()

    @property
    def keep(self) -> int:
        """The number of first cells that are never evicted."""
        return self.max_kv_size

    @property
    def exact_tokens(self) -> int:
        """The number of first tokens that fit before any is evicted, compressed or grouped."""
        return self.max_kv_size

    @property
    def pin_limit(self) -> int | None:
        """The most cells that pins may take beyond the first `keep`; None for no limit."""
        return None

    @property
    def query_count(self) -> int:
        """The number of newest queries by which the policy decides; a prefix cache has none."""
        return 0

    def max_budget(self, trained_length: int) -> int:
        """Return the largest budget for a model that was trained for `trained_length` positions."""
        return trained_length

    def for_model(self, trained_length: int) -> Self:
        """Return the policy for a model that was trained for `trained_length` positions.

        Raises InvalidArgument if distances could exceed what the model was trained for.
        """
        if self.max_kv_size > (limit := self.max_budget(trained_length)):
            raise InvalidArgument(
                f"max_kv_size must be 1 to {limit} for policy {self.name!r} and a model trained "
                f"for {trained_length} positions; found {self.max_kv_size}"
            )
        return self

    def check(self, pinned_count: int = 0) -> None:
        """Raise InvalidArgument if the settings do not fit together.

        pinned_count: number of cells that are pinned beyond the first `keep`.
        """
        validation.integer("max_kv_size", self.max_kv_size, 1)

    def check_pins(self, pinned_count: int, room: int, others: str = "") -> None:
        """Raise InvalidArgument if pins beyond the first `keep` cells take more than `room`.

        others: what needs room beside them and the first `keep`, in words.
        """
        if pinned_count > room:
            raise InvalidArgument(
                f"not enough room for pins: {pinned_count} cells would be pinned, and a budget of "
                f"{self.max_kv_size} has room for {room} beside the {self.keep} that are "
                f"kept{others}; pin or keep fewer tokens, or raise max_kv_size"
            )

    def pin_room(self, cache: KVCache, pins: Set[int]) -> int | None:
        """Return how many more cells can be pinned, beside the pins; None for no limit."""
        if self.pin_limit is None:
            return None
        return self.pin_limit - count_cells_to_pin(cache, self.keep, pins)

    def settings(self) -> dict[str, Any]:
        """Return the settings for `make_policy` as JSON values."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.repr}

    def with_settings(self, **settings: Any) -> Self:
        """Return the policy with other settings.

        Raises InvalidArgument for a setting that it does not have, or a value out of range.
        """
        for key in settings:
            if key not in self.settings():
                raise InvalidArgument(
                    f'policy "{self.name}" has no setting {key}; its settings are '
                    f"{', '.join(self.settings())}"
                )
        return replace(self, **settings)

    @property
    def calibrated_by(self) -> str:
        """The digest of the calibration in use; empty without one."""
        return ""

    @property
    def uses_stored_calibration(self) -> bool:
        """Whether a new session uses the model's stored calibration unless it gets another."""
        return False

    def with_calibration(self, statistics: Statistics, digest: str) -> Self:
        """Return the policy with a calibration's statistics. digest: `Calibration.digest`.

        Raises InvalidArgument if the policy does not use one.
        """
        raise InvalidArgument(
            f'policy "{self.name}" does not use a calibration: leave calibration out, or use '
            'policy="archive"'
        )

    def require_statistics(self) -> None:
        """Raise InvalidArgument if a needed calibration is missing."""
        return  # most policies need none

    def discard_count(self, cache: KVCache) -> int:
        """Return how many of the oldest cells are evicted at once at the budget; 0 for none."""
        return 0

    def check_contents(self, cache: KVCache) -> None:
        """Raise InvalidArgument if a cache's contents are impossible under this policy."""
        self.check(pinned_cell_count(cache, self.keep))
        require_valid(cache.cells <= self.max_kv_size, f"{cache.cells} cells of {self.max_kv_size}")
        for segment in cache.segments:
            is_bounded = segment.is_anchor or segment.wrapped
            fits = segment.limit <= self.max_kv_size or not is_bounded
            require_valid(fits, f"a limit of {segment.limit} cells, of {self.max_kv_size}")
            same_group = segment.position_map.group == self.group_of(segment)
            require_valid(same_group, "cells in groups of another size")
            require_valid(self.allows_compression or not segment.compressed, "compressed cells")
        limit, count = self.window_limit(cache), window_cell_count(cache)
        require_valid(count <= limit, f"{count} cells in a window of {limit}")

    def window_limit(self, cache: KVCache) -> int:
        """Return the maximum number of cells that are not anchors, between two steps."""
        return self.max_kv_size

    def lasting_count(self, cache: KVCache) -> int:
        """Return how many of the newest cells are surely in the window after any step."""
        return self.window_limit(cache) - self.discard_count(cache)

    def group_of(self, segment: Segment) -> int:
        """Return how many times share a position in the segment's map."""
        return 1

    def room(self, cache: KVCache) -> int | None:
        """Return how many more tokens the cache can take; None for no limit."""
        return None

    @abstractmethod
    def open(self, cache: KVCache, token_count: int, following_count: int = 0) -> int:
        """Make the last segment ready for the next tokens; called right before each step.

        Returns how many of the next `token_count` tokens go there in one step, at least 1.

        following_count: how many tokens are known to follow; storage for them is allocated, too.
        """

    def enforce_bounds(self, cache: KVCache) -> Sequence[Compression]:
        """Compress what exceeds the policy's bounds after a step; return reports of it."""
        return ()

    def reconfigure(self, cache: KVCache, pins: Set[int], **settings: Any) -> Self:
        """Adapt a cache in use to other settings and pins; return the policy with these settings.

        pins: serials of the tokens that are pinned from now on. Raises InvalidArgument, and then
        has changed nothing.
        """
        return self.with_settings(**settings)


def require_valid(condition: bool, contents: str) -> None:
    """Raise InvalidArgument, naming the contents, unless a cache of the policy can have them."""
    if not condition:
        raise InvalidArgument(f"a cache of this policy cannot have {contents}")


def window_cell_count(cache: KVCache) -> int:
    return sum(segment.length for segment in cache.segments if not segment.is_anchor)


def pinned_cell_count(cache: KVCache, keep: int) -> int:
    """Return how many uncompressed anchor cells there are beyond the first `keep`: the pins."""
    anchors = (s for s in cache.segments if s.is_anchor and not s.compressed)
    return max(0, sum(segment.length for segment in anchors) - keep)


def count_cells_to_pin(cache: KVCache, keep: int, pins: Set[int]) -> int:
    """Return how many cells beyond the first `keep` are of tokens with the serials `pins`."""
    return len(pins & set(cache.serials()[keep:])) if pins else 0


def open_anchors(cache: KVCache, keep: int, token_count: int) -> int:
    """Make the last segment ready for the first `keep` cells, until the cache has all of them.

    Returns how many of the next `token_count` tokens go there; 0 if the window comes next.
    """
    missing_count = keep - cache.cells
    if missing_count <= 0 or any(not segment.is_anchor for segment in cache.segments):
        return 0
    newest = cache.segments[-1] if cache.segments else None
    if newest is None or not newest.reopen(newest.length + missing_count):
        newest = cache.begin_segment(missing_count, is_anchor=True)
    newest.reserve(newest.limit)
    return min(token_count, missing_count)

"""What a policy is: the choice of segments, and what happens when the budget is reached."""

from abc import ABC, abstractmethod
from collections.abc import Sequence, Set
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

from kvkeep import validation
from kvkeep.cache import KVCache, Segment
from kvkeep.compression.methods import Compression, Statistics
from kvkeep.errors import InvalidArgument


@dataclass(frozen=True)
class Policy(ABC):
    """Decides where new cells go and which ones stay; a value that many sessions may share.

    The cells are in the cache, and which tokens are pinned is the session's business: a policy is
    handed both. Numbers that are out of range or do not go together raise InvalidArgument when it
    is made.

    max_kv_size: the most cells held after any call.
    """

    name: ClassVar[str]
    max_kv_size: int

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.type is int:
                self._set(field.name, validation.whole(field.name, getattr(self, field.name)))
        self.check()

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @property
    @abstractmethod
    def keep(self) -> int:
        """How many of the first cells stay for ever."""

    @property
    @abstractmethod
    def exact(self) -> int:
        """How many first tokens are held, and see each other, as if every token were.

        That is, before any is forgotten, compressed or grouped.
        """

    @property
    def observed(self) -> int:
        """How many of the newest tokens' queries it decides by: they are to be evaluated here."""
        return 0

    def longest(self, trained: int) -> int:
        """The largest budget that it can have for a model trained to `trained` positions."""
        return trained

    def for_model(self, trained: int) -> Self:
        """The same policy for a model trained to `trained` positions.

        Raises InvalidArgument where that model cannot look as far as the policy would need.
        """
        if self.max_kv_size > (most := self.longest(trained)):
            raise InvalidArgument(
                f"max_kv_size must be 1 to {most}, what policy {self.name!r} can do with a model "
                f"trained for {trained} positions; found {self.max_kv_size}"
            )
        return self

    def check(self, pinned: int = 0) -> None:
        """Raises InvalidArgument where its numbers do not go together.

        pinned: cells that are pinned beyond the first `keep`.
        """
        validation.whole("max_kv_size", self.max_kv_size, 1)

    def settings(self) -> dict[str, Any]:
        """What `make_policy` needs, beside the name, to make this policy again; JSON values."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.repr}

    def with_settings(self, **settings: Any) -> Self:
        """The same with other settings. Raises InvalidArgument for one that it does not have."""
        for key in settings:
            if key not in self.settings():
                raise InvalidArgument(
                    f'{key} has no meaning for policy "{self.name}"; its settings are '
                    f"{', '.join(self.settings())}"
                )
        return replace(self, **settings)

    @property
    def calibrated_by(self) -> str:
        """The digest of the calibration that it decides by; empty without one."""
        return ""

    def calibrated(self, statistics: Statistics, digest: str) -> Self:
        """The same, deciding by what is known of the model; digest: of that.

        Raises InvalidArgument for a policy that has no use for it.
        """
        raise InvalidArgument(f'policy "{self.name}" has no use for a calibration')

    def require_known(self) -> None:
        """Raises InvalidArgument where it would decide by a calibration that it was not given."""
        return  # most decide by none

    def discards(self, cache: KVCache) -> int:
        """How many of the oldest cells go at once at the budget; 0 where they do not."""
        return 0

    def check_held(self, cache: KVCache) -> None:
        """Raises InvalidArgument where under this policy no cache could be as this one is."""
        self.check(pinned_cells(cache, self.keep))
        _require(cache.cells <= self.max_kv_size, f"{cache.cells} cells of {self.max_kv_size}")
        for segment in cache.segments:
            bounded = segment.anchor or segment.wrapped
            _require(
                not bounded or segment.limit <= self.max_kv_size,
                f"room for {segment.limit} cells, of {self.max_kv_size}",
            )
            _require(segment.map.group == self.group_of(segment), "cells grouped in another way")
            _require(self.compresses or not segment.compressed, "compressed cells")
        window = self.most_in_window(cache)
        inside = sum(segment.length for segment in cache.segments if not segment.anchor)
        _require(inside <= window, f"{inside} cells in a window of {window}")

    @abstractmethod
    def most_in_window(self, cache: KVCache) -> int:
        """The most cells that are no anchors, between two steps."""

    def group_of(self, segment: Segment) -> int:
        """How many positions are one in the segment's map."""
        return 1

    @property
    def compresses(self) -> bool:
        """Whether there may be compressed cells."""
        return False

    @abstractmethod
    def room(self, cache: KVCache) -> int | None:
        """How many more tokens the cache can take; None if there is no end."""

    @abstractmethod
    def open(self, cache: KVCache, wanted: int, ahead: int = 0) -> int:
        """Makes the last segment the one for the next tokens, right before they come.

        Returns how many of the `wanted` (at least 1) go there in one step: at least 1. ahead: how
        many are known to follow, so that storage need not grow for each step.
        """

    def settle(self, cache: KVCache) -> Sequence[Compression]:
        """Puts the cache in order once a step is done. Returns what was compressed."""
        return ()

    def changed(self, cache: KVCache, pins: Set[int], **settings: Any) -> Self:
        """The same with other settings, for a cache in use, which is put in order.

        pins: serials of the pinned tokens from now on. Raises InvalidArgument before changing
        anything.
        """
        return self.with_settings(**settings)


def _require(holds: bool, found: str) -> None:
    if not holds:
        raise InvalidArgument(f"no cache of this policy could be so: found {found}")


def pinned_cells(cache: KVCache, keep: int) -> int:
    """How many cells are anchors beyond the first `keep`: the pinned ones."""
    anchors = (s for s in cache.segments if s.anchor and not s.compressed)
    return max(0, sum(segment.length for segment in anchors) - keep)


def pinned_beyond(cache: KVCache, keep: int, pins: Set[int]) -> int:
    """How many cells would be, if the tokens with serials `pins` were pinned."""
    return sum(serial in pins for serial in cache.serials()[keep:])


def open_anchors(cache: KVCache, keep: int, wanted: int) -> int:
    """Makes the last segment the one for the first `keep` cells, until all of them are there.

    Returns how many of the `wanted` tokens go there; 0 once a window may begin.
    """
    missing = keep - cache.cells
    if missing <= 0 or any(not segment.anchor for segment in cache.segments):
        return 0
    newest = cache.segments[-1] if cache.segments else None
    if newest is None or not newest.reopen(newest.length + missing):
        newest = Segment(cache.far_layout, missing, anchor=True)
        cache.segments.append(newest)
    newest.reserve(newest.limit)
    return min(wanted, missing)

"""What a policy is: the choice of segments, and what happens when the budget is reached."""

from collections.abc import Sequence, Set
from typing import Any, ClassVar, Protocol

from kvkeep.cache import KVCache, Segment
from kvkeep.methods import Compression


class Policy(Protocol):
    """Decides where new cells go and which ones stay. The cells themselves are in the cache.

    max_kv_size: the most cells held after any call.
    keep: how many of the first cells stay for ever.
    pinned: how many cells beyond those are pinned.
    exact: how many first tokens are held, and see each other, as if every token were: before any
        is forgotten, compressed or grouped.
    observed: how many of the newest tokens' queries it decides by: they are to be evaluated here.
    """

    name: ClassVar[str]
    max_kv_size: int
    keep: int
    pinned: int

    @property
    def exact(self) -> int: ...

    @property
    def observed(self) -> int: ...

    def room(self, cache: KVCache) -> int | None:
        """How many more tokens the cache can take; None if there is no end."""

    def open(self, cache: KVCache, wanted: int, ahead: int = 0) -> int:
        """Makes the last segment the one for the next tokens, right before they come.

        Returns how many of the `wanted` (at least 1) go there in one step: at least 1. ahead: how
        many are known to follow, so that storage need not grow for each step.
        """

    def settle(self, cache: KVCache) -> Sequence[Compression]:
        """Puts the cache in order once a step is done. Returns what was compressed."""

    def settings(self) -> dict[str, Any]:
        """What `make_policy` needs, beside the name, to make this policy again."""

    def check(self, **settings: int) -> None:
        """Raises InvalidArgument where settings could not be changed to these."""

    def change(self, cache: KVCache, pins: Set[int], **settings: int) -> None:
        """Changes settings on a cache in use, in which the tokens with serials `pins` are pinned.

        Raises InvalidArgument before changing anything.
        """


def open_anchors(cache: KVCache, keep: int, wanted: int) -> int:
    """Makes the last segment the one for the first `keep` cells, until all of them are there.

    Returns how many of the `wanted` tokens go there; 0 once a window may begin.
    """
    missing = keep - cache.cells
    if missing <= 0 or any(not segment.anchor for segment in cache.segments):
        return 0
    newest = cache.segments[-1] if cache.segments else None
    if newest is None or not newest.thaw(newest.length + missing):
        newest = Segment(cache.far_layout, missing, anchor=True)
        cache.segments.append(newest)
    newest.reserve(newest.limit)
    return min(wanted, missing)

"""Policy `archive`: a window, and a compressed archive of what is older."""

from collections.abc import Set
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Self

from kvkeep import validation
from kvkeep.cache import NO_TOKEN, Cells, KVCache, Segment, Window, are_in
from kvkeep.cache.observer import MAX_QUERIES
from kvkeep.compression.methods import best_method, make_method
from kvkeep.compression.methods.apply import Compression, check_budget, compress, compress_and_join
from kvkeep.compression.methods.base import Candidates, CellwiseEviction, Eviction, Method
from kvkeep.compression.methods.statistics import Statistics
from kvkeep.errors import InvalidArgument
from kvkeep.policies.archive_cells import (
    append_to_archive,
    archived_cells,
    archived_segments,
    cells_at_seen_positions,
    halve_distances,
    lower_scores,
    replace_archive,
)
from kvkeep.policies.base import (
    Policy,
    count_cells_to_pin,
    open_anchors,
    pinned_cell_count,
    require_valid,
    window_cell_count,
)

FREED_DIVISOR = 8  # compressing a full archive frees an eighth of it


@dataclass(frozen=True)
class Archive(Policy):
    """Exact anchors, an exact window, and a compressed archive of the cells between them.

    The first `keep` cells and the pinned ones are anchors. The window holds at most `window +
    block` cells. When it is full, its oldest `block` cells go into the archive, compressed by
    `ratio`. When the archive is full, all of it and the block are compressed together, so older
    cells are compressed more often. Blocks end at the same tokens for any prefill step.

    No distance exceeds `span` positions, or `max_kv_size` if that is more: before one would,
    distances beyond the window are halved, by rotating the archive's keys once more.

    method, ratio: how blocks are compressed, and how much; method "" for the best one that the
        available calibration allows.
    budget: how layers and KV heads share the archive; "" for the method's best.
    window, block, span: 0 for values that fit `max_kv_size`.
    seed: of method "random".
    statistics: the model's calibration, whose digest is `calibrated_by`.
    """

    name: ClassVar[str] = "archive"
    allows_compression: ClassVar[bool] = True

    keep: int = 4
    method: str = ""
    ratio: float = 1.0
    window: int = 0
    block: int = 0
    span: int = 0
    seed: int = 0
    calibrated_by: str = ""
    budget: str = ""
    statistics: Statistics | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ratio", validation.finite_number("ratio", self.ratio))
        for name in ("calibrated_by", "budget"):
            object.__setattr__(self, name, validation.text(name, getattr(self, name)))
        size = validation.integer("max_kv_size", self.max_kv_size, 1)
        block, window = (validation.integer(n, getattr(self, n)) for n in ("block", "window"))
        object.__setattr__(self, "block", block or min(512, max(1, size // 16)))
        object.__setattr__(self, "window", window or max(1, size * 11 // 16))
        super().__post_init__()

    def for_model(self, trained_length: int) -> Self:
        """Return the policy with a span of at most what the model was trained for."""
        policy = super().for_model(trained_length)
        span = self.span or min(2 * self.max_kv_size, trained_length)
        if span > trained_length:
            raise InvalidArgument(
                f"span must be at most {trained_length}, the number of positions that the model "
                f"was trained for; found {span}"
            )
        return replace(policy, span=span)

    @property
    def compression_method(self) -> Method:
        return make_method(self.method or best_method(None))

    @property
    def head_budget(self) -> str:
        """The sharing of the archive among layers and KV heads: "uniform" or "heads"."""
        return self.budget or self.compression_method.budget

    def settings(self) -> dict[str, Any]:
        """Return the settings, with `budget` only if it was set: old releases do not know it."""
        settings = super().settings() | {"method": self.compression_method.name}
        return settings if self.budget else {k: v for k, v in settings.items() if k != "budget"}

    @property
    def reach(self) -> int:
        """The largest distance from which a cell is seen."""
        return self.span or 2 * self.max_kv_size

    def archive_limit(self, cache: KVCache) -> int:
        """Return the most cells that a cache's archive may have."""
        anchor_count = self.keep + pinned_cell_count(cache, self.keep)
        return self.max_kv_size - anchor_count - self.window - self.block

    @property
    def uses_stored_calibration(self) -> bool:
        is_calibrated = self.statistics is not None
        return not is_calibrated and (not self.method or self.compression_method.uses_surrogate)

    def with_calibration(self, statistics: Statistics, digest: str) -> Self:
        method = self.method or best_method(statistics)
        return replace(self, method=method, statistics=statistics, calibrated_by=digest)

    def require_statistics(self) -> None:
        self.compression_method.require_statistics(self.statistics)

    @property
    def exact_tokens(self) -> int:
        return self.keep + self.window + self.block - 1  # tokens before any is compressed

    @property
    def query_count(self) -> int:
        return MAX_QUERIES if self.compression_method.uses_queries else 0

    def window_limit(self, cache: KVCache) -> int:
        return self.window + self.block - 1

    def lasting_count(self, cache: KVCache) -> int:
        return self.window  # a block is archived as soon as it leaves so many

    def check_contents(self, cache: KVCache) -> None:
        super().check_contents(cache)
        archived = archived_segments(cache)
        cells, limit = sum(s.length for s in archived), self.archive_limit(cache)
        evictable = sum(not segment.is_anchor for segment in archived)
        contents = (
            f"{cells} of {limit} archived cells, and {evictable} archived segments without anchors"
        )
        require_valid(cells <= limit and not evictable, contents)

    def open(self, cache: KVCache, token_count: int, following_count: int = 0) -> int:
        cache.window = Window(moves=True)
        if self.query_count and cache.observer is None:
            cache.observe()
        if anchor_count := open_anchors(cache, self.keep, token_count):
            return anchor_count
        window_size = self.window + self.block
        newest = cache.open_window(window_size)
        newest.grows_lazily = any(not s.is_anchor for s in cache.segments[:-1])
        count = min(token_count, window_size - window_cell_count(cache))
        free_count = window_size - newest.length - count
        newest.reserve(newest.length + count + min(following_count, free_count))
        return count

    def enforce_bounds(self, cache: KVCache) -> list[Compression]:
        compressions: list[Compression] = []
        while window_cell_count(cache) >= self.window + self.block:
            compressions += self._archive_block(cache)
        if compressions:
            self._limit_distances(cache)
        return compressions

    def _archive_block(self, cache: KVCache) -> list[Compression]:
        """Compress the oldest block of the window into the archive."""
        count = max(1, int(self.block / self.ratio))
        archived = archived_segments(cache)
        parts = [cells_at_seen_positions(cache, cache.read_window(self.block))]
        limit = self.archive_limit(cache)
        if sum(segment.length for segment in archived) + count > limit:
            count = limit - limit // FREED_DIVISOR
            parts, archived = [*self._aged_cells(cache, archived, count), *parts], []
        compressions = self._compress(cache, archived, parts, count, limit)
        Window(moves=True).evict(cache.segments, self.block)
        cache.drop_empty_segments()
        return compressions

    def _aged_cells(self, cache: KVCache, archived: list[Segment], count: int) -> list[Cells]:
        """Return archived cells, with scores that fell since all were last compressed to `count`.

        Their positions do not say how old they are, since distances are halved again and again.
        """
        method, cells = self.compression_method, archived_cells(cache, archived)
        if not isinstance(method, CellwiseEviction):
            return cells
        appended = max(0, sum(map(len, cells)) - count)
        elapsed = self.block + appended * self.ratio  # tokens
        return [lower_scores(part, method.decay_per_token * elapsed) for part in cells]

    @property
    def pin_limit(self) -> int:
        min_archive = int(self.block / self.ratio) + 1
        return self.max_kv_size - self.keep - self.window - self.block - min_archive

    def check(self, pinned_count: int = 0) -> None:
        super().check(pinned_count)
        check_budget(self.compression_method, self.head_budget)
        if self.compression_method.reconstruction_kind:
            raise InvalidArgument(
                f'method "{self.method}" repeats the whole text, which an archive does not have: '
                'use "kvzap" with a calibration, or compress a "full" session'
            )
        if self.ratio < 1:
            raise InvalidArgument(f"ratio must be 1 or more; found {self.ratio}")
        max_keep = self.keep + self.pin_limit
        if self.window < 1 or self.block < 1:
            raise InvalidArgument(
                f"window and block must be 1 or more; found {self.window} and {self.block}"
            )
        if not 0 <= self.keep <= max_keep:
            raise InvalidArgument(
                f"a budget of {self.max_kv_size} cells with a window of {self.window} and blocks "
                f"of {self.block} allows keep from 0 to {max(max_keep, 0)}; found {self.keep}: "
                "raise max_kv_size, or lower window"
            )
        others = f", a window of {self.window} and blocks of {self.block}"
        self.check_pins(pinned_count, self.pin_limit, others)
        if self.reach < (min_reach := self.keep + self.window + 2 * self.block):
            raise InvalidArgument(
                f"a span of {self.reach} positions is too short: a budget of {self.max_kv_size} "
                f"with a window of {self.window} and blocks of {self.block} needs {min_reach} or "
                "more; lower max_kv_size"
            )

    def reconfigure(self, cache: KVCache, pins: Set[int], **settings: Any) -> Self:
        """Change the anchors as `Sliding.reconfigure` does; archived cells stay in the archive."""
        policy = self.with_settings(**settings)
        if policy.keep != self.keep and NO_TOKEN in cache.serials()[: max(policy.keep, self.keep)]:
            raise InvalidArgument(
                f"keep was {self.keep} when the first tokens were archived, and cannot change now; "
                "pin tokens of the window instead"
            )
        policy.check(count_cells_to_pin(cache, policy.keep, pins))
        policy._set_anchors(cache, pins)
        return policy

    def _set_anchors(self, cache: KVCache, pins: Set[int]) -> None:
        """Make kept, pinned and archived cells the anchors, and enforce the bounds."""
        cache.reassign_anchors(
            lambda ranks, serials: (
                (serials == NO_TOKEN) | (ranks < self.keep) | are_in(serials, pins)
            )
        )
        self.enforce_bounds(cache)  # the window may overflow with cells that are no longer anchors
        archived, limit = archived_segments(cache), self.archive_limit(cache)
        if sum(segment.length for segment in archived) > limit:
            self._compress(cache, [], archived_cells(cache, archived), limit, limit)
        self._limit_distances(cache)

    def _compress(
        self, cache: KVCache, archived: list[Segment], parts: list[Cells], count: int, limit: int
    ) -> list[Compression]:
        """Compress cells to `count`; the archive is then the segments `archived` and these cells.

        They are compressed chunk by chunk, or all at once if heads share the budget.

        parts: the cells, oldest first. limit: the archive's maximum size.
        """
        method, results = self.compression_method, list[tuple[Cells, Compression]]()
        new_candidates = partial(
            Candidates,
            rope=cache.rope,
            scale=cache.scale,
            softcap=cache.attention.softcap,
            queries=cache.observer.queries() if cache.observer else None,
            statistics=self.statistics,
            seed=self.seed + cache.serial,
            ageing=True,
            newest_position=max(int(cells.positions.max()) for cells in parts),
        )
        if self.head_budget == "heads":
            assert isinstance(method, Eviction)
            results.append(compress_and_join(method, list(map(new_candidates, parts)), count))
        else:
            merged = Cells.concatenate([cells.to_compressed_format() for cells in parts])
            results.extend(compress(method, new_candidates(merged), count))
        for cells, _ in results:
            if len(cells):
                append_to_archive(cache, archived, cells, limit)
        replace_archive(cache, archived)
        return [compression for _, compression in results]

    def _limit_distances(self, cache: KVCache) -> None:
        """Halve distances if one could exceed `reach` before the window is full again.

        Anchors and the window take `max_kv_size` positions at most, so that none comes further.
        """
        tokens_ahead = self.window + self.block - window_cell_count(cache)
        halve_distances(cache, self.reach - tokens_ahead)

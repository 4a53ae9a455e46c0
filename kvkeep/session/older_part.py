"""Compression of a session's older part, by which a compaction reaches its target."""

from collections.abc import Set
from dataclasses import replace

from kvkeep.cache import NO_TOKEN, Cells, RaggedCells
from kvkeep.compression.methods import BEST_UNCALIBRATED, make_method
from kvkeep.compression.methods.base import Budget
from kvkeep.compression.methods.kvzip import KVzip
from kvkeep.errors import InvalidArgument
from kvkeep.policies.archive_cells import halve_distances
from kvkeep.policies.full import Full
from kvkeep.session.compaction_plan import MIN_RECENT, CompactionPlan
from kvkeep.session.compression import CompressionReport, compress_memory
from kvkeep.session.compression_plan import SINK_CELLS, CompressionPlan, default_method_name
from kvkeep.session.core import SessionCore
from kvkeep.session.memory import Memory
from kvkeep.session.message_spans import spans_of_kind, system_end

# Of the room for the older part, for what users said in it; more would lose more than it keeps: see
# `kvkeep.session.compaction_plan`.
_USER_SHARE = 1 / 4
_MIN_COMPRESSED = 16  # cells into which the older part can be compressed
_ROUNDING_CELLS = 8  # by which the target is lowered: see `_compression_plan`


def compress_older(core: SessionCore, plan: CompactionPlan) -> CompressionReport:
    """Compress what is older than the recent part, so that the target is reached.

    What users said stays exact as far as it takes no more than a quarter of what is left of the
    target for the older part; the newest first. Raises InvalidArgument if the system prompt, pins
    and the newest tokens leave no room.
    """
    memory = core.memory
    if not isinstance(memory.policy, Full):
        raise InvalidArgument(
            f'step "compress" needs policy "full"; this session has policy "{memory.policy.name}": '
            'leave "compress" out of steps'
        )
    total = len(memory.tokens)
    fixed = frozenset(memory.serials[: system_end(core.state.spans)])
    recent = total - plan.recent_start(core)
    while (room := plan.target - _unchanged_count(memory, fixed, recent)) < _MIN_COMPRESSED:
        if recent <= MIN_RECENT:
            raise InvalidArgument(
                f"the system prompt, pinned tokens and the newest {recent} take "
                f"{plan.target - room:,} cells, which leaves too little room below the target of "
                f"{plan.target:,}: raise target, or unpin tokens"
            )
        recent = max(MIN_RECENT, recent // 2)
    users, num_messages = _user_serials(core, int(room * _USER_SHARE), total - recent)
    try:
        compression = _compression_plan(core, plan, recent, num_messages)
        compacted, report = compress_memory(memory, replace(compression, unchanged=fixed | users))
    except InvalidArgument:  # too many short messages for the room that is left
        compression = _compression_plan(core, plan, recent)
        compacted, report = compress_memory(memory, replace(compression, unchanged=fixed))
    _limit_distances(compacted, recent)
    core.state = replace(core.state, memory=compacted)
    return report


def _compression_plan(
    core: SessionCore, plan: CompactionPlan, recent: int, num_messages: int = 0
) -> CompressionPlan:
    """Return a plan that compresses the older part, around so many messages that stay exact.

    The cells of earlier compactions have their reconstruction scores, and compete with the others
    by them. So what is needed to know the text stays, however old it is.
    """
    memory, statistics = core.memory, plan.calibration.statistics if plan.calibration else None
    method, compressed = default_method_name(memory, statistics), _compressed_cells(memory)
    keeps_scores = all(isinstance(x, RaggedCells) and x.scores is not None for x in compressed)
    if method == BEST_UNCALIBRATED and keeps_scores:
        method = KVzip.name
    # Each of several compressed runs is rounded up by one cell.
    target = max(1, plan.target - num_messages - _ROUNDING_CELLS)
    ratio = memory.cache.cells / target
    budget: Budget | None = "heads" if method == KVzip.name else None
    return CompressionPlan(
        *(make_method(method), ratio, budget, core.model.text, recent),
        statistics=statistics,
        progress=plan.progress,
        keeps_scores=method == KVzip.name,
    )


def _compressed_cells(memory: Memory) -> list[Cells]:
    return [segment.block.slots for segment in memory.cache.segments if segment.compressed]


def _unchanged_count(memory: Memory, fixed: Set[int], recent: int) -> int:
    """Return how many cells stay unchanged if `recent` newest tokens do."""
    serials = memory.cache.serials()
    unchanged = fixed | memory.pins | set(serials[:SINK_CELLS]) | set(memory.serials[-recent:])
    return sum(serial != NO_TOKEN and serial in unchanged for serial in serials)


def _user_serials(core: SessionCore, limit: int, recent_start: int) -> tuple[frozenset[int], int]:
    """Return the serials of the newest of the older messages of users, and of how many these are.

    limit: the most serials.
    """
    memory, spans, num_messages = core.memory, core.state.spans, 0
    held, result = set(memory.cache.serials()), set[int]()
    for name in reversed(spans_of_kind(spans, "user")):
        start, end = spans[name]
        serials = held.intersection(memory.serials[start : min(end, recent_start)])
        if len(result) + len(serials) > limit:
            break
        result |= serials
        num_messages += bool(serials)
    return frozenset(result), num_messages


def _limit_distances(memory: Memory, recent: int) -> None:
    """Move older cells closer where the policy could otherwise not be filled to its budget.

    Compression leaves fewer cells at the same distances, and a model was trained for so many.
    """
    policy, cache = memory.policy, memory.cache
    assert isinstance(policy, Full)
    limit = max(policy.trained, policy.max_kv_size) - (policy.max_kv_size - cache.cells)
    if cache.reach > limit:
        halve_distances(cache, limit, recent)

"""The settings of a compaction, and when a session needs one."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from kvkeep import validation
from kvkeep.compression.calibration.calibration import Calibration
from kvkeep.errors import InvalidArgument
from kvkeep.policies.full import Full
from kvkeep.session.core import SessionCore
from kvkeep.session.editing import Recompute
from kvkeep.session.message_spans import newest_turn_start

CompactionStep = Literal["results", "reasoning", "compress"]
COMPACTION_STEPS: tuple[CompactionStep, ...] = get_args(CompactionStep)
PLACEHOLDER = "[result removed]"
MIN_RECENT = 32  # newest tokens that stay exact whatever the target is
# Exact cells take room from those that compression would choose, and lose more than they keep if
# they are many: with half instead of a quarter each, `benchmarks.compaction` finds a quarter less.
_RECENT_SHARE = 1 / 4  # of the target, for the newest turns


@dataclass(frozen=True)
class CompactionPlan:
    """The settings of one compaction: see `Session.compact`."""

    target: int
    keep_recent: int = 2
    keep_results: int = 3
    placeholder: str = PLACEHOLDER
    steps: tuple[CompactionStep, ...] = COMPACTION_STEPS
    recompute: Recompute = "none"
    calibration: Calibration | None = None
    progress: Callable[[int], None] | None = None

    @classmethod
    def checked(cls, target: float, max_kv_size: int, **settings: object) -> "CompactionPlan":
        """Return the plan with validated settings. target: as of `Session.compact`.

        Raises InvalidArgument.
        """
        if isinstance(target, float) and 0 < target < 1:
            target = max(1, int(target * max_kv_size))
        plan = cls(validation.integer("target", target, 1), **settings)  # type: ignore[arg-type]
        validation.integer("keep_recent", plan.keep_recent, 0)
        validation.integer("keep_results", plan.keep_results, 0)
        validation.text("placeholder", plan.placeholder)
        if unknown := [step for step in plan.steps if step not in COMPACTION_STEPS]:
            names = ", ".join(COMPACTION_STEPS)
            raise InvalidArgument(f"steps must be of {names}; found {unknown[0]!r:.100}")
        if plan.recompute not in get_args(Recompute):
            raise InvalidArgument(f'recompute must be "none" or "suffix"; found {plan.recompute!r}')
        return plan

    def recent_start(self, core: SessionCore) -> int:
        """Return the first token of the part that stays exact: the newest turns.

        They count as far as they take no more than a quarter of the target.
        """
        total = len(core.memory.tokens)
        start = newest_turn_start(core.state.spans, self.keep_recent)
        limit = max(MIN_RECENT, int(self.target * _RECENT_SHARE))
        return max(0, total - limit, min(start, total - MIN_RECENT))


def target_before(core: SessionCore, new_tokens: int, threshold: float) -> int | None:
    """Return the cells to compact a session to before `new_tokens` more; None if there is room.

    There is room up to `threshold`, a part of `max_kv_size`. The target is half of `max_kv_size`,
    or less for a long text. Policies other than "full" keep to their budget by themselves. Of more
    tokens than `max_kv_size` the session could not hold all, compacted or not: None.
    """
    policy = core.memory.policy
    limit = int(validation.finite_number("threshold", threshold) * policy.max_kv_size)
    has_room = core.memory.cache.cells + new_tokens <= limit
    if not isinstance(policy, Full) or has_room or new_tokens > policy.max_kv_size:
        return None
    return max(1, min(policy.max_kv_size // 2, limit - new_tokens))

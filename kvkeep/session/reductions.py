"""The methods of a session that reduce its cells: compress and compact."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from kvkeep import validation
from kvkeep.compression.calibration.calibration import Calibration
from kvkeep.compression.calibration.stored import default_calibration
from kvkeep.compression.methods import make_method
from kvkeep.compression.methods.base import Budget
from kvkeep.runtime.memory import trim_memory
from kvkeep.runtime.worker import computes_in_caller
from kvkeep.session.compaction import CompactionReport, compact_session
from kvkeep.session.compaction_plan import (
    COMPACTION_STEPS,
    PLACEHOLDER,
    CompactionPlan,
    CompactionStep,
    target_before,
)
from kvkeep.session.compression import CompressionReport, compress_memory
from kvkeep.session.compression_plan import CompressionPlan, default_method_name
from kvkeep.session.core import SessionCore, StateGuard
from kvkeep.session.editing import Recompute


class SessionReductions:
    """The methods of a `Session` that reduce its cells."""

    core: SessionCore

    @computes_in_caller
    def compress(
        self,
        ratio: float = 2.0,
        method: str | None = None,
        recent: int | None = None,
        seed: int = 0,
        calibration: Calibration | None = None,
        progress: Callable[[int], None] | None = None,
        budget: Budget | None = None,
    ) -> CompressionReport:
        """Compress the cells once, to `ratio` times fewer; each KV head keeps its own.

        The first four, the newest `recent` and pinned tokens stay as they are. Tokens that the
        method keeps, merges or evicts can no longer be edited or pinned. For policy "full" only:
        "archive" compresses as it goes.

        Args:
            recent: None for 64 if the budget is "uniform". If it is "heads", None for half of the
                remaining cells up to ratio 4, 2 / ratio of them above, and 32 at least.
            method: see `kvkeep.compression.methods`. None: "kvzap" if the calibration has a
                surrogate, otherwise "kvzip", which has the model repeat the text in about the time
                of a prefill; "fitted" if some cells were compressed before.
            seed: for method "random".
            calibration: statistics of the model, for methods that use them. None for the stored one
                (`Model.calibration`) with method "kvzap".
            progress: called after each chunk with the number of cells that were in it; must not
                change the session.
            budget: "uniform": each 512 cells become that many fewer in every layer and KV head;
                "heads": the cells with the highest scores stay, in whichever head they are. None:
                the method's default, except that "kvzip" evicts only verbatim repeats if these are
                enough.

        Raises InvalidArgument if that is impossible, and StoreError if the stored calibration is
        damaged, before anything is changed.
        """
        ratio = validation.finite_number("ratio", ratio)
        seed = validation.integer("seed", seed, 0)
        progress = validation.progress(progress)
        core = self.core
        if calibration is not None:
            validation.instance("calibration", calibration, Calibration).require(core.model)
        if method is None:
            statistics = calibration.statistics if calibration else None
            method = default_method_name(core.memory, statistics)
        chosen_method, recent = make_method(method), validation.optional_integer("recent", recent)
        if calibration is None and chosen_method.uses_surrogate:
            calibration = default_calibration(core.model)
        statistics = calibration.statistics if calibration else None
        plan = CompressionPlan(
            chosen_method, ratio, budget, core.model.text, recent, seed, statistics, progress
        )
        guard = StateGuard(core)
        memory, report = compress_memory(core.memory, plan)
        guard.require_unchanged()
        core.state = replace(core.state, memory=memory)
        trim_memory()
        return report

    @computes_in_caller
    def compact(
        self,
        target: float = 0.5,
        keep_recent: int = 2,
        keep_results: int = 3,
        placeholder: str = PLACEHOLDER,
        steps: Sequence[CompactionStep] = COMPACTION_STEPS,
        recompute: Recompute = "none",
        calibration: Calibration | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> CompactionReport:
        """Bring the session to `target` cells or fewer, by deleting and compressing what is old.

        Three steps, until the target is reached: the oldest tool results are replaced by a
        placeholder; the oldest reasoning is deleted; what is older than the newest turns is
        compressed, what users said last (policy "full" only). Pinned tokens, the system prompt
        and the newest turns stay exact. A session that is small enough does not change. Spans'
        names say what lies where: see `kvkeep.session.message_spans`.

        Args:
            target: a number of cells, or a part of `max_kv_size` such as 0.5.
            keep_recent: how many of the newest turns stay, as far as they take no more than a
                quarter of the target.
            keep_results: how many of the newest tool results stay.
            placeholder: the text that takes the place of a tool result.
            steps: which of "results", "reasoning" and "compress" are allowed, in this order.
            recompute: of the first two steps, as of `delete`. Models with states need "suffix".
            calibration: as of `compress`.
            progress: called with numbers of cells as the work goes on; must not change the session.

        A step that is impossible is left out, which the report says. Raises InvalidArgument for
        arguments that are out of range. Nothing is changed then, or by Ctrl-C.
        """
        if calibration is not None:
            validation.instance("calibration", calibration, Calibration).require(self.core.model)
        plan = CompactionPlan.checked(
            target,
            self.core.memory.policy.max_kv_size,
            keep_recent=keep_recent,
            keep_results=keep_results,
            placeholder=placeholder,
            steps=validation.items("steps", steps),
            recompute=recompute,
            calibration=calibration,
            progress=validation.progress(progress),
        )
        report = compact_session(self.core, plan)
        trim_memory()
        return report

    def compact_before(
        self,
        new_tokens: int,
        threshold: float,
        calibration: Calibration | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> CompactionReport | None:
        """Compact the session if `new_tokens` more would exceed a part of `max_kv_size`.

        Returns None if there is room, and for other policies than "full": see `target_before`.
        """
        new_tokens = validation.integer("new_tokens", new_tokens, 0)
        target = target_before(self.core, new_tokens, threshold)
        if target is None:
            return None
        return self.compact(target, calibration=calibration, progress=progress)

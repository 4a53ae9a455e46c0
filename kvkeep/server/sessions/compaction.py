"""Compaction of a session: by request, and before a turn that would exceed the threshold."""

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.responses import Response

from kvkeep.engine import SessionOperations, SessionRecord
from kvkeep.errors import InvalidArgument
from kvkeep.server.body_route import body_router
from kvkeep.server.limits import ShortText
from kvkeep.server.schemas import StrictBody
from kvkeep.server.sessions.entry import SessionContext, SessionDep, TokenCount
from kvkeep.session.compaction import CompactionReport
from kvkeep.session.compaction_plan import (
    COMPACTION_STEPS,
    PLACEHOLDER,
    CompactionStep,
    target_before,
)
from kvkeep.session.session import Session

router = body_router()


class CompactRequest(StrictBody):
    """The target, a number of cells or a part of `max_kv_size`, and what stays."""

    target: Annotated[float, Field(gt=0, le=2**40)] = 0.5
    keep_recent: TokenCount = 2
    keep_results: TokenCount = 3
    placeholder: ShortText = PLACEHOLDER
    steps: Annotated[tuple[CompactionStep, ...], Field(max_length=16)] = COMPACTION_STEPS
    recompute: Literal["none", "suffix"] = "none"


@router.post("/v1/sessions/{name}/compact", response_model=None)
async def compact(body: CompactRequest, context: SessionDep) -> Response:
    """Delete old tool results and reasoning and compress what is old, until `target` is reached."""
    target = body.target if body.target < 1 else int(body.target)
    if body.target > 1 and target != body.target:
        raise InvalidArgument(
            "target must be a number of cells, or below 1 and a part of max_kv_size; "
            f"found {body.target}"
        )

    def apply(session: Session) -> dict[str, Any]:
        report = session.compact(
            target,
            body.keep_recent,
            body.keep_results,
            body.placeholder,
            body.steps,
            body.recompute,
            context.service.model.calibration,
            context.engine.yield_turn,
        )
        return report_fields(report)

    return await context.change("compact", apply, in_steps=True)


async def compact_before_turn(
    context: SessionContext, new_tokens: int, require: Callable[[SessionRecord], None]
) -> tuple[CompactionReport | None, int | None]:
    """Compact the session if a turn of `new_tokens` would exceed the server's threshold.

    require: raises InvalidArgument for a turn that will be refused: then nothing is compacted.
    Returns the report, None if there was nothing to do, and the revision that the session must
    have for the turn. What was done is named in the response's headers.
    """
    threshold, model = context.service.compact_at, context.service.model
    if threshold is None:
        return None, context.revision

    def exceeds(record: SessionRecord) -> bool:
        require(record)
        return target_before(record.live.core, new_tokens, threshold) is not None

    def apply(session: Session) -> CompactionReport | None:
        progress, calibration = context.engine.yield_turn, model.calibration
        return session.compact_before(new_tokens, threshold, calibration, progress)

    def change(operations: SessionOperations) -> tuple[CompactionReport | None, int]:
        arguments = (context.name, context.owner, "compact", apply, context.revision)
        report = operations.change(*arguments)
        return report, operations.find(context.name, context.owner).revision

    if not await context.inspect(context.name, exceeds):
        return None, context.revision
    report, revision = await context.run_in_steps(change)
    if report is not None:
        context.notices.warn(f"compacted: {report.summary()}".replace("→", "to"))
    return report, None if context.revision is None else revision


def report_fields(report: CompactionReport) -> dict[str, Any]:
    """Return a report as JSON."""
    compression = report.compression
    return {
        "summary": report.summary(),
        "target": report.target,
        "cells_before": report.cells_before,
        "cells_after": report.cells_after,
        "removed_results": list(report.removed_results),
        "removed_reasoning": list(report.removed_reasoning),
        "compression_ratio": None if compression is None else compression.ratio,
        "compression_method": None if compression is None else compression.method,
        "tokens_evaluated": report.tokens_evaluated,
        "seconds": report.seconds,
        "notes": list(report.notes),
    }

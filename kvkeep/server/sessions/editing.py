"""Changes of a live session's memory: edits, pins, spans, rewinds, compression."""

import dataclasses
from asyncio import to_thread
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from starlette.responses import Response

from kvkeep.engine.steps import DEFAULT_PREFILL_STEP
from kvkeep.errors import InvalidArgument
from kvkeep.server.body_route import body_router
from kvkeep.server.limits import LongText, TokenIds
from kvkeep.server.schemas import StrictBody
from kvkeep.server.sessions.entry import SessionDep, SpanName, TokenCount, TokenIndex
from kvkeep.session.conversation import CHAT_NOTES_KEY
from kvkeep.session.session import Session

router = body_router()


class RangeRequest(StrictBody):
    """Tokens `start ... end - 1`, or a span by its name."""

    start: TokenIndex | None = None
    end: TokenIndex | None = None
    span: SpanName | None = None

    def range_arguments(self) -> tuple[int | str, int | None]:
        """Return the range for `Session.delete` and others: start and end, or span and None."""
        if self.span is not None and self.start is None and self.end is None:
            return self.span, None
        if self.start is None or self.span is not None:
            raise InvalidArgument("use start and end, or span")
        return self.start, self.end


class EditRequest(RangeRequest):
    op: Literal["delete", "insert", "replace"]
    at: TokenIndex | None = None
    text: LongText | None = None
    tokens: TokenIds | None = None
    recompute: Literal["none", "suffix"] = "none"

    @model_validator(mode="after")
    def _check_fields(self) -> "EditRequest":
        """Refuse fields of another operation, of which one would be ignored."""
        given = [name for name in ("text", "tokens") if getattr(self, name) is not None]
        if len(given) != (self.op != "delete"):
            raise ValueError("insert and replace need text or tokens; delete takes neither")
        has_range = not (self.start is None and self.end is None and self.span is None)
        if (self.at is not None) != (self.op == "insert") or has_range == (self.op == "insert"):
            raise ValueError("insert needs at; delete and replace need start and end, or span")
        return self


class SpanRequest(StrictBody):
    name: SpanName
    start: TokenIndex
    end: TokenIndex


class RewindRequest(StrictBody):
    count: TokenCount


class CompressRequest(StrictBody):
    ratio: Annotated[float, Field(gt=1, le=1000)] = 4.0
    method: Annotated[str | None, Field(max_length=40)] = None
    budget: Literal["heads", "uniform"] | None = None
    recent: TokenCount | None = None


@router.post("/v1/sessions/{name}/edit", response_model=None)
async def edit(body: EditRequest, context: SessionDep) -> Response:
    """Delete, insert or replace tokens. The suffix is kept, or evaluated again in steps."""
    new_ids = body.tokens or []
    if body.text is not None:  # a long text would block the event loop
        new_ids = await to_thread(context.tokenizer.encode, body.text)
    is_one_step = body.recompute == "none" and len(new_ids) <= DEFAULT_PREFILL_STEP
    progress = None if is_one_step else context.engine.yield_turn
    notes = dict[str, Any]()

    def apply(session: Session) -> dict[str, Any]:
        system_before = _system_tokens(session)
        if body.op == "insert":
            assert body.at is not None, "`_check_fields` requires it"
            report = session.insert(body.at, new_ids, body.recompute, progress=progress)
        elif body.op == "delete":
            report = session.delete(*body.range_arguments(), body.recompute, progress)
        else:
            token_range = body.range_arguments()
            report = session.replace(*token_range, new_ids, body.recompute, progress=progress)
        system = _system_tokens(session)
        if system != system_before:
            notes[CHAT_NOTES_KEY] = {"system": context.tokenizer.decode(system) or None}
        return dataclasses.asdict(report)

    return await context.change("edit", apply, len(new_ids), notes, in_steps=not is_one_step)


def _system_tokens(session: Session) -> list[int]:
    """Return the tokens of a chat's system prompt; [] if there is none."""
    start, end = session.span_ranges.get("system text", (0, 0))
    return session.tokens[start:end]


@router.post("/v1/sessions/{name}/pin", response_model=None)
async def pin(body: RangeRequest, context: SessionDep) -> Response:
    """Pin tokens: they are never evicted."""
    token_range = body.range_arguments()
    return await context.change("pin", lambda session: session.pin(*token_range))


@router.post("/v1/sessions/{name}/unpin", response_model=None)
async def unpin(body: RangeRequest, context: SessionDep) -> Response:
    """Unpin tokens: they can be evicted again."""
    token_range = body.range_arguments()
    return await context.change("unpin", lambda session: session.unpin(*token_range))


@router.post("/v1/sessions/{name}/spans", response_model=None)
async def span(body: SpanRequest, context: SessionDep) -> Response:
    """Name a span of tokens; edits before it move the span."""
    name, start, end = body.name, body.start, body.end
    return await context.change("span", lambda session: session.name(name, start, end))


@router.post("/v1/sessions/{name}/rewind", response_model=None)
async def rewind(body: RewindRequest, context: SessionDep) -> Response:
    """Remove the last `count` tokens. Where many others are evaluated again, this takes steps."""
    count = body.count
    if not await context.rewinds_in_steps(lambda total: count):
        return await context.change("rewind", lambda session: session.rewind(count))
    progress = context.engine.yield_turn
    return await context.change(
        "rewind", lambda session: session.rewind(count, progress), in_steps=True
    )


@router.post("/v1/sessions/{name}/compress", response_model=None)
async def compress(body: CompressRequest, context: SessionDep) -> Response:
    """Compress to `ratio` times fewer cells, while answers in progress go on."""
    engine = context.engine

    def apply(session: Session) -> dict[str, Any]:
        report = session.compress(
            body.ratio,
            body.method,
            body.recent,
            budget=body.budget,
            progress=engine.yield_turn,
        )
        fields = dataclasses.asdict(report)
        del fields["chunks"]  # not a field of the response
        return fields

    return await context.change("compress", apply, in_steps=True)

"""Changes of a live session's memory: edits, pins, spans, rewinds, compression."""

import dataclasses
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response

from kvkeep.errors import InvalidArgument
from kvkeep.server.schemas import OwnerDep, RequestBody, ServiceDep, TokenId
from kvkeep.server.sessions.entry import (
    RevisionDep,
    SessionName,
    SpanName,
    TokenIndex,
    change_session,
)
from kvkeep.session.session import Session

router = APIRouter()


class RangeRequest(RequestBody):
    """Tokens `start ... end - 1`, or a span by its name."""

    start: TokenIndex | None = None
    end: TokenIndex | None = None
    span: SpanName | None = None

    def place(self) -> tuple[int | str, int | None]:
        """Return the start or the span's name, and the end. Raises InvalidArgument."""
        if self.span is not None and self.start is None:
            return self.span, None
        if self.start is None or self.span is not None:
            raise InvalidArgument("give start and end, or span")
        return self.start, self.end


class EditRequest(RangeRequest):
    op: Literal["delete", "insert", "replace"]
    at: TokenIndex | None = None
    text: str | None = None
    tokens: list[TokenId] | None = None
    recompute: Literal["none", "suffix"] = "none"


class SpanRequest(RequestBody):
    name: SpanName
    start: TokenIndex
    end: TokenIndex


class RewindRequest(RequestBody):
    count: TokenIndex


class CompressRequest(RequestBody):
    ratio: Annotated[float, Field(gt=1, le=1000)] = 4.0
    method: Annotated[str | None, Field(max_length=40)] = None
    budget: Literal["heads", "uniform"] | None = None
    recent: TokenIndex | None = None


@router.post("/v1/sessions/{name}/edit", response_model=None)
async def edit(
    name: SessionName,
    body: EditRequest,
    service: ServiceDep,
    owner: OwnerDep,
    revision: RevisionDep,
) -> Response:
    """Delete, insert or replace tokens. The suffix stays, or is evaluated again."""
    new = service.model.text.encode(body.text) if body.text is not None else body.tokens or []

    def apply(session: Session) -> dict[str, Any]:
        if body.op == "insert":
            if body.at is None:
                raise InvalidArgument("an insert needs at: the token before which it goes")
            report = session.insert(body.at, new, body.recompute)
        elif body.op == "delete":
            report = session.delete(*body.place(), body.recompute)
        else:
            report = session.replace(*body.place(), new, body.recompute)
        return dataclasses.asdict(report)

    return await change_session(service, name, owner, "edit", apply, revision, adds=len(new))


@router.post("/v1/sessions/{name}/pin", response_model=None)
async def pin(
    name: SessionName,
    body: RangeRequest,
    service: ServiceDep,
    owner: OwnerDep,
    revision: RevisionDep,
) -> Response:
    """Pin tokens: they are never evicted."""
    place = body.place()
    return await change_session(service, name, owner, "pin", lambda s: s.pin(*place), revision)


@router.post("/v1/sessions/{name}/unpin", response_model=None)
async def unpin(
    name: SessionName,
    body: RangeRequest,
    service: ServiceDep,
    owner: OwnerDep,
    revision: RevisionDep,
) -> Response:
    """Unpin tokens: they are evicted as the window moves on."""
    place = body.place()
    return await change_session(service, name, owner, "unpin", lambda s: s.unpin(*place), revision)


@router.post("/v1/sessions/{name}/spans", response_model=None)
async def span(
    name: SessionName,
    body: SpanRequest,
    service: ServiceDep,
    owner: OwnerDep,
    revision: RevisionDep,
) -> Response:
    """Name tokens; the name moves with them."""

    def apply(session: Session) -> None:
        session.name(body.name, body.start, body.end)

    return await change_session(service, name, owner, "span", apply, revision)


@router.post("/v1/sessions/{name}/rewind", response_model=None)
async def rewind(
    name: SessionName,
    body: RewindRequest,
    service: ServiceDep,
    owner: OwnerDep,
    revision: RevisionDep,
) -> Response:
    """Take back the last `count` tokens."""
    count = body.count
    return await change_session(service, name, owner, "rewind", lambda s: s.rewind(count), revision)


@router.post("/v1/sessions/{name}/compress", response_model=None)
async def compress(
    name: SessionName,
    body: CompressRequest,
    service: ServiceDep,
    owner: OwnerDep,
    revision: RevisionDep,
) -> Response:
    """Compress to `ratio` times fewer cells. The engine serves other requests meanwhile."""
    engine = service.engine

    def apply(session: Session) -> dict[str, Any]:
        report = session.compress(
            body.ratio,
            body.method,
            body.recent,
            budget=body.budget,
            calibration=service.model.calibration if body.method == "kvzap" else None,
            progress=engine.yield_turn,
        )
        fields = dataclasses.asdict(report)
        return {key: fields[key] for key in _REPORT_FIELDS}

    return await change_session(service, name, owner, "compress", apply, revision)


_REPORT_FIELDS = (
    *("method", "budget", "ratio"),
    *("cells_before", "cells_after", "bytes_before", "bytes_after"),
)

"""What a live session holds is changed: edits, pins, spans, rewinds, compression."""

import dataclasses
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response

from kvkeep.errors import InvalidArgument
from kvkeep.server.schemas import Body, Owner, Serving
from kvkeep.server.sessions.entry import Name, Revision, change
from kvkeep.session.session import Session

router = APIRouter()
_Place = Annotated[int, Field(ge=0, lt=2**40)]
_Id = Annotated[int, Field(ge=0, lt=2**31)]
_SpanName = Annotated[str, Field(min_length=1, max_length=200)]


class Range(Body):
    """Tokens `start ... end - 1`, or a span by its name."""

    start: _Place | None = None
    end: _Place | None = None
    span: _SpanName | None = None

    def place(self) -> tuple[int | str, int | None]:
        if (self.span is None) == (self.start is None):
            raise InvalidArgument("give start and end, or span")
        return (self.start, self.end) if self.span is None else (self.span, None)  # type: ignore[return-value]


class Edit(Range):
    op: Literal["delete", "insert", "replace"]
    at: _Place | None = None
    text: str | None = None
    tokens: list[_Id] | None = None
    recompute: Literal["none", "suffix"] = "none"


class NamedRange(Body):
    name: _SpanName
    start: _Place
    end: _Place


class Rewind(Body):
    count: _Place


class Compress(Body):
    ratio: Annotated[float, Field(gt=1, le=1000)] = 4.0
    method: Annotated[str | None, Field(max_length=40)] = None
    budget: Literal["heads", "uniform"] | None = None
    recent: _Place | None = None


@router.post("/v1/sessions/{name}/edit", response_model=None)
async def edit(
    name: Name, body: Edit, service: Serving, owner: Owner, revision: Revision
) -> Response:
    """Takes tokens out, puts others in, or both; what comes after stays, or is evaluated anew."""
    new = service.model.text.encode(body.text) if body.text is not None else body.tokens or []

    def edited(session: Session) -> dict[str, Any]:
        if body.op == "insert":
            if body.at is None:
                raise InvalidArgument("an insert needs at: the token before which it goes")
            report = session.insert(body.at, new, body.recompute)
        elif body.op == "delete":
            report = session.delete(*body.place(), body.recompute)
        else:
            report = session.replace(*body.place(), new, body.recompute)
        return dataclasses.asdict(report)

    return await change(service, name, owner, "edit", edited, revision, adds=len(new))


@router.post("/v1/sessions/{name}/pin", response_model=None)
async def pin(
    name: Name, body: Range, service: Serving, owner: Owner, revision: Revision
) -> Response:
    """Keeps tokens for ever, wherever they lie."""
    place = body.place()
    return await change(service, name, owner, "pin", lambda s: s.pin(*place), revision)


@router.post("/v1/sessions/{name}/unpin", response_model=None)
async def unpin(
    name: Name, body: Range, service: Serving, owner: Owner, revision: Revision
) -> Response:
    """Lets pinned tokens go, as the window moves on."""
    place = body.place()
    return await change(service, name, owner, "unpin", lambda s: s.unpin(*place), revision)


@router.post("/v1/sessions/{name}/spans", response_model=None)
async def span(
    name: Name, body: NamedRange, service: Serving, owner: Owner, revision: Revision
) -> Response:
    """Gives tokens a name, which follows them."""

    def named(session: Session) -> None:
        session.name(body.name, body.start, body.end)

    return await change(service, name, owner, "span", named, revision)


@router.post("/v1/sessions/{name}/rewind", response_model=None)
async def rewind(
    name: Name, body: Rewind, service: Serving, owner: Owner, revision: Revision
) -> Response:
    """Takes the last tokens back; the result is what they were."""
    count = body.count
    return await change(service, name, owner, "rewind", lambda s: s.rewind(count), revision)


@router.post("/v1/sessions/{name}/compress", response_model=None)
async def compress(
    name: Name, body: Compress, service: Serving, owner: Owner, revision: Revision
) -> Response:
    """Leaves `ratio` times fewer cells. Others are served meanwhile."""
    engine = service.engine

    def compressed(session: Session) -> dict[str, Any]:
        report = session.compress(
            body.ratio,
            body.method,
            body.recent,
            budget=body.budget,
            calibration=service.model.calibration if body.method == "kvzap" else None,
            progress=engine.yield_turn,
        )
        found = dataclasses.asdict(report)
        return {key: found[key] for key in _REPORTED}

    return await change(service, name, owner, "compress", compressed, revision)


_REPORTED = (
    *("method", "budget", "ratio"),
    *("cells_before", "cells_after", "bytes_before", "bytes_after"),
)

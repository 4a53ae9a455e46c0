"""A session as clients see it, and what the routes of one session have in common."""

import asyncio
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Header, Path
from pydantic import Field
from starlette.responses import JSONResponse

from kvkeep.engine import SessionRecord
from kvkeep.server.errors import ApiError
from kvkeep.server.service import Service
from kvkeep.session.session import Session

T = TypeVar("T")
NAME_PATTERN = r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}$"
SessionName = Annotated[str, Path(pattern=NAME_PATTERN)]
TokenIndex = Annotated[int, Field(ge=0, lt=2**40)]
SpanName = Annotated[str, Field(min_length=1, max_length=200)]
_IF_MATCH = (
    'The revision that the request is for, such as "3". At another revision it is refused with '
    "412 and changes nothing. Without the header, or with *, any revision is accepted."
)


def _revision(
    if_match: Annotated[str | None, Header(max_length=40, description=_IF_MATCH)] = None,
) -> int | None:
    return parse_if_match(if_match)


def parse_if_match(if_match: str | None) -> int | None:
    """Return the revision in `If-Match: "3"`, or None for any. Raises ApiError."""
    if if_match is None or if_match.strip() == "*":
        return None
    number = if_match.strip().removeprefix("W/").strip('"')
    if not (number.isascii() and number.isdigit() and len(number) < 19):
        raise ApiError(400, f'If-Match is a session\'s revision, such as "3"; found {if_match!r}')
    return int(number)


RevisionDep = Annotated[int | None, Depends(_revision)]


def session_entry(record: SessionRecord) -> dict[str, Any]:
    """Return a session's fields, without loading it from disk."""
    entry: dict[str, Any] = {
        "name": record.name,
        "object": "session",
        "revision": record.revision,
        "saved_revision": record.saved_revision,
        "busy": record.busy,
        "in_memory": record.session is not None,
        "resident": record.pinned,
        "named": record.named,
        "parent": record.parent,
        "created": int(record.created),
        "lost_revision": record.lost_revision,
    }
    if record.session is not None:
        entry |= _live_fields(record.session)
    return entry


def _live_fields(session: Session) -> dict[str, Any]:
    return {
        "tokens": len(session.tokens),
        "cells": session.cache.cells,
        "max_kv_size": session.max_kv_size,
        "policy": session.policy,
        "settings": session.settings,
        "keep": session.keep,
        "bytes": session.cache.nbytes,
        "kv_bits": session.bits.kv,
        "far_bits": session.bits.far,
        "spans": {name: [start, end] for name, (start, end) in session.places.items()},
    }


def session_response(record: SessionRecord, status: int = 200, **extra: Any) -> JSONResponse:
    """Return a session's fields, with its revision as the entity tag."""
    headers = {"ETag": f'"{record.revision}"'}
    return JSONResponse({**session_entry(record), **extra}, status, headers)


async def read_session(
    service: Service, name: str, owner: str, function: Callable[[SessionRecord], T]
) -> T:
    """Return what a function says of a session. It runs in the engine's thread."""
    return await asyncio.wrap_future(service.engine.inspect(name, owner, function))


async def change_session(
    service: Service,
    name: str,
    owner: str,
    operation: str,
    function: Callable[[Session], T],
    revision: int | None,
    adds: int = 0,
) -> JSONResponse:
    """Run a function on a session; return the session, and the function's value as `result`.

    operation: as listeners see it. adds: the most tokens that the function adds.
    """
    done = service.engine.change(name, owner, operation, function, revision, adds)
    result = await asyncio.wrap_future(done)
    return await read_session(
        service, name, owner, lambda record: session_response(record, result=result)
    )

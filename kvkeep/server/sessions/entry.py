"""A session as clients see it, and what the routes of one session have in common."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Header, Path
from pydantic import Field
from starlette.responses import JSONResponse

from kvkeep.engine import Engine, SessionRecord
from kvkeep.server.errors import ApiError
from kvkeep.server.schemas import OwnerDep, ServiceDep
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


def parse_if_match(if_match: str | None) -> int | None:
    """Return the revision in `If-Match: "3"`, or None for any. Raises ApiError."""
    if if_match is None or if_match.strip() == "*":
        return None
    number = if_match.strip().removeprefix("W/").strip('"')
    if not (number.isascii() and number.isdigit() and len(number) < 19):
        raise ApiError(400, f'If-Match is a session\'s revision, such as "3"; found {if_match!r}')
    return int(number)


@dataclass(frozen=True)
class SessionContext:
    """The session that a route changes. revision: the one that the request is for; None for any."""

    service: Service
    owner: str
    name: str
    revision: int | None

    @property
    def engine(self) -> Engine:
        return self.service.engine

    async def find(self) -> SessionRecord:
        """Return the session's record, without loading it from disk."""
        return await asyncio.wrap_future(self.engine.find(self.name, self.owner))

    async def inspect(self, function: Callable[[SessionRecord], T]) -> T:
        """Return what a function says of the session. It runs in the engine's thread."""
        return await read_session(self.service, self.name, self.owner, function)

    async def change(
        self, operation: str, function: Callable[[Session], Any], adds: int = 0
    ) -> JSONResponse:
        """Run a function on the session; return the session, and the function's value as `result`.

        operation: as listeners see it. adds: the most tokens that the function adds.
        """
        changed = self.engine.change(
            self.name, self.owner, operation, function, self.revision, adds
        )
        result = await asyncio.wrap_future(changed)
        return await self.inspect(lambda record: session_response(record, result=result))


def _session_context(
    name: SessionName,
    service: ServiceDep,
    owner: OwnerDep,
    if_match: Annotated[str | None, Header(max_length=40, description=_IF_MATCH)] = None,
) -> SessionContext:
    return SessionContext(service, owner, name, parse_if_match(if_match))


SessionDep = Annotated[SessionContext, Depends(_session_context)]


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

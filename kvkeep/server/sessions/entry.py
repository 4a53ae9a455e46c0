"""A session as clients read it, and what requests about one have in common."""

import asyncio
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Header, Path
from starlette.responses import JSONResponse

from kvkeep.engine import SessionRecord
from kvkeep.server.errors import Problem
from kvkeep.server.service import Service
from kvkeep.session.session import Session

T = TypeVar("T")
Name = Annotated[str, Path(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}$")]


_IF_MATCH = (
    'The revision that the change is for, such as "3": at another one it is refused with 412, and '
    "nothing is changed. Without it, or with *, the change is made at any revision."
)


def _revision(
    if_match: Annotated[str | None, Header(max_length=40, description=_IF_MATCH)] = None,
) -> int | None:
    return revision_in(if_match)


def revision_in(if_match: str | None) -> int | None:
    """The revision that a change is meant for; `If-Match: "3"`."""
    if if_match is None or if_match.strip() == "*":
        return None
    number = if_match.strip().removeprefix("W/").strip('"')
    if not (number.isascii() and number.isdigit() and len(number) < 19):
        raise Problem(400, f'If-Match is a session\'s revision, such as "3"; found {if_match!r}')
    return int(number)


Revision = Annotated[int | None, Depends(_revision)]


def entry_of(kept: SessionRecord) -> dict[str, Any]:
    """All that can be said of a session without bringing it back to memory."""
    entry: dict[str, Any] = {
        "name": kept.name,
        "object": "session",
        "revision": kept.revision,
        "saved_revision": kept.saved,
        "busy": kept.busy,
        "in_memory": kept.session is not None,
        "resident": kept.pinned,
        "named": kept.named,
        "parent": kept.parent,
        "created": int(kept.created),
        "lost_revision": kept.lost_revision,
    }
    if kept.session is not None:
        entry |= _live(kept.session)
    return entry


def _live(session: Session) -> dict[str, Any]:
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


def answer(kept: SessionRecord, status: int = 200, **more: Any) -> JSONResponse:
    """A session, with its revision as the entity tag."""
    headers = {"ETag": f'"{kept.revision}"'}
    return JSONResponse({**entry_of(kept), **more}, status, headers)


async def look(
    service: Service, name: str, owner: str, function: Callable[[SessionRecord], T]
) -> T:
    """What a function says of a session, asked in the engine's thread."""
    return await asyncio.wrap_future(service.engine.inspect(name, owner, function))


async def change(
    service: Service,
    name: str,
    owner: str,
    what: str,
    function: Callable[[Session], T],
    revision: int | None,
    adds: int = 0,
) -> JSONResponse:
    """Does something to a session; the session then, and what the function said as `result`."""
    done = service.engine.change(name, owner, what, function, revision, adds)
    result = await asyncio.wrap_future(done)
    return await look(service, name, owner, lambda kept: answer(kept, result=result))

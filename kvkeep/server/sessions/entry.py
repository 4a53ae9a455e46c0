"""A session as clients see it, and what the routes of one session have in common."""

from asyncio import wrap_future
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any

from fastapi import Depends, Header
from pydantic import BeforeValidator, Field
from starlette.responses import JSONResponse

from kvkeep.chat.compaction_items import is_handle
from kvkeep.engine import SessionOperations, SessionRecord
from kvkeep.engine.record import is_response_name
from kvkeep.engine.steps import DEFAULT_PREFILL_STEP
from kvkeep.server.errors import ApiError
from kvkeep.server.service import ContextDep, RequestContext
from kvkeep.session.memory_use import evaluated_by_rewind
from kvkeep.session.session import Session
from kvkeep.storage.sessions.interface import checked_name

_NAME_PATTERN = r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}$"  # for the OpenAPI document


def _checked_name(value: Any) -> Any:
    """Refuse a text that is no name. Raises InvalidArgument, which says what a name may have."""
    return checked_name(value) if isinstance(value, str) else value


SessionName = Annotated[str, Field(pattern=_NAME_PATTERN), BeforeValidator(_checked_name)]
TokenIndex = Annotated[int, Field(ge=0, lt=2**40)]
TokenCount = TokenIndex
SpanName = Annotated[str, Field(min_length=1, max_length=200)]
_IF_MATCH_HELP = (
    'The expected revision, such as "3". If the session is at another one, the request gets 412 '
    "and changes nothing. Without the header, or with *, any revision is accepted."
)


def require_unreserved(name: str | None) -> None:
    """Raise ApiError for a new session's name that the server gives, and counts and drops itself.

    Those of stored responses and of compacted conversations.
    """
    if name is not None and (is_response_name(name) or is_handle(name)):
        message = f"name: {name!r} is reserved for responses and compactions; use another name"
        raise ApiError(400, message, param="name")


def parse_if_match(if_match: str | None) -> int | None:
    """Return the revision in `If-Match: "3"`, or None for any. Raises ApiError."""
    if if_match is None or if_match.strip() == "*":
        return None
    revision = if_match.strip().removeprefix("W/").strip('"')
    if not (revision.isascii() and revision.isdigit() and len(revision) < 19):
        raise ApiError(400, f'If-Match must be a session revision, such as "3"; found {if_match!r}')
    return int(revision)


@dataclass(frozen=True)
class SessionContext(RequestContext):
    """A request about one session."""

    name: str
    revision: int | None  # that the session must have; None for any

    def find(self, operations: SessionOperations) -> SessionRecord:
        """Return the session's record, loaded or not. Raises NoSuchSession, WrongRevision."""
        record = operations.find(self.name, self.owner)
        record.require_revision(self.revision)
        return record

    async def change(
        self,
        operation: str,
        function: Callable[[Session], Any],
        added_tokens: int = 0,
        notes: Mapping[str, Any] = MappingProxyType({}),
        in_steps: bool = False,
    ) -> JSONResponse:
        """Apply a function that adds at most `added_tokens`; return the fields and its result.

        notes: see `Engine.change`. in_steps: whether the function calls `yield_turn`; such a
        change is not made if the client disconnects.
        """

        def apply(operations: SessionOperations) -> JSONResponse:
            arguments = (self.name, self.owner, operation, function, self.revision, added_tokens)
            result = operations.change(*arguments, notes)
            return session_response(operations.find(self.name, self.owner), result=result)

        if in_steps:
            return await self.run_in_steps(apply)
        return await wrap_future(self.engine.run(apply))

    async def rewinds_in_steps(self, count_of: Callable[[int], int]) -> bool:
        """Whether a rewind evaluates more than one step. count_of: of the number of tokens."""

        def num_evaluated(record: SessionRecord) -> int | None:
            memory = record.live.core.memory
            return evaluated_by_rewind(memory, count_of(len(memory.tokens)))

        return (await self.inspect(self.name, num_evaluated) or 0) > DEFAULT_PREFILL_STEP


async def _session_context(
    name: SessionName,
    context: ContextDep,
    if_match: Annotated[str | None, Header(max_length=40, description=_IF_MATCH_HELP)] = None,
) -> SessionContext:
    revision = parse_if_match(if_match)
    return SessionContext(context.service, context.owner, context.http_request, name, revision)


SessionDep = Annotated[SessionContext, Depends(_session_context)]


def session_entry(record: SessionRecord) -> dict[str, Any]:
    """Return a session's fields as JSON; those of its cells only if it is in memory."""
    entry: dict[str, Any] = {
        "name": record.name,
        "object": "session",
        "revision": record.revision,
        "saved_revision": record.saved_revision,
        "busy": record.busy,
        "in_memory": record.session is not None,
        "resident": record.resident,
        "named": record.named,
        "parent": record.parent,
        "title": record.title,
        "created": int(record.created),
        "lost_revision": record.lost_revision,
        "rounded": record.rounded or None,
    }
    if (session := record.session) is not None:
        entry |= {
            "tokens": len(session.tokens),
            "cells": session.cache.cells,
            "max_kv_size": session.max_kv_size,
            "policy": session.policy,
            "settings": session.settings,
            "keep": session.keep,
            "bytes": session.nbytes,
            "checkpoints": session.checkpoints,
            "kv_bits": session.bits.kv,
            "far_bits": session.bits.far,
            "spans": {name: [start, end] for name, (start, end) in session.span_ranges.items()},
        }
    return entry


def session_response(record: SessionRecord, status: int = 200, **extra: Any) -> JSONResponse:
    """Return a response with a session's fields and `extra`, and its revision as the ETag.

    To be called in the engine's thread, in one operation with what is reported.
    """
    return entry_response({**session_entry(record), **extra}, status)


def entry_response(entry: Mapping[str, Any], status: int = 200) -> JSONResponse:
    """Return a response with the fields of `session_entry`, and the revision as the ETag."""
    return JSONResponse(entry, status, {"ETag": f'"{entry["revision"]}"'})

"""The operations on an owner's sessions: the recent ones, and a stream of new ones."""

import asyncio
import dataclasses
from asyncio import wrap_future
from collections.abc import AsyncIterator
from typing import Any

from starlette.responses import StreamingResponse

from kvkeep.engine import Operation
from kvkeep.server.body_route import body_router
from kvkeep.server.service import ContextDep, RequestContext
from kvkeep.server.sessions.entry import SessionName
from kvkeep.server.sse import EVENTS, sse_event, sse_response

router = body_router()
_POLL_SECONDS = 1.0  # between two checks for the server's shutdown
_KEEPALIVE_POLLS = 15  # polls without an event, after which a comment keeps the connection open
_QUEUE_SIZE = 1000  # events buffered for a slow client; further ones are dropped


@router.get("/v1/events", response_model=None, responses=EVENTS)
async def events(context: ContextDep) -> StreamingResponse:
    """Stream new operations on the owner's sessions."""
    return sse_response(_operation_events(context, None), None)


@router.get("/v1/operations")
async def operations(context: ContextDep) -> dict[str, Any]:
    """List recent operations, the newest first.

    `seconds` are 0 for changes that evaluate nothing, and for the alignment of a request: its
    tokens are evaluated in the `generate` after it.
    """
    log = await wrap_future(context.engine.operations(context.owner))
    return {"object": "list", "data": [_operation_entry(operation) for operation in log]}


@router.get("/v1/sessions/{name}/events", response_model=None, responses=EVENTS)
async def session_events(name: SessionName, context: ContextDep) -> StreamingResponse:
    """Stream new operations on one session."""
    await wrap_future(context.engine.find(name, context.owner))
    return sse_response(_operation_events(context, name), None)


def _operation_entry(operation: Operation) -> dict[str, Any]:
    return {name: value for name, value in dataclasses.asdict(operation).items() if name != "owner"}


async def _operation_events(context: RequestContext, session: str | None) -> AsyncIterator[bytes]:
    """Yield operations on a session of the owner, or on all for None, until shutdown."""
    loop, queue = asyncio.get_running_loop(), asyncio.Queue[Operation](_QUEUE_SIZE)

    def enqueue(operation: Operation) -> None:
        if not queue.full():
            queue.put_nowait(operation)

    def listener(operation: Operation) -> None:
        if operation.owner == context.owner and session in (None, operation.session):
            loop.call_soon_threadsafe(enqueue, operation)

    stop_listening = context.engine.watch(listener)
    try:
        yield b": kvkeep\n\n"
        idle_polls = 0
        while not context.service.closing:
            try:
                operation = await asyncio.wait_for(queue.get(), _POLL_SECONDS)
            except TimeoutError:
                idle_polls += 1
                if idle_polls % _KEEPALIVE_POLLS == 0:
                    yield b": still here\n\n"
                continue
            yield sse_event(_operation_entry(operation), "operation")
    finally:
        stop_listening()

"""Operations on sessions, live and logged; and why prompts miss the prefix cache."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter
from starlette.responses import StreamingResponse

from kvkeep.engine import Operation, TextDifference, text_difference
from kvkeep.models.text.codec import TextCodec
from kvkeep.server.errors import ApiError
from kvkeep.server.service import ContextDep, RequestContext
from kvkeep.server.sessions.entry import SessionName
from kvkeep.server.sessions.generate import FeedRequest
from kvkeep.server.sse import EVENTS, sse_event, sse_response

router = APIRouter()
_POLL_SECONDS = 1.0  # between two checks for the server's shutdown
_KEEPALIVE_POLLS = 15
_QUEUE_SIZE = 1000  # events buffered for a slow client; further ones are dropped


@router.get("/v1/events", response_model=None, responses=EVENTS)
async def events(context: ContextDep) -> StreamingResponse:
    """Stream each operation on the owner's sessions, from now on."""
    return sse_response(_stream(context, None))


@router.get("/v1/operations")
async def operations(context: ContextDep) -> dict[str, Any]:
    """List recent operations, the newest first."""
    recent = await asyncio.wrap_future(context.engine.operations(context.owner))
    return {"object": "list", "data": [_entry(operation) for operation in recent]}


@router.get("/v1/sessions/{name}/events", response_model=None, responses=EVENTS)
async def session_events(name: SessionName, context: ContextDep) -> StreamingResponse:
    """Stream each operation on one session, from now on."""
    await asyncio.wrap_future(context.engine.find(name, context.owner))
    return sse_response(_stream(context, name))


@router.post("/v1/prefix/explain")
async def explain(body: FeedRequest, context: ContextDep) -> dict[str, Any]:
    """Report how much of a prompt would be reused, and why not more. The model does not run."""
    ids = await asyncio.to_thread(body.encode, context.codec, True)
    if not ids:
        raise ApiError(400, "give text, tokens or messages")
    match = await asyncio.wrap_future(context.engine.explain(ids, context.owner))
    return {
        "prompt_tokens": len(ids),
        "reused": match.tokens,
        "session": match.record.name if match.record else None,
        "reason": match.reason,
        "differs_at": match.common if match.common < len(ids) else None,
        **_difference_texts(text_difference(ids, match), context.codec),
    }


@router.get("/v1/prefix/misses")
async def misses(context: ContextDep) -> dict[str, Any]:
    """List recent prompts that were reused in part or not at all, in the form of `explain`."""
    recent = await asyncio.wrap_future(context.engine.cache_misses(context.owner))
    data = [
        {
            "number": miss.number,
            "created": int(miss.when),
            "prompt_tokens": miss.tokens,
            "reused": miss.reused,
            "session": miss.session,
            "reason": miss.reason,
            "differs_at": miss.difference.at if miss.difference else None,
            **_difference_texts(miss.difference, context.codec),
        }
        for miss in recent
    ]
    return {"object": "list", "data": data}


def _difference_texts(difference: TextDifference | None, codec: TextCodec) -> dict[str, str]:
    """Return the text that both share before the first difference, and how each continues."""
    if difference is None:
        return {}
    shared = difference.at - difference.start
    decode = codec.decode if difference.start == 0 else codec.decode_inside
    return {
        "common_text": decode(difference.prompt[:shared]),
        "prompt_text": codec.decode_inside(difference.prompt[shared:]),
        "nearest_text": codec.decode_inside(difference.nearest[shared:]),
    }


def _entry(operation: Operation) -> dict[str, Any]:
    fields = dataclasses.asdict(operation)
    return {name: value for name, value in fields.items() if name != "owner"}


async def _stream(context: RequestContext, name: str | None) -> AsyncIterator[bytes]:
    """Yield an owner's operations, of one session or of all, until the server shuts down."""
    loop, queue = asyncio.get_running_loop(), asyncio.Queue[Operation](_QUEUE_SIZE)

    def enqueue(operation: Operation) -> None:
        if not queue.full():
            queue.put_nowait(operation)

    def listener(operation: Operation) -> None:
        if operation.owner == context.owner and name in (None, operation.session):
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
            yield sse_event(_entry(operation), "operation")
    finally:
        stop_listening()

"""What is done to sessions, as it is done; and why a prompt would be evaluated again."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter
from starlette.responses import StreamingResponse

from kvkeep.engine import Operation, TextDifference, text_difference
from kvkeep.server.errors import Problem
from kvkeep.server.openapi import EVENTS
from kvkeep.server.schemas import Owner, Serving
from kvkeep.server.service import Service
from kvkeep.server.sessions.entry import Name
from kvkeep.server.sessions.writing import Fed
from kvkeep.server.sse import event, stream

router = APIRouter()
_BEAT, _LOOK = 15, 1.0  # seconds: between signs of life, and between looks whether to end
_WAITING = 1000  # events that a client may be behind


@router.get("/v1/events", response_model=None, responses=EVENTS)
async def events(service: Serving, owner: Owner) -> StreamingResponse:
    """Each operation on any of the owner's sessions, from now on."""
    return stream(_told(service, owner, None))


@router.get("/v1/operations")
async def operations(service: Serving, owner: Owner) -> dict[str, Any]:
    """The last of them, until now; the newest one first."""
    found = await asyncio.wrap_future(service.engine.operations(owner))
    return {"object": "list", "data": [_entry(each) for each in found]}


@router.get("/v1/sessions/{name}/events", response_model=None, responses=EVENTS)
async def events_of(name: Name, service: Serving, owner: Owner) -> StreamingResponse:
    """The same of one session."""
    await asyncio.wrap_future(service.engine.find(name, owner))
    return stream(_told(service, owner, name))


@router.post("/v1/prefix/explain")
async def explain(body: Fed, service: Serving, owner: Owner) -> dict[str, Any]:
    """How much of a prompt would not be evaluated again, and why the rest would be."""
    ids = await asyncio.to_thread(body.ids, service, True)
    if not ids:
        raise Problem(400, "give text, tokens or messages")
    match = await asyncio.wrap_future(service.engine.explain(ids, owner))
    return {
        "prompt_tokens": len(ids),
        "reused": match.tokens,
        "session": match.record.name if match.record else None,
        "reason": match.reason,
        "differs_at": match.common if match.common < len(ids) else None,
        **_texts(text_difference(ids, match), service),
    }


@router.get("/v1/prefix/misses")
async def misses(service: Serving, owner: Owner) -> dict[str, Any]:
    """The last prompts that were evaluated from some token on, as `explain` says it of them."""
    found = await asyncio.wrap_future(service.engine.cache_misses(owner))
    data = [
        {
            "number": miss.number,
            "created": int(miss.when),
            "prompt_tokens": miss.tokens,
            "reused": miss.reused,
            "session": miss.session,
            "reason": miss.reason,
            "differs_at": miss.difference.at if miss.difference else None,
            **_texts(miss.difference, service),
        }
        for miss in found
    ]
    return {"object": "list", "data": data}


def _texts(found: TextDifference | None, service: Service) -> dict[str, str]:
    """What both texts have before they part, and how each goes on."""
    if found is None:
        return {}
    codec, shared = service.model.text, found.at - found.start
    common = codec.decode if found.start == 0 else codec.decode_inside
    return {
        "common_text": common(found.prompt[:shared]),
        "prompt_text": codec.decode_inside(found.prompt[shared:]),
        "nearest_text": codec.decode_inside(found.nearest[shared:]),
    }


def _entry(operation: Operation) -> dict[str, Any]:
    entry = dataclasses.asdict(operation)
    del entry["owner"]
    return entry


async def _told(service: Service, owner: str, name: str | None) -> AsyncIterator[bytes]:
    loop, queue = asyncio.get_running_loop(), asyncio.Queue[Operation](_WAITING)

    def put(operation: Operation) -> None:
        if not queue.full():
            queue.put_nowait(operation)

    def came(operation: Operation) -> None:
        if operation.owner == owner and name in (None, operation.session):
            loop.call_soon_threadsafe(put, operation)

    stop = service.engine.watch(came)
    try:
        yield b": kvkeep\n\n"
        quiet = 0
        while not service.closing:
            try:
                operation = await asyncio.wait_for(queue.get(), _LOOK)
            except TimeoutError:
                quiet += 1
                if quiet % _BEAT == 0:
                    yield b": still here\n\n"
                continue
            yield event(_entry(operation), "operation")
    finally:
        stop()

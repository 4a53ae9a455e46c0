"""`/v1/responses`: stored responses that others can continue.

A response is a session of the engine. A response that continues it is a fork, so any number may.
The fork keeps the longest prefix of the new prompt that the parent holds. A response that is not
stored, or that ends early, leaves an unnamed session, whose cells the owner's next prompt reuses.
"""

import asyncio
from asyncio import wrap_future
from collections.abc import AsyncIterator
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import Path, Query
from starlette.responses import Response

from kvkeep.engine import Finished, PrefillProgress
from kvkeep.server.alignment import own_fields
from kvkeep.server.body_route import body_router
from kvkeep.server.errors import CONTEXT_LENGTH_CODE, ApiError, logged_api_error
from kvkeep.server.limits import MAX_CHARACTERS, ShortText
from kvkeep.server.openai import stored_items
from kvkeep.server.openai.compaction_response import compaction_events, compaction_response
from kvkeep.server.openai.pending_response import (
    PendingResponse,
    abandon_response,
    initial_response,
    start_response,
)
from kvkeep.server.openai.response_configuration import configured
from kvkeep.server.openai.response_items import final_fields
from kvkeep.server.openai.response_prompt import name_ignored, prompt_of, read_conversation
from kvkeep.server.openai.response_replay import replayed_events
from kvkeep.server.openai.response_request import ResponsesRequest
from kvkeep.server.openai.response_stream import EventEncoder
from kvkeep.server.openai.usage import llamacpp_progress, llamacpp_timings
from kvkeep.server.service import ContextDep, RequestContext
from kvkeep.server.sse import JSON_OR_EVENTS, sse_response

router = body_router()
_ResponseId = Annotated[str, Path(alias="response", max_length=MAX_CHARACTERS)]


@router.post("/v1/responses", response_model=None, responses=JSON_OR_EVENTS)
@router.post("/responses", response_model=None, include_in_schema=False)
async def create(body: ResponsesRequest, context: ContextDep) -> Response | dict[str, Any]:
    """Generate a response, optionally continuing an earlier one."""
    name_ignored(body, context)
    conversation = await read_conversation(body, context)
    body = configured(body, conversation.expanded)
    if conversation.ends_with_trigger:
        response = initial_response(body, context)
        response = await compaction_response(response, body, conversation, context)
        return sse_response(compaction_events(response), None) if body.stream else response
    try:
        pending = await start_response(body, conversation, context)
    except ApiError as error:
        if body.stream and error.code == CONTEXT_LENGTH_CODE:
            return sse_response(_failed_events(body, error, context), None)
        raise
    if body.stream:
        return sse_response(_events(pending, context), partial(abandon_response, pending, context))
    try:
        (result,) = await context.collect(
            pending.stream, on_event=lambda _, event: pending.reading.read(event)
        )
        return await _complete(pending, result.finished, context)
    except BaseException:
        await asyncio.shield(abandon_response(pending, context))
        raise


@router.post("/v1/responses/input_tokens")
async def input_tokens(body: ResponsesRequest, context: ContextDep) -> dict[str, Any]:
    """Count the tokens of the prompt without evaluating it."""
    conversation = await read_conversation(body, context)
    body = configured(body, conversation.expanded)
    prompt = await prompt_of(conversation, body, context)
    return {"object": "response.input_tokens", "input_tokens": len(prompt.ids)}


@router.get("/v1/responses/{response}", response_model=None, responses=JSON_OR_EVENTS)
async def retrieve(
    response_id: _ResponseId,
    context: ContextDep,
    stream: bool = False,
    starting_after: Annotated[int | None, Query(ge=-1, lt=2**53)] = None,
) -> Response | dict[str, Any]:
    """Return a stored response, or replay its events; those behind one of this number."""
    response = await stored_items.stored_response(response_id, context)
    if not stream:
        return response
    return sse_response(replayed_events(response, starting_after), None)


@router.get("/v1/responses/{response}/input_items")
async def input_items(
    response_id: _ResponseId,
    context: ContextDep,
    after: ShortText | None = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
) -> dict[str, Any]:
    """List the items that a stored response answered, with those of earlier responses."""
    return await stored_items.input_page(response_id, after, limit, order == "desc", context)


@router.delete("/v1/responses/{response}")
async def delete(response_id: _ResponseId, context: ContextDep) -> dict[str, Any]:
    """Delete a stored response; responses that continue it are kept."""
    await stored_items.stored_response(response_id, context)
    await wrap_future(context.engine.delete(response_id, context.owner))
    return {"id": response_id, "object": "response", "deleted": True}


@router.post("/v1/responses/{response}/cancel")
async def cancel(response_id: _ResponseId, context: ContextDep) -> dict[str, Any]:
    """Cancel a response in progress, after the current token."""
    pending = context.service.pending_responses.get((context.owner, response_id))
    if pending is None:
        return await stored_items.stored_response(response_id, context)
    pending.stream.cancel()
    return {**pending.response, "status": "cancelled"}


async def _complete(
    pending: PendingResponse, finished: Finished, context: RequestContext
) -> dict[str, Any]:
    """Return the complete response; store it unless `store` is false."""
    reading, prepared_tokens = pending.reading, pending.prepared_tokens
    fields = final_fields(reading.status, finished, prepared_tokens, reading.reasoning_tokens)
    fields |= own_fields(finished.usage)
    response = {**pending.response, "output": reading.output, **fields}
    if pending.request.stores:
        await stored_items.store_response(response, pending.items, context)
        context.service.pending_responses.pop((context.owner, response["id"]), None)
    else:
        await abandon_response(pending, context)
    return response


async def _events(pending: PendingResponse, context: RequestContext) -> AsyncIterator[bytes]:
    """Yield the events of a stream."""
    encoder, request = EventEncoder(), pending.request
    encode = encoder.encode
    reading, stream, response = pending.reading, pending.stream, pending.response
    try:
        yield encode("response.created", response=response)
        yield encode("response.in_progress", response=response)
        for event_type, fields in reading.begin():
            yield encode(event_type, **fields)
        async for _, event in stream:
            if isinstance(event, PrefillProgress):
                if request.return_progress:
                    progress = {"prompt_progress": llamacpp_progress(event)}
                    yield encode("response.in_progress", response=response, **progress)
                continue
            timings = {}
            if request.timings_per_token:
                timings = {"timings": llamacpp_timings(stream.generations[0].usage)}
            for event_type, fields in reading.push(event):
                yield encode(event_type, **fields, **timings)
        finished = stream.results[0].finished
        response = await _complete(pending, finished, context)
        timings = {"timings": llamacpp_timings(finished.usage)}
        yield encode(f"response.{response['status']}", response=response, **timings)
    except Exception as error:  # the status is already sent: the last events report the error
        response = {**response, "output": reading.output}
        for data in encoder.failure(response, logged_api_error(error, "a response failed")):
            yield data
    finally:
        await asyncio.shield(abandon_response(pending, context))


async def _failed_events(
    body: ResponsesRequest, error: ApiError, context: RequestContext
) -> AsyncIterator[bytes]:
    """Yield the events of a response that failed before it began, and is not stored.

    As in the hosted API a streamed prompt that does not fit is reported so: clients such as Codex
    read the code of `response.failed`.
    """
    encoder, response = EventEncoder(), initial_response(body, context)
    yield encoder.encode("response.created", response=response)
    yield encoder.encode("response.in_progress", response=response)
    for data in encoder.failure(response, error):
        yield data

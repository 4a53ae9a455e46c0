"""`/v1/responses`: stored responses that others can continue.

A response is a session of the engine. A response that continues it is a fork, so any number may.
The fork keeps the longest prefix of the new prompt that the parent holds.
"""

import asyncio
import contextlib
import itertools
import secrets
from asyncio import wrap_future
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import APIRouter, Path
from starlette.responses import Response

from kvkeep.engine import GenerationRequest, PrefillProgress
from kvkeep.errors import ContextFull, KvkeepError, NoSuchSession
from kvkeep.server.errors import ApiError, api_error_for
from kvkeep.server.generation import constrain, prompt_ids
from kvkeep.server.ignored_fields import RESPONSES_RULES
from kvkeep.server.openai import response_items as items
from kvkeep.server.openai.response_items import ID_PATTERN, ResponsesRequest
from kvkeep.server.openai.usage import llamacpp_progress, llamacpp_timings
from kvkeep.server.overflow import overflow_error, require_prompt_fits
from kvkeep.server.service import ContextDep, GenerationResult, GenerationStream, RequestContext
from kvkeep.server.sse import JSON_OR_EVENTS, sse_event, sse_response
from kvkeep.server.tools import Tools

router = APIRouter()
_ResponseId = Annotated[str, Path(alias="response", pattern=ID_PATTERN)]
_RESPONSE_NOTE, _MESSAGES_NOTE = "response", "messages"  # keys of a session's notes


@dataclass
class _PendingResponse:
    request: ResponsesRequest
    response: dict[str, Any]  # the response object so far; its id is the session's name
    messages: list[dict[str, Any]]  # the conversation that it answers
    cached_tokens: int  # first tokens of the prompt that the session held already
    stream: GenerationStream
    tools: Tools
    message_id: str = field(default_factory=lambda: f"msg_{secrets.token_hex(12)}")


@router.post("/v1/responses", response_model=None, responses=JSON_OR_EVENTS)
@router.post("/responses", response_model=None, include_in_schema=False)
async def create(body: ResponsesRequest, context: ContextDep) -> Response | dict[str, Any]:
    """Generate a response, optionally continuing an earlier one."""
    RESPONSES_RULES.check(body, context.notices)
    pending = await _start(body, context)
    if body.stream:
        return sse_response(_events(pending, context))
    try:
        (result,) = await context.collect(pending.stream)
    except BaseException:
        await _discard(pending.response["id"], context)
        raise
    return await _complete(pending, result, context)


@router.post("/v1/responses/input_tokens")
async def input_tokens(body: ResponsesRequest, context: ContextDep) -> dict[str, Any]:
    """Count the tokens of the prompt without evaluating it."""
    tools = body.validate_tools()
    messages = [*body.system_messages(), *await _conversation(body, context)]
    ids = await prompt_ids(context, messages, tools)
    return {"object": "response.input_tokens", "input_tokens": len(ids)}


@router.get("/v1/responses/{response}")
async def retrieve(response_id: _ResponseId, context: ContextDep) -> dict[str, Any]:
    """Return a stored response."""
    return dict((await _stored_notes(response_id, context))[_RESPONSE_NOTE])


@router.delete("/v1/responses/{response}")
async def delete(response_id: _ResponseId, context: ContextDep) -> dict[str, Any]:
    """Delete a stored response; responses that continue it are kept."""
    await _stored_notes(response_id, context)
    await wrap_future(context.engine.delete(response_id, context.owner))
    return {"id": response_id, "object": "response", "deleted": True}


@router.post("/v1/responses/{response}/cancel")
async def cancel(response_id: _ResponseId, context: ContextDep) -> dict[str, Any]:
    """Cancel a response in progress, after the current token."""
    pending = context.service.pending_responses.get((context.owner, response_id))
    if pending is None:
        return await retrieve(response_id, context)
    pending.stream.cancel()
    return {**pending.response, "status": "cancelled"}


async def _start(body: ResponsesRequest, context: RequestContext) -> _PendingResponse:
    """Fork the previous response's session, if any, and submit the prompt in it."""
    service, engine, owner = context.service, context.engine, context.owner
    tools, schema = body.validate_tools(), body.output_schema()
    response_id = f"resp_{secrets.token_hex(12)}"
    messages = await _conversation(body, context)
    ids = await prompt_ids(context, [*body.system_messages(), *messages], tools)
    (sampling,) = constrain(context, body.samplings(context.default_sampling), tools, schema)
    context_size = service.context_size
    require_prompt_fits(service, len(ids))
    if body.truncation == "disabled" and len(ids) + (body.max_output_tokens or 1) > context_size:
        raise overflow_error(service, len(ids))
    if body.previous_response_id is not None:
        fork = engine.fork(body.previous_response_id, owner, new_name=response_id, notes={})
        await wrap_future(fork)
    try:
        cached_tokens = await wrap_future(engine.prepare(ids, response_id, owner))
        max_tokens = service.max_tokens(body.max_output_tokens)
        request = GenerationRequest(tuple(ids[cached_tokens:]), max_tokens, sampling)
        stream = await context.generate(request, response_id)
    except ContextFull as error:
        await _discard(response_id, context)
        raise overflow_error(service, len(ids)) from error
    except BaseException:
        await _discard(response_id, context)
        raise
    response = items.new_response(response_id, body, service.model_name)
    pending = _PendingResponse(body, response, messages, cached_tokens, stream, tools)
    service.pending_responses[owner, response_id] = pending
    return pending


async def _complete(
    pending: _PendingResponse, result: GenerationResult, context: RequestContext
) -> dict[str, Any]:
    """Return the complete response; store it in its session's notes unless `store` is false."""
    text, calls = pending.tools.parse(result.text)
    output = items.output_items(pending.message_id, text, calls)
    final_fields = items.final_fields(result.finished, pending.cached_tokens)
    response = {**pending.response, "output": output, **final_fields}
    response_id = response["id"]
    context.service.pending_responses.pop((context.owner, response_id), None)
    if not response["store"]:
        await _discard(response_id, context)
        return response
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = [call.openai_entry() for call in calls]
    notes = {_RESPONSE_NOTE: response, _MESSAGES_NOTE: [*pending.messages, message]}
    await wrap_future(context.engine.set_notes(response_id, context.owner, notes))
    return response


async def _events(pending: _PendingResponse, context: RequestContext) -> AsyncIterator[bytes]:
    """Yield text as it is generated; with tools, all items at the end, once calls are parsed."""
    sequence_numbers, completed, request = itertools.count(), False, pending.request
    message_id, streams_text = pending.message_id, not pending.tools
    generation, result = pending.stream.generations[0], pending.stream.results[0]
    location = {"item_id": message_id, "output_index": 0, "content_index": 0}

    def encode(event_type: str, **data: Any) -> bytes:
        fields = {"type": event_type, "sequence_number": next(sequence_numbers), **data}
        return sse_event(fields, event_type)

    try:
        yield encode("response.created", response=pending.response)
        yield encode("response.in_progress", response=pending.response)
        if streams_text:
            empty_item = items.message_item(message_id, "", "in_progress")
            yield encode("response.output_item.added", output_index=0, item=empty_item)
            yield encode("response.content_part.added", **location, part=items.text_part(""))
        async for _, event in pending.stream:
            if isinstance(event, PrefillProgress):
                if request.return_progress:
                    progress = {"prompt_progress": llamacpp_progress(event)}
                    yield encode("response.in_progress", response=pending.response, **progress)
            elif event.text and streams_text:
                delta: dict[str, Any] = {"delta": event.text, "logprobs": []}
                if request.timings_per_token:
                    delta["timings"] = llamacpp_timings(generation.usage)
                yield encode("response.output_text.delta", **location, **delta)
        response = await _complete(pending, result, context)
        completed = True
        if streams_text:
            yield encode("response.output_text.done", **location, text=result.text, logprobs=[])
            part = items.text_part(result.text)
            yield encode("response.content_part.done", **location, part=part)
        for index, item in enumerate(response["output"]):
            if not streams_text:
                yield encode("response.output_item.added", output_index=index, item=item)
            yield encode("response.output_item.done", output_index=index, item=item)
        timings = llamacpp_timings(result.finished.usage)
        yield encode(f"response.{response['status']}", response=response, timings=timings)
    except Exception as error:  # the status is already sent: the last event reports the error
        api_error = api_error_for(error)
        fields = {"message": api_error.message, "param": api_error.param}
        yield encode("error", code=api_error.error_type, **fields)
    finally:
        if not completed:
            await asyncio.shield(_discard(pending.response["id"], context))


async def _stored_notes(response_id: str, context: RequestContext) -> dict[str, Any]:
    """Return the notes with a finished response. Raises ApiError (404) if there is none."""
    try:
        record = await wrap_future(context.engine.find(response_id, context.owner))
    except NoSuchSession:
        message = f"there is no response {response_id!r}"
        raise ApiError(404, message, "not_found_error") from None
    if _RESPONSE_NOTE not in record.notes:
        raise ApiError(404, f"response {response_id!r} is still in progress", "not_found_error")
    return record.notes


async def _conversation(body: ResponsesRequest, context: RequestContext) -> list[dict[str, Any]]:
    """Return the conversation with the request's input, without system messages."""
    if body.previous_response_id is None:
        return body.input_messages()
    notes = await _stored_notes(body.previous_response_id, context)
    return [*notes[_MESSAGES_NOTE], *body.input_messages()]


async def _discard(response_id: str, context: RequestContext) -> None:
    """Remove a response's session, and cancel its generation if it is still running."""
    pending = context.service.pending_responses.pop((context.owner, response_id), None)
    if pending is not None:
        pending.stream.cancel()
    with contextlib.suppress(KvkeepError):
        await wrap_future(context.engine.discard(response_id, context.owner))

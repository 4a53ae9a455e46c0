"""`/v1/responses`: stored responses that others can continue.

A response is a session of the engine. A response that continues it is a fork, so any number may.
The fork keeps the longest prefix of the new prompt that the parent holds. A response that is not
stored, or that ends early, leaves an unnamed session, whose cells the owner's next prompt reuses.
"""

import asyncio
import contextlib
import secrets
from asyncio import wrap_future
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import Path, Query
from starlette.responses import Response

from kvkeep.chat.compaction_items import ITEM_TYPES
from kvkeep.engine import Finished, GenerationRequest, PrefillProgress
from kvkeep.errors import ContextFull, KvkeepError
from kvkeep.server.alignment import own_fields
from kvkeep.server.body_route import body_router
from kvkeep.server.chat_input import ChatInput, StopAfterFirstCall
from kvkeep.server.errors import CONTEXT_LENGTH_CODE, ApiError, logged_api_error
from kvkeep.server.generation import STREAM_PATIENCE
from kvkeep.server.generation_stream import GenerationStream
from kvkeep.server.limits import MAX_CHARACTERS, ShortText
from kvkeep.server.openai import stored_items
from kvkeep.server.openai.cache_breakpoints import requested_pins
from kvkeep.server.openai.compaction import compact_conversation, prepare_compacted
from kvkeep.server.openai.compaction_response import compaction_events, compaction_response
from kvkeep.server.openai.response_configuration import configured
from kvkeep.server.openai.response_items import ResponseItems, final_fields, new_response
from kvkeep.server.openai.response_prompt import (
    ResponseConversation,
    expand,
    name_ignored,
    parse_items,
    prompt_of,
    read_conversation,
)
from kvkeep.server.openai.response_replay import replayed_events
from kvkeep.server.openai.response_request import ResponsesRequest
from kvkeep.server.openai.response_stream import EventEncoder, ResponseReading
from kvkeep.server.openai.usage import llamacpp_progress, llamacpp_timings
from kvkeep.server.overflow import check_prompt_size, overflow_error
from kvkeep.server.service import ContextDep, RequestContext
from kvkeep.server.sse import JSON_OR_EVENTS, sse_response

router = body_router()
_ResponseId = Annotated[str, Path(alias="response", max_length=MAX_CHARACTERS)]


@dataclass
class _PendingResponse:
    request: ResponsesRequest
    response: dict[str, Any]  # the response object so far
    items: list[dict[str, Any]]  # the conversation that it answers
    session_name: str | None  # None for an unnamed session
    prepared_tokens: int  # first tokens of the prompt that the session held already
    stream: GenerationStream
    reading: ResponseReading


@router.post("/v1/responses", response_model=None, responses=JSON_OR_EVENTS)
@router.post("/responses", response_model=None, include_in_schema=False)
async def create(body: ResponsesRequest, context: ContextDep) -> Response | dict[str, Any]:
    """Generate a response, optionally continuing an earlier one."""
    name_ignored(body, context)
    conversation = await read_conversation(body, context)
    body = configured(body, conversation.expanded)
    if conversation.ends_with_trigger:
        response = _new_response(body, context)
        response = await compaction_response(response, body, conversation, context)
        return sse_response(compaction_events(response), None) if body.stream else response
    try:
        pending = await _start(body, conversation, context)
    except ApiError as error:
        if body.stream and error.code == CONTEXT_LENGTH_CODE:
            return sse_response(_failed_events(body, error, context), None)
        raise
    if body.stream:
        return sse_response(_events(pending, context), partial(_abandon, pending, context))
    try:
        (result,) = await context.collect(
            pending.stream, on_event=lambda _, event: pending.reading.read(event)
        )
        return await _complete(pending, result.finished, context)
    except BaseException:
        await asyncio.shield(_abandon(pending, context))
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


async def _exceeds_threshold(
    items: list[dict[str, Any]], prompt: ChatInput, body: ResponsesRequest, context: RequestContext
) -> bool:
    """Whether a conversation is to be compacted before its response, as the request wants it.

    After a compaction, only once a quarter of the threshold came behind it: its item may stand for
    more tokens than the threshold, in fewer cells.
    """
    threshold = body.compact_threshold
    if threshold is None or len(prompt.ids) <= threshold:
        return False
    newest = next((item for item in reversed(items) if item.get("type") in ITEM_TYPES), None)
    if newest is None:
        return True
    compacted = await prompt_of(await expand([newest], context), body, context)
    return len(prompt.ids) - len(compacted.ids) > threshold // 4


async def _start(
    body: ResponsesRequest, conversation: ResponseConversation, context: RequestContext
) -> _PendingResponse:
    """Prepare the response's session, and start the generation in it."""
    service, owner, schema = context.service, context.owner, body.output_schema()
    items, prompt = conversation.items, await prompt_of(conversation, body, context)
    compaction: dict[str, Any] | None = None
    if await _exceeds_threshold(items, prompt, body, context):
        compaction = (await compact_conversation(body, conversation.expanded, context)).item
        conversation = await expand([compaction], context)
        prompt = await prompt_of(conversation, body, context)
    handle = conversation.handle
    prompt, samplings = await prompt.constrain(
        body.samplings(context.default_sampling),
        schema,
        reasoning_budget=body.max_reasoning_tokens,
    )
    early_end: StopAfterFirstCall | None = None
    if body.parallel_tool_calls is False and prompt.chat.callable_tools:
        samplings, (early_end,) = StopAfterFirstCall.add(samplings)
    num_new_tokens = (body.max_output_tokens or 1) if body.truncation == "disabled" else 1
    may_slide = None if body.truncation is None else body.truncation == "auto"
    if handle is None or service.engine.default_policy != "full":  # fewer cells than tokens
        check_prompt_size(context, len(prompt.ids), num_new_tokens, may_slide)
    response = _new_response(body, context)
    has_name = body.stores or body.previous_response_id or handle
    name = response["id"] if has_name else None
    try:
        prepared_tokens = await _prepare(body, name, prompt.ids, handle, context) if name else 0
        request = GenerationRequest(
            tuple(prompt.ids[prepared_tokens:]),
            0 if body.prewarms else service.max_tokens(body.max_output_tokens),
            samplings[0],
            logprobs=body.logprob_count,
            pins=await requested_pins(
                context, body, prompt, conversation.expanded, partial(parse_items, body)
            ),
            **body.own_settings(context),
            written_tokens=prompt.written_tokens,
            title=prompt.title,
            whole_text=name is not None and not prepared_tokens,
        )
        stream = await _submit(request, name, STREAM_PATIENCE if body.stream else None, context)
    except BaseException as error:
        if name:
            await asyncio.shield(_remove_name(name, context))
        if isinstance(error, ContextFull):
            raise overflow_error(service, len(prompt.ids)) from error
        raise
    response_items = ResponseItems(
        body, prompt.chat.callable_tools, compaction, conversation.client_types(body)
    )
    reader = prompt.new_reader(stream.results[0])
    reading = ResponseReading(
        reader, response_items, context.tokenizer, early_end, not body.prewarms
    )
    pending = _PendingResponse(body, response, items, name, prepared_tokens, stream, reading)
    service.pending_responses[owner, response["id"]] = pending
    return pending


def _new_response(body: ResponsesRequest, context: RequestContext) -> dict[str, Any]:
    service, response_id = context.service, f"resp_{secrets.token_hex(12)}"
    slides = service.context_policy == "slide"
    return new_response(response_id, body, service.model_name, slides)


async def _prepare(
    body: ResponsesRequest, name: str, ids: list[int], handle: str | None, context: RequestContext
) -> int:
    """Create the response's session if it begins as a fork of another one.

    handle: of a compacted session that it continues. Returns how many of the prompt's first tokens
    it holds by that; 0 if its whole text is to become the prompt, as with a previous response.
    """
    if handle is not None and (held := await prepare_compacted(ids, name, handle, context)):
        return held
    engine, owner, previous_name = context.engine, context.owner, body.previous_response_id
    if previous_name is not None:
        await wrap_future(engine.fork(previous_name, owner, new_name=name, notes={}))
    return 0


async def _submit(
    request: GenerationRequest, name: str | None, patience: float | None, context: RequestContext
) -> GenerationStream:
    stream = GenerationStream(1)
    (listener,) = stream.listeners
    submit = partial(context.engine.submit, request, name, context.owner, listener)
    await context.start(stream, [submit], patience)
    return stream


async def _complete(
    pending: _PendingResponse, finished: Finished, context: RequestContext
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
        await _abandon(pending, context)
    return response


async def _events(pending: _PendingResponse, context: RequestContext) -> AsyncIterator[bytes]:
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
        await asyncio.shield(_abandon(pending, context))


async def _failed_events(
    body: ResponsesRequest, error: ApiError, context: RequestContext
) -> AsyncIterator[bytes]:
    """Yield the events of a response that failed before it began, and is not stored.

    As in the hosted API a streamed prompt that does not fit is reported so: clients such as Codex
    read the code of `response.failed`.
    """
    encoder, response = EventEncoder(), _new_response(body, context)
    yield encoder.encode("response.created", response=response)
    yield encoder.encode("response.in_progress", response=response)
    for data in encoder.failure(response, error):
        yield data


async def _abandon(pending: _PendingResponse, context: RequestContext) -> None:
    """Cancel a response and make its session unnamed, unless it is complete or abandoned."""
    key = context.owner, pending.response["id"]
    if context.service.pending_responses.pop(key, None) is None:
        return
    pending.stream.cancel()
    if pending.session_name is not None:
        await _remove_name(pending.session_name, context)


async def _remove_name(name: str, context: RequestContext) -> None:
    with contextlib.suppress(KvkeepError):
        await wrap_future(context.engine.remove_name(name, context.owner))

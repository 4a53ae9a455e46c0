"""`/v1/responses`: stored responses that others can continue.

A response is a session of the engine. One that continues it is a fork: the parent never changes, so
any number of responses may continue it. The fork keeps the longest prefix of the new prompt that
the parent holds: all of the parent where the template renders the conversation as before. A
template that strips earlier text makes the rest be evaluated again; `cached_tokens` tells.
"""

import asyncio
import contextlib
import itertools
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import APIRouter, Path
from fastapi import Request as HttpRequest
from starlette.responses import Response

from kvkeep.engine import Finished, GeneratedToken, GenerationRequest, PrefillProgress
from kvkeep.errors import KvkeepError, NoSuchSession
from kvkeep.server.errors import ApiError, api_error_for
from kvkeep.server.generation import constrain, prompt_ids
from kvkeep.server.openai.response_items import (
    ID_PATTERN,
    GeneratedOutput,
    ResponsesRequest,
    final_fields,
    input_messages,
    message_item,
    new_response,
    text_part,
)
from kvkeep.server.openai.usage import llamacpp_progress, llamacpp_timings
from kvkeep.server.schemas import OwnerDep, ServiceDep
from kvkeep.server.service import GenerationStream, Service
from kvkeep.server.sse import JSON_OR_EVENTS, sse_event, sse_response
from kvkeep.server.tools import Tools

router = APIRouter()
_ResponseId = Annotated[str, Path(pattern=ID_PATTERN)]
_RESPONSE, _MESSAGES = "response", "messages"  # keys of a session's notes


@dataclass
class _PendingResponse:
    """A response in progress.

    body: the response object so far. messages: the conversation that it answers. prompt: tokens;
    cached: those of them that were not evaluated. progress, timed: whether events report prefill
    steps, and the timings of each token. item_id: of the message that is generated.
    """

    body: dict[str, Any]
    messages: list[dict[str, Any]]
    prompt: int
    cached: int
    generations: GenerationStream
    tools: Tools | None
    progress: bool
    timed: bool
    item_id: str = field(default_factory=lambda: f"msg_{secrets.token_hex(12)}")

    def timings(self) -> dict[str, Any]:
        """Return the timings so far, if the request wants them."""
        if not self.timed:
            return {}
        return {"timings": llamacpp_timings(self.generations.generations[0].usage)}


@router.post("/v1/responses", response_model=None, responses=JSON_OR_EVENTS)
@router.post("/responses", response_model=None, include_in_schema=False)
async def create(
    body: ResponsesRequest, http_request: HttpRequest, service: ServiceDep, owner: OwnerDep
) -> Response | dict[str, Any]:
    """Generate a response, alone or as the continuation of an earlier one."""
    pending = await _start(body, service, owner)
    if body.stream:
        return sse_response(_stream(pending, service, owner))
    try:
        async with pending.generations.cancel_on_disconnect(http_request):
            (result,) = await pending.generations.collect()
    except BaseException:
        await _discard(pending.body["id"], service, owner)
        raise
    return await _complete(pending, result.text, result.end, service, owner)


@router.post("/v1/responses/input_tokens")
async def input_tokens(
    body: ResponsesRequest, service: ServiceDep, owner: OwnerDep
) -> dict[str, Any]:
    """Count the tokens that the prompt would have; nothing is evaluated."""
    tools = body.checked_tools()
    system, messages = await _conversation(body, service, owner)
    ids = await prompt_ids(service, [*system, *messages], tools)
    return {"object": "response.input_tokens", "input_tokens": len(ids)}


@router.get("/v1/responses/{response}")
async def retrieve(response: _ResponseId, service: ServiceDep, owner: OwnerDep) -> dict[str, Any]:
    """Return a stored response."""
    return await _stored(response, service, owner)


@router.delete("/v1/responses/{response}")
async def delete(response: _ResponseId, service: ServiceDep, owner: OwnerDep) -> dict[str, Any]:
    """Delete a stored response; those that continued it stay."""
    await _stored(response, service, owner)
    await asyncio.wrap_future(service.engine.delete(response, owner))
    return {"id": response, "object": "response", "deleted": True}


@router.post("/v1/responses/{response}/cancel")
async def cancel(response: _ResponseId, service: ServiceDep, owner: OwnerDep) -> dict[str, Any]:
    """Cancel a response in progress, after the current token."""
    pending = service.pending_responses.get((owner, response))
    if pending is not None:
        pending.generations.cancel()
        return {**pending.body, "status": "cancelled"}
    return await _stored(response, service, owner)


async def _start(body: ResponsesRequest, service: Service, owner: str) -> _PendingResponse:
    """Fork the previous response's session, if any, and submit the prompt in it."""
    tools, schema = body.checked_tools(), body.wanted_schema()
    response_id = f"resp_{secrets.token_hex(12)}"
    system, messages = await _conversation(body, service, owner)
    ids = await prompt_ids(service, [*system, *messages], tools)
    (sampling,) = constrain(service, body.samplings(), tools, schema)
    _require_fits(body, len(ids), service)
    engine = service.engine
    if body.previous_response_id is not None:
        fork = engine.fork(body.previous_response_id, owner, new=response_id, notes={})
        await asyncio.wrap_future(fork)
    try:
        cached = await asyncio.wrap_future(engine.prepare(ids, response_id, owner))
        request = GenerationRequest(
            tuple(ids[cached:]), service.max_tokens(body.max_output_tokens), sampling
        )
        generations = await service.generate(request, owner, session=response_id)
    except BaseException:
        await _discard(response_id, service, owner)
        raise
    pending = _PendingResponse(
        new_response(response_id, body, service.name),
        messages,
        len(ids),
        cached,
        generations,
        tools,
        body.return_progress,
        body.timings_per_token,
    )
    service.pending_responses[owner, response_id] = pending
    return pending


def _require_fits(body: ResponsesRequest, prompt: int, service: Service) -> None:
    """Raise ApiError if truncation is disabled and the session would have to evict cells."""
    limit = service.context_size
    if body.truncation == "disabled" and prompt + (body.max_output_tokens or 1) > limit:
        raise ApiError(
            400,
            f"the prompt has {prompt} tokens and the session holds {limit}: it does not fit with "
            'truncation "disabled"',
            "exceed_context_size_error",
            extra={"n_prompt_tokens": prompt, "n_ctx": limit},
        )


async def _complete(
    pending: _PendingResponse, text: str, end: Finished, service: Service, owner: str
) -> dict[str, Any]:
    """Return the whole response, stored in its session's notes unless `store` is false."""
    output = GeneratedOutput(text, pending.tools, pending.item_id)
    final = final_fields(end, pending.prompt, pending.cached)
    response = {**pending.body, "output": output.items(), **final}
    response_id = response["id"]
    service.pending_responses.pop((owner, response_id), None)
    if not response["store"]:
        await _discard(response_id, service, owner)
        return response
    notes = {_RESPONSE: response, _MESSAGES: [*pending.messages, output.message()]}
    await asyncio.wrap_future(service.engine.set_notes(response_id, owner, notes))
    return response


async def _stream(pending: _PendingResponse, service: Service, owner: str) -> AsyncIterator[bytes]:
    """Yield text as it comes; with tools, yield all items at the end, once calls are parsed."""
    sequence, text, completed = itertools.count(), "", False
    item_id, streams_text = pending.item_id, pending.tools is None
    part = {"item_id": item_id, "output_index": 0, "content_index": 0}

    def event(kind: str, **data: Any) -> bytes:
        return sse_event({"type": kind, "sequence_number": next(sequence), **data}, kind)

    try:
        yield event("response.created", response=pending.body)
        yield event("response.in_progress", response=pending.body)
        if streams_text:
            started = message_item(item_id, "", "in_progress")
            yield event("response.output_item.added", output_index=0, item=started)
            yield event("response.content_part.added", **part, part=text_part(""))
        async for _, progress in pending.generations:
            if isinstance(progress, PrefillProgress) and pending.progress:
                prefill = {"prompt_progress": llamacpp_progress(progress)}
                yield event("response.in_progress", response=pending.body, **prefill)
            if not isinstance(progress, (GeneratedToken, Finished)):
                continue
            text += progress.text
            if progress.text and streams_text:
                delta = {"delta": progress.text, "logprobs": [], **pending.timings()}
                yield event("response.output_text.delta", **part, **delta)
            if isinstance(progress, Finished):
                response = await _complete(pending, text, progress, service, owner)
                completed = True
                if streams_text:
                    yield event("response.output_text.done", **part, text=text, logprobs=[])
                    yield event("response.content_part.done", **part, part=text_part(text))
                for index, item in enumerate(response["output"]):
                    if not streams_text:
                        yield event("response.output_item.added", output_index=index, item=item)
                    yield event("response.output_item.done", output_index=index, item=item)
                timings = llamacpp_timings(progress.usage)
                status = response["status"]
                yield event(f"response.{status}", response=response, timings=timings)
    except Exception as error:  # the status is already sent: the last event reports the error
        problem = api_error_for(error)
        yield event("error", code=problem.kind, message=problem.message, param=problem.param)
    finally:
        if not completed:
            await asyncio.shield(_discard(pending.body["id"], service, owner))


async def _stored(response_id: str, service: Service, owner: str) -> dict[str, Any]:
    """Return a stored response. Raises ApiError (404) for one that is unknown or unfinished."""
    try:
        record = await asyncio.wrap_future(service.engine.find(response_id, owner))
    except NoSuchSession:
        message = f"there is no response {response_id!r}"
        raise ApiError(404, message, "not_found_error") from None
    response: dict[str, Any] | None = record.notes.get(_RESPONSE)
    if response is None:
        raise ApiError(404, f"response {response_id!r} is not finished yet", "not_found_error")
    return response


async def _conversation(
    body: ResponsesRequest, service: Service, owner: str
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the system message, if any, and all messages up to the request's input."""
    earlier, parent = list[dict[str, Any]](), body.previous_response_id
    if parent is not None:
        await _stored(parent, service, owner)
        record = await asyncio.wrap_future(service.engine.find(parent, owner))
        earlier = record.notes[_MESSAGES]
    system = [{"role": "system", "content": body.instructions}] if body.instructions else []
    return system, [*earlier, *input_messages(body.input)]


async def _discard(response_id: str, service: Service, owner: str) -> None:
    """Drop a response's session, after cancelling its generation if it is still running."""
    pending = service.pending_responses.pop((owner, response_id), None)
    if pending is not None:
        pending.generations.cancel()
    with contextlib.suppress(KvkeepError):
        await asyncio.wrap_future(service.engine.discard(response_id, owner))

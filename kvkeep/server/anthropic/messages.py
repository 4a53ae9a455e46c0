"""`/v1/messages` and `/v1/messages/count_tokens`: the assistant's next message."""

import secrets
from asyncio import to_thread
from collections.abc import AsyncIterator
from typing import Any

from starlette.responses import JSONResponse, Response

from kvkeep.chat.anthropic_tools import allows_parallel_calls
from kvkeep.chat.context_edits import apply_edits, clears_thinking, parse_edits
from kvkeep.chat.messages import Chat
from kvkeep.chat.output import Output, OutputBuilder, OutputEvent
from kvkeep.chat.output_reader import OutputReader
from kvkeep.engine import Finished, GeneratedToken, GenerationRequest, PrefillProgress, Reuse, Usage
from kvkeep.server.alignment import own_fields
from kvkeep.server.anthropic.blocks import ContentBlockStream, content_blocks, message_event
from kvkeep.server.anthropic.cache_marks import pinned_prefixes, usage_fields
from kvkeep.server.anthropic.request import (
    COUNT_RULES,
    MESSAGES_RULES,
    CountTokensRequest,
    MessagesRequest,
)
from kvkeep.server.body_route import body_router
from kvkeep.server.chat_input import ChatInput, StopAfterFirstCall, chat_input, is_cut_off
from kvkeep.server.errors import ApiError
from kvkeep.server.generation import STREAM_PATIENCE, start_generations
from kvkeep.server.generation_stream import GenerationStream, StreamEvent
from kvkeep.server.service import ContextDep, RequestContext
from kvkeep.server.sse import JSON_OR_EVENTS, sse_response

router = body_router()
_PING = message_event("ping")
_STOP_REASONS = {
    "eos": "end_turn",
    "length": "max_tokens",
    "full": "model_context_window_exceeded",
    "stop": "stop_sequence",
}


@router.post("/v1/messages", response_model=None, responses=JSON_OR_EVENTS)
async def messages(body: MessagesRequest, context: ContextDep) -> Response:
    """Generate the assistant's next message."""
    MESSAGES_RULES.check(body, context.notices)
    prompt, edited = await _edited_input(body, context)
    samplings = body.sampling_params().samplings(context.default_sampling)
    limit = context.service.max_tokens(body.max_tokens)
    pins = await pinned_prefixes(context, body, prompt)
    request = GenerationRequest(
        tuple(prompt.ids),
        limit,
        pins=pins,
        written_tokens=prompt.written_tokens,
        title=prompt.title,
        **body.own_settings(context),
    )
    prompt, samplings = await prompt.constrain(
        samplings, body.output_schema, reasoning_budget=body.reasoning_budget
    )
    end: StopAfterFirstCall | None = None
    if not allows_parallel_calls(body.tool_choice):
        samplings, (end,) = StopAfterFirstCall.add(samplings)
    patience = STREAM_PATIENCE if body.stream else None
    stream = await start_generations(context, request, samplings, patience)
    answer = _AnswerReader(prompt.new_reader(stream.results[0]), end)
    headers = {"request-id": f"req_{secrets.token_hex(12)}"}
    fields = {
        "id": f"msg_{secrets.token_hex(12)}",
        "type": "message",
        "role": "assistant",
        "model": context.service.model_name,
    }
    if body.stream:
        events = _stream_events(stream, request, fields, answer, edited)
        response = sse_response(
            *(events, stream.aclose, "error", ApiError.anthropic_body), keepalive=_PING
        )
        response.headers.update(headers)
        return response

    def read(_index: int, event: StreamEvent) -> None:
        answer.push(event)

    (result,) = await context.collect(stream, on_event=read)
    message: dict[str, Any] = {**fields, "content": content_blocks(answer.output)}
    message |= answer.stop_fields(result.finished)
    message |= {**own_fields(result.finished.usage), **edited}
    message["usage"] = usage_fields(result.finished.usage, pins)
    return JSONResponse(message, headers=headers)


async def _stream_events(
    stream: GenerationStream,
    request: GenerationRequest,
    fields: dict[str, Any],
    answer: "_AnswerReader",
    edited: dict[str, Any],
) -> AsyncIterator[bytes]:
    """Yield the message's start before its prefill, then its blocks as they are generated.

    edited: the field that names the edits of the context.
    """
    # A prompt that waits for admission may be reused in part: the last usage is the right one.
    waiting = Usage(len(request.prompt), 0, Reuse(), 0.0, 0.0, 0.0)
    first_usage = stream.generations[0].usage if stream.generations else waiting
    usage = usage_fields(first_usage, request.pins)
    message = {**fields, "content": [], "stop_reason": None, "stop_sequence": None}
    yield message_event("message_start", message={**message, "usage": usage})
    yield _PING
    blocks = ContentBlockStream()
    async for _, event in stream:
        for output_event in answer.push(event):
            for data in blocks.push(output_event):
                yield data
    for data in blocks.finish():
        yield data
    finished = stream.results[0].finished
    delta = answer.stop_fields(finished)
    fields = {"delta": delta, "usage": usage_fields(finished.usage, request.pins)}
    more = {**own_fields(finished.usage), **edited}
    yield message_event("message_delta", **fields, **more)
    yield message_event("message_stop")


async def _edited_input(
    body: CountTokensRequest, context: RequestContext
) -> tuple[ChatInput, dict[str, Any]]:
    """Return the prompt after the request's context edits, and the field that names them.

    The field is only there if the request has `context_management`.
    """
    chat, options = await to_thread(body.chat), body.render_options()
    context.notices.ignore(*await to_thread(lambda: body.ignored_values))
    edits, unknown = parse_edits(body.context_management)
    context.notices.ignore(*(f"context_management.edits.{name}" for name in unknown))
    applied: list[dict[str, Any]] = []
    if edits:
        renderer = context.service.model.renderer

        def count(edited: Chat) -> int:
            return len(renderer.render(edited, options).ids)

        chat, applied = await to_thread(apply_edits, chat, edits, count)
    has_field = body.context_management is not None
    field = {"context_management": {"applied_edits": applied}} if has_field else {}
    restore_reasoning = not clears_thinking(applied)
    return await chat_input(context, lambda: chat, options, restore_reasoning), field


class _AnswerReader:
    """Reads a generation's events."""

    def __init__(self, reader: OutputReader, end: StopAfterFirstCall | None):
        """end: ends the generation with its first call; None if there may be several."""
        self._reader, self._end = reader, end
        self._builder = OutputBuilder()

    def push(self, event: StreamEvent) -> list[OutputEvent]:
        if isinstance(event, PrefillProgress):
            return []
        if isinstance(event, GeneratedToken):
            events = self._reader.push(event.pieces)
        else:
            events = [*self._reader.push([event.text]), *self._reader.finish()]
        if self._end is not None:
            events = self._end.up_to_first_call(events)
        self._builder.push(events)
        return events

    @property
    def output(self) -> Output:
        return self._builder.output

    def stop_fields(self, finished: Finished) -> dict[str, Any]:
        """Return why the message ends. A call that is cut off is not to be run."""
        reason = _STOP_REASONS[finished.reason]
        if self.output.calls_to_run and not is_cut_off(finished, self._end):
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": finished.stop}


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: CountTokensRequest, context: ContextDep) -> dict[str, Any]:
    """Count the tokens of a prompt, including those of the chat template."""
    COUNT_RULES.check(body, context.notices)
    prompt, edited = await _edited_input(body, context)
    count = {"input_tokens": len(prompt.ids)}
    if not edited:
        return count
    whole = await chat_input(context, body.chat, body.render_options())
    return {**count, "context_management": {"original_input_tokens": len(whole.ids)}}

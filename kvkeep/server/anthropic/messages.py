"""`/v1/messages` and `/v1/messages/count_tokens`: the assistant's next message."""

import secrets
from asyncio import to_thread
from collections.abc import AsyncIterator
from typing import Any

from starlette.responses import JSONResponse, Response

from kvkeep.chat.anthropic_tool_changes import last_changes
from kvkeep.chat.anthropic_tools import allows_parallel_calls
from kvkeep.chat.context_edits import apply_edits, clears_thinking, parse_edits
from kvkeep.chat.messages import Chat
from kvkeep.engine import GenerationRequest, Reuse, Usage
from kvkeep.errors import InvalidArgument
from kvkeep.server.alignment import own_fields
from kvkeep.server.anthropic.answers import AnswerReader
from kvkeep.server.anthropic.blocks import message_event
from kvkeep.server.anthropic.cache_marks import pinned_prefixes, usage_fields
from kvkeep.server.anthropic.compaction import SummaryReader, asking_for_summary
from kvkeep.server.anthropic.request import (
    COUNT_RULES,
    MESSAGES_RULES,
    CountTokensRequest,
    MessagesRequest,
)
from kvkeep.server.body_route import body_router
from kvkeep.server.chat_input import ChatInput, StopAfterFirstCall, chat_input
from kvkeep.server.errors import ApiError
from kvkeep.server.generation import STREAM_PATIENCE, start_generations
from kvkeep.server.generation_stream import GenerationStream, StreamEvent
from kvkeep.server.service import ContextDep, RequestContext
from kvkeep.server.sse import JSON_OR_EVENTS, sse_response

router = body_router()
_PING = message_event("ping")


@router.post("/v1/messages", response_model=None, responses=JSON_OR_EVENTS)
async def messages(body: MessagesRequest, context: ContextDep) -> Response:
    """Generate the assistant's next message."""
    MESSAGES_RULES.check(body, context.notices)
    if body.compaction is not None:
        _check_compaction(body)
    prompt, edited = await _edited_input(body, context)
    samplings = body.sampling_params().samplings(context.default_sampling)
    limit = context.service.max_tokens(body.limit)
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
    answer = _answer_reader(body, prompt, stream, end)
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
    message: dict[str, Any] = {**fields, "content": answer.content}
    message |= answer.stop_fields(result.finished)
    message |= {**own_fields(result.finished.usage), **edited}
    message["usage"] = usage_fields(result.finished.usage, pins, answer.thinking_tokens)
    return JSONResponse(message, headers=headers)


def _answer_reader(
    body: MessagesRequest,
    prompt: ChatInput,
    stream: GenerationStream,
    end: StopAfterFirstCall | None,
) -> AnswerReader:
    if body.compaction is not None:
        return SummaryReader(prompt.new_reader(), last_changes(body.messages))
    return AnswerReader(prompt.new_reader(stream.results[0]), end, is_empty=body.limit == 0)


def _check_compaction(body: MessagesRequest) -> None:
    """Raise InvalidArgument for what a summary cannot follow."""
    if body.context_management is not None:
        raise InvalidArgument("compaction cannot be combined with context_management")
    if body.output_schema is not None:
        raise InvalidArgument("compaction cannot be combined with a format of the answer")


async def _stream_events(
    stream: GenerationStream,
    request: GenerationRequest,
    fields: dict[str, Any],
    answer: AnswerReader,
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
    async for _, event in stream:
        for data in answer.streamed(event):
            yield data
    for data in answer.stream_end():
        yield data
    finished = stream.results[0].finished
    usage = usage_fields(finished.usage, request.pins, answer.thinking_tokens)
    fields = {"delta": answer.stop_fields(finished), "usage": usage}
    more = {**own_fields(finished.usage), **edited}
    yield message_event("message_delta", **fields, **more)
    yield message_event("message_stop")


async def _edited_input(
    body: CountTokensRequest, context: RequestContext
) -> tuple[ChatInput, dict[str, Any]]:
    """Return the prompt after the request's context edits, and the field that names them.

    The field is only there if the request has `context_management`. The prompt of a compaction ends
    with the request for a summary.
    """
    chat, options = await to_thread(body.chat), body.render_options()
    if isinstance(body, MessagesRequest) and body.compaction is not None:
        chat = asking_for_summary(chat, body.compaction.instructions or "")
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

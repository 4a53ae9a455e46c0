"""A response in progress: its prompt, its session, and the generation in it."""

import asyncio
import contextlib
import secrets
from asyncio import wrap_future
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvkeep.chat.compaction_items import ITEM_TYPES
from kvkeep.engine import GenerationRequest
from kvkeep.errors import ContextFull, KvkeepError
from kvkeep.server.chat_input import ChatInput, StopAfterFirstCall
from kvkeep.server.generation import STREAM_PATIENCE
from kvkeep.server.generation_stream import GenerationStream
from kvkeep.server.openai.cache_breakpoints import requested_pins
from kvkeep.server.openai.compaction import compact_conversation, prepare_compacted
from kvkeep.server.openai.response_items import ResponseItems, new_response
from kvkeep.server.openai.response_prompt import (
    ResponseConversation,
    expand,
    parse_items,
    prompt_of,
)
from kvkeep.server.openai.response_request import ResponsesRequest
from kvkeep.server.openai.response_stream import ResponseReading
from kvkeep.server.overflow import check_prompt_size, overflow_error
from kvkeep.server.service import RequestContext
from kvkeep.session.sampling import Sampling


@dataclass
class PendingResponse:
    """A response whose generation runs."""

    request: ResponsesRequest
    response: dict[str, Any]  # the response object so far
    items: list[dict[str, Any]]  # the conversation that it answers
    session_name: str | None  # None for an unnamed session
    prepared_tokens: int  # first tokens of the prompt that the session held already
    stream: GenerationStream
    reading: ResponseReading


async def start_response(
    body: ResponsesRequest, conversation: ResponseConversation, context: RequestContext
) -> PendingResponse:
    """Prepare the response's session, and start the generation in it."""
    service, schema = context.service, body.output_schema()
    items, prompt = conversation.items, await prompt_of(conversation, body, context)
    compaction: dict[str, Any] | None = None
    if await _exceeds_threshold(items, prompt, body, context):
        compaction = (await compact_conversation(body, conversation.expanded, context)).item
        conversation = await expand([compaction], context)
        prompt = await prompt_of(conversation, body, context)
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
    # A compacted conversation has fewer cells than tokens.
    if conversation.handle is None or service.engine.default_policy != "full":
        check_prompt_size(context, len(prompt.ids), num_new_tokens, may_slide)
    response = initial_response(body, context)
    has_name = body.stores or body.previous_response_id or conversation.handle
    name = response["id"] if has_name else None
    stream, held = await _start_in_session(body, name, prompt, samplings[0], conversation, context)
    response_items = ResponseItems(
        body, prompt.chat.callable_tools, compaction, conversation.client_types(body)
    )
    reader = prompt.new_reader(stream.results[0])
    reading = ResponseReading(
        reader, response_items, context.tokenizer, early_end, not body.prewarms
    )
    pending = PendingResponse(body, response, items, name, held, stream, reading)
    service.pending_responses[context.owner, response["id"]] = pending
    return pending


def initial_response(body: ResponsesRequest, context: RequestContext) -> dict[str, Any]:
    """Return the response object of a request before its generation."""
    service, response_id = context.service, f"resp_{secrets.token_hex(12)}"
    slides = service.context_policy == "slide"
    return new_response(response_id, body, service.model_name, slides)


async def abandon_response(pending: PendingResponse, context: RequestContext) -> None:
    """Cancel a response and make its session unnamed, unless it is complete or abandoned."""
    key = context.owner, pending.response["id"]
    if context.service.pending_responses.pop(key, None) is None:
        return
    pending.stream.cancel()
    if pending.session_name is not None:
        await _remove_name(pending.session_name, context)


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


async def _start_in_session(
    body: ResponsesRequest,
    name: str | None,
    prompt: ChatInput,
    sampling: Sampling,
    conversation: ResponseConversation,
    context: RequestContext,
) -> tuple[GenerationStream, int]:
    """Start the generation in the session of a name, or in an unnamed one; see `_prepare`.

    Returns its stream, and how many of the prompt's first tokens the session held before.
    """
    try:
        handle = conversation.handle
        held = await _prepare(body, name, prompt.ids, handle, context) if name else 0
        parse = partial(parse_items, body)
        request = GenerationRequest(
            tuple(prompt.ids[held:]),
            0 if body.prewarms else context.service.max_tokens(body.max_output_tokens),
            sampling,
            logprobs=body.logprob_count,
            pins=await requested_pins(context, body, prompt, conversation.expanded, parse),
            **body.own_settings(context),
            written_tokens=prompt.written_tokens,
            title=prompt.title,
            whole_text=name is not None and not held,
        )
        patience = STREAM_PATIENCE if body.stream else None
        return await _submit(request, name, patience, context), held
    except BaseException as error:
        if name:
            await asyncio.shield(_remove_name(name, context))
        if isinstance(error, ContextFull):
            raise overflow_error(context.service, len(prompt.ids)) from error
        raise


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


async def _remove_name(name: str, context: RequestContext) -> None:
    with contextlib.suppress(KvkeepError):
        await wrap_future(context.engine.remove_name(name, context.owner))

"""`/v1/messages`: Anthropic's API."""

import json
import secrets
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response

from kvkeep.engine import Finished, GenerationRequest, PrefillProgress, Usage
from kvkeep.errors import InvalidArgument
from kvkeep.server.errors import ApiError
from kvkeep.server.generation import constrain, prompt_ids, start_generations
from kvkeep.server.schemas import MAX_TOKENS, RequestBody, SamplingParams
from kvkeep.server.service import ContextDep, GenerationStream, RequestContext
from kvkeep.server.sse import JSON_OR_EVENTS, sse_event, sse_response
from kvkeep.server.tools import ParsedCall, Tools, validate_tools

router = APIRouter()
_STOP_REASONS = {
    "eos": "end_turn",
    "length": "max_tokens",
    "full": "max_tokens",
    "stop": "stop_sequence",
}
_EMPTY_TEXT_BLOCK: dict[str, Any] = {"type": "text", "text": ""}
_StopSequence = Annotated[str, Field(max_length=1000)]


class CountTokensRequest(RequestBody):
    """The fields of a request that form the prompt."""

    model: str = ""
    messages: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=10_000)]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None

    def validate_tools(self) -> Tools:
        entries = []
        for tool in self.tools or ():
            function = {"name": tool.get("name"), "description": tool.get("description", "")}
            function["parameters"] = tool.get("input_schema") or {"type": "object"}
            entries.append({"type": "function", "function": function})
        tool_choice = self.tool_choice or {"type": "auto"}
        choice_type = tool_choice.get("type")
        if choice_type == "tool":
            return validate_tools(entries, {"name": tool_choice.get("name")})
        return validate_tools(entries, "required" if choice_type == "any" else choice_type)

    async def encode_prompt(self, context: RequestContext, tools: Tools) -> list[int]:
        messages = []
        if self.system is not None:
            messages.append({"role": "system", "content": _plain_text(self.system)})
        for message in self.messages:
            messages += _chat_messages(message)
        return await prompt_ids(context, messages, tools)


class MessagesRequest(CountTokensRequest):
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)]
    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    top_k: Annotated[int | None, Field(ge=0, le=10_000_000)] = None
    stop_sequences: Annotated[list[_StopSequence] | None, Field(max_length=64)] = None
    stream: bool = False


@router.post("/v1/messages", response_model=None, responses=JSON_OR_EVENTS)
async def messages(body: MessagesRequest, context: ContextDep) -> Response | dict[str, Any]:
    """Generate the assistant's next message."""
    tools = body.validate_tools()
    ids = await body.encode_prompt(context, tools)
    sampling_params = SamplingParams(
        temperature=body.temperature, top_p=body.top_p, top_k=body.top_k, stop=body.stop_sequences
    )
    samplings = constrain(context, sampling_params.samplings(context.default_sampling), tools)
    request = GenerationRequest(tuple(ids), body.max_tokens)
    stream = await start_generations(context, request, samplings)
    fields = {
        "id": f"msg_{secrets.token_hex(12)}",
        "type": "message",
        "role": "assistant",
        "model": context.service.model_name,
    }
    if body.stream:
        events = _stream_events(stream, fields, tools)
        return sse_response(events, error_event="error", error_body=ApiError.anthropic_body)
    (result,) = await context.collect(stream)
    text, calls = tools.parse(result.text)
    content = [{**_EMPTY_TEXT_BLOCK, "text": text}] if text or not calls else []
    content += [_tool_use(call) for call in calls]
    usage = _usage(result.finished.usage, result.finished.usage.generated)
    return {**fields, "content": content, **_stop_fields(result.finished, calls), "usage": usage}


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: CountTokensRequest, context: ContextDep) -> dict[str, int]:
    """Count the tokens of a prompt, including those of the chat template."""
    return {"input_tokens": len(await body.encode_prompt(context, body.validate_tools()))}


async def _stream_events(
    stream: GenerationStream, fields: dict[str, Any], tools: Tools
) -> AsyncIterator[bytes]:
    """Yield text as it is generated; with tools, all at the end, once calls are parsed."""
    started = False
    async for _, event in stream:
        if isinstance(event, PrefillProgress):
            continue
        if not started:
            started = True
            usage = _usage(stream.generations[0].usage, 0)
            message = {**fields, "content": [], "stop_reason": None, "stop_sequence": None}
            yield _event("message_start", message={**message, "usage": usage})
            yield _event("ping")
            if not tools:
                yield _event("content_block_start", index=0, content_block=_EMPTY_TEXT_BLOCK)
        if event.text and not tools:
            delta = {"type": "text_delta", "text": event.text}
            yield _event("content_block_delta", index=0, delta=delta)
    result = stream.results[0]
    text, calls = tools.parse(result.text)
    if tools:
        for block_event in _block_events(text, calls):
            yield block_event
    else:
        yield _event("content_block_stop", index=0)
    output_usage = {"output_tokens": result.finished.usage.generated}
    yield _event("message_delta", delta=_stop_fields(result.finished, calls), usage=output_usage)
    yield _event("message_stop")


def _block_events(text: str, calls: Sequence[ParsedCall]) -> Iterator[bytes]:
    """Yield the events of complete content blocks: the text, unless it is empty, and the calls."""
    blocks = [(_EMPTY_TEXT_BLOCK, {"type": "text_delta", "text": text})] if text else []
    for call in calls:
        delta = {"type": "input_json_delta", "partial_json": call.arguments}
        blocks.append(({**_tool_use(call), "input": {}}, delta))
    for index, (block, delta) in enumerate(blocks):
        yield _event("content_block_start", index=index, content_block=block)
        yield _event("content_block_delta", index=index, delta=delta)
        yield _event("content_block_stop", index=index)


def _stop_fields(finished: Finished, calls: Sequence[ParsedCall]) -> dict[str, Any]:
    reason = "tool_use" if calls and finished.reason != "length" else _STOP_REASONS[finished.reason]
    return {"stop_reason": reason, "stop_sequence": finished.stop}


def _usage(usage: Usage, output_tokens: int) -> dict[str, int]:
    return {
        "input_tokens": usage.evaluated,
        "cache_read_input_tokens": usage.reuse.tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": output_tokens,
    }


def _tool_use(call: ParsedCall) -> dict[str, Any]:
    """Return a call as a content block; arguments that are not JSON become an empty input."""
    try:
        arguments = json.loads(call.arguments)
    except ValueError:
        arguments = {}
    block_id = f"toolu_{secrets.token_hex(12)}"
    return {"type": "tool_use", "id": block_id, "name": call.name, "input": arguments}


def _event(event_type: str, **data: Any) -> bytes:
    return sse_event({"type": event_type, **data}, event_type)


def _plain_text(content: Any) -> str:
    """Return a text, or the joined text blocks. Raises InvalidArgument for other blocks."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidArgument("content must be text or a list of blocks")
    for block in content:
        if not isinstance(block, Mapping) or not isinstance(block.get("text"), str):
            block_type = block.get("type") if isinstance(block, Mapping) else block
            raise InvalidArgument(f"content blocks must be text; found {block_type!r}")
    return "".join(block["text"] for block in content)


def _chat_messages(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Convert a message for chat templates: tool results become messages of their own."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise InvalidArgument(f"role must be user or assistant; found {role!r}")
    if not isinstance(content, list):
        return [{"role": role, "content": _plain_text(content)}]
    messages, text_blocks, calls, thoughts = list[dict[str, Any]](), [], [], []
    for block in content:
        block_type = block.get("type") if isinstance(block, Mapping) else None
        if block_type == "tool_result":
            result = _plain_text(block.get("content") or "")
            messages.append({"role": "tool", "content": result})
        elif block_type == "tool_use":
            function = {"name": str(block.get("name")), "arguments": block.get("input") or {}}
            calls.append({"type": "function", "function": function})
        elif block_type in ("thinking", "redacted_thinking"):  # a redacted block has no text
            thoughts.append(str(block.get("thinking") or ""))
        else:
            text_blocks.append(block)
    if calls or text_blocks:
        tool_calls = {"tool_calls": calls} if calls else {}
        reasoning = {"reasoning_content": "".join(thoughts)} if any(thoughts) else {}
        fields = {"content": _plain_text(text_blocks), **tool_calls, **reasoning}
        messages.append({"role": role, **fields})
    return messages

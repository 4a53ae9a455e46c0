"""`/v1/messages`: Anthropic's API."""

import json
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Annotated, Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from pydantic import Field
from starlette.responses import Response

from kvkeep.engine import Finished, GeneratedToken, GenerationRequest, PrefillProgress, Reuse
from kvkeep.errors import InvalidArgument
from kvkeep.server.errors import api_error_for
from kvkeep.server.generation import constrain, prompt_ids, start_generations
from kvkeep.server.schemas import MAX_TOKENS, OwnerDep, RequestBody, SamplingParams, ServiceDep
from kvkeep.server.service import GenerationStream, Service
from kvkeep.server.sse import JSON_OR_EVENTS, sse_event, sse_response
from kvkeep.server.tools import ToolCall, Tools, checked_tools

router = APIRouter()
_STOP_REASONS = {
    "eos": "end_turn",
    "length": "max_tokens",
    "full": "max_tokens",
    "stop": "stop_sequence",
}
_StopSequence = Annotated[str, Field(max_length=1000)]


class CountTokensRequest(RequestBody):
    """The part of a request that makes the prompt."""

    model: str = ""
    messages: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=10_000)]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None

    def openai_tools(self) -> Tools | None:
        """Validate the tools and return them in OpenAI's form."""
        functions = [
            {
                "type": "function",
                "function": {
                    "name": tool.get("name"),
                    "description": tool.get("description", ""),
                    "parameters": tool.get("input_schema") or {"type": "object"},
                },
            }
            for tool in self.tools or ()
        ]
        openai_choices = {"auto": "auto", "any": "required", "none": "none"}
        choice = self.tool_choice or {"type": "auto"}
        kind = choice.get("type")
        if kind == "tool":
            return checked_tools(functions, {"name": choice.get("name")})
        return checked_tools(
            functions, openai_choices.get(kind, kind) if isinstance(kind, str) else kind
        )

    async def encode_prompt(self, service: Service) -> list[int]:
        messages = []
        if self.system is not None:
            messages.append({"role": "system", "content": _plain_text(self.system)})
        for message in self.messages:
            messages += _template_messages(message)
        return await prompt_ids(service, messages, self.openai_tools())


class MessagesRequest(CountTokensRequest):
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)]
    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    top_k: Annotated[int | None, Field(ge=0, le=10_000_000)] = None
    stop_sequences: Annotated[list[_StopSequence] | None, Field(max_length=64)] = None
    stream: bool = False

    def sampling_params(self) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop=self.stop_sequences,
        )


@router.post("/v1/messages", response_model=None, responses=JSON_OR_EVENTS)
async def messages(
    body: MessagesRequest, http_request: HttpRequest, service: ServiceDep, owner: OwnerDep
) -> Response | dict[str, Any]:
    """Generate the assistant's next message."""
    ids, tools = await body.encode_prompt(service), body.openai_tools()
    samplings = constrain(service, body.sampling_params().samplings(), tools)
    request = GenerationRequest(tuple(ids), body.max_tokens)
    generations = await start_generations(service, request, owner, samplings)
    head = {
        "id": f"msg_{secrets.token_hex(12)}",
        "type": "message",
        "role": "assistant",
        "model": service.name,
    }
    if body.stream:
        return sse_response(_stream(generations, head, tools, len(ids)))
    async with generations.cancel_on_disconnect(http_request):
        (result,) = await generations.collect()
        return _message(head, result.text, result.end, tools)


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: CountTokensRequest, service: ServiceDep) -> dict[str, int]:
    """Count the tokens of a prompt, those of the chat template included."""
    return {"input_tokens": len(await body.encode_prompt(service))}


def _message(head: dict[str, Any], text: str, end: Finished, tools: Tools | None) -> dict[str, Any]:
    text, calls = tools.parse(text) if tools else (text, [])
    content: list[dict[str, Any]] = [{"type": "text", "text": text}] if text or not calls else []
    content += [_tool_use(call) for call in calls]
    usage = {**_usage(end.usage.prompt, end.usage.reuse), "output_tokens": end.usage.generated}
    return {**head, "content": content, **_stop_fields(end, calls), "usage": usage}


async def _stream(
    generations: GenerationStream, head: dict[str, Any], tools: Tools | None, prompt: int
) -> AsyncIterator[bytes]:
    """Yield text as it comes; with tools, yield all of it at the end, once calls are parsed."""
    reuse, text, started = Reuse(), "", False
    try:
        async for _, progress in generations:
            if isinstance(progress, PrefillProgress):
                reuse = progress.reuse
                continue
            if not started:
                started = True
                usage = {**_usage(prompt, reuse), "output_tokens": 0}
                message = {**head, "content": [], "stop_reason": None, "stop_sequence": None}
                yield _event("message_start", message={**message, "usage": usage})
                yield _event("ping")
                if tools is None:
                    yield _block_start(0, {"type": "text", "text": ""})
            assert isinstance(progress, (GeneratedToken, Finished))
            text += progress.text
            if tools is None and progress.text:
                yield _block_delta(0, {"type": "text_delta", "text": progress.text})
            if isinstance(progress, Finished):
                for event in _last_events(progress, text, tools):
                    yield event
    except Exception as error:  # the status is already sent: the last event reports the error
        yield sse_event(api_error_for(error).anthropic_body(), "error")


def _last_events(end: Finished, text: str, tools: Tools | None) -> list[bytes]:
    text, calls = tools.parse(text) if tools else (text, [])
    events, first_call = [], 0
    if tools is None:
        events.append(_event("content_block_stop", index=0))
    elif text:
        events.append(_block_start(0, {"type": "text", "text": ""}))
        events.append(_block_delta(0, {"type": "text_delta", "text": text}))
        events.append(_event("content_block_stop", index=0))
        first_call = 1
    for index, call in enumerate(calls, first_call):
        delta = {"type": "input_json_delta", "partial_json": call.arguments}
        events.append(_block_start(index, {**_tool_use(call), "input": {}}))
        events.append(_block_delta(index, delta))
        events.append(_event("content_block_stop", index=index))
    usage = {"output_tokens": end.usage.generated}
    events.append(_event("message_delta", delta=_stop_fields(end, calls), usage=usage))
    return [*events, _event("message_stop")]


def _stop_fields(end: Finished, calls: Sequence[ToolCall]) -> dict[str, Any]:
    reason = "tool_use" if calls and end.reason != "length" else _STOP_REASONS[end.reason]
    return {"stop_reason": reason, "stop_sequence": end.stop}


def _usage(prompt: int, reuse: Reuse) -> dict[str, int]:
    return {
        "input_tokens": prompt - reuse.tokens,
        "cache_read_input_tokens": reuse.tokens,
        "cache_creation_input_tokens": 0,
    }


def _tool_use(call: ToolCall) -> dict[str, Any]:
    """Return a call as a content block; arguments that are not JSON become an empty input."""
    try:
        arguments = json.loads(call.arguments)
    except ValueError:
        arguments = {}
    block_id = f"toolu_{secrets.token_hex(12)}"
    return {"type": "tool_use", "id": block_id, "name": call.name, "input": arguments}


def _event(kind: str, **data: Any) -> bytes:
    return sse_event({"type": kind, **data}, kind)


def _block_start(index: int, block: dict[str, Any]) -> bytes:
    return _event("content_block_start", index=index, content_block=block)


def _block_delta(index: int, delta: dict[str, Any]) -> bytes:
    return _event("content_block_delta", index=index, delta=delta)


def _plain_text(content: Any) -> str:
    """Join text blocks. Raises InvalidArgument for blocks of any other kind."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidArgument("content must be text or a list of blocks")
    for block in content:
        if not isinstance(block, Mapping) or not isinstance(block.get("text"), str):
            kind = block.get("type") if isinstance(block, Mapping) else block
            raise InvalidArgument(f"content blocks must be text; found {kind!r}")
    return "".join(block["text"] for block in content)


def _template_messages(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a message as chat templates take it: tool results become messages of their own."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise InvalidArgument(f"role must be user or assistant; found {role!r}")
    if not isinstance(content, list):
        return [{"role": role, "content": _plain_text(content)}]
    messages: list[dict[str, Any]] = []
    texts, calls, thoughts = [], [], []
    for block in content:
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "tool_result":
            result = _plain_text(block.get("content") or "")
            messages.append({"role": "tool", "content": result})
        elif kind == "tool_use":
            function = {"name": str(block.get("name")), "arguments": block.get("input") or {}}
            calls.append({"type": "function", "function": function})
        elif kind in ("thinking", "redacted_thinking"):  # a redacted block has no readable text
            thoughts.append(str(block.get("thinking") or ""))
        else:
            texts.append(block)
    thinking = {"reasoning_content": "".join(thoughts)} if any(thoughts) else {}
    if calls:
        content = _plain_text(texts)
        messages.append({"role": role, "content": content, "tool_calls": calls, **thinking})
    elif texts:
        messages.append({"role": role, "content": _plain_text(texts), **thinking})
    return messages

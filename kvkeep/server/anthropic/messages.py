"""`/v1/messages`: the assistant's next message, as Anthropic's clients ask for it."""

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
from kvkeep.server.errors import problem_of
from kvkeep.server.openai.chat import asked, forced_by, prompt_ids
from kvkeep.server.openapi import STREAMED
from kvkeep.server.schemas import MOST_TOKENS, Body, Choosing, Owner, Serving
from kvkeep.server.service import Running, Service
from kvkeep.server.sse import event, stream
from kvkeep.server.tools import Call, Tools, checked_tools

router = APIRouter()
_REASONS = {
    "eos": "end_turn",
    "length": "max_tokens",
    "full": "max_tokens",
    "stop": "stop_sequence",
}
_Text = Annotated[str, Field(max_length=1000)]


class Counted(Body):
    """What tokens are counted of: what a message is answered to."""

    model: str = ""
    messages: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=10_000)]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None

    def known_tools(self) -> Tools | None:
        """The same as functions of OpenAI's API."""
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
        kinds = {"auto": "auto", "any": "required", "none": "none"}
        given = self.tool_choice or {"type": "auto"}
        choice = {"name": given.get("name")} if given.get("type") == "tool" else given.get("type")
        return checked_tools(
            functions, kinds.get(choice, choice) if isinstance(choice, str) else choice
        )

    async def ids(self, service: Service) -> list[int]:
        said = [] if self.system is None else [{"role": "system", "content": _plain(self.system)}]
        said += [each for message in self.messages for each in _messages(message)]
        return await prompt_ids(service, said, self.known_tools())


class Message(Counted):
    """A request."""

    max_tokens: Annotated[int, Field(ge=1, le=MOST_TOKENS)]
    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    top_k: Annotated[int | None, Field(ge=0, le=10_000_000)] = None
    stop_sequences: Annotated[list[_Text] | None, Field(max_length=64)] = None
    stream: bool = False

    def choosing(self) -> Choosing:
        return Choosing(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop=self.stop_sequences,
        )


@router.post("/v1/messages", response_model=None, responses=STREAMED)
async def messages(
    body: Message, request: HttpRequest, service: Serving, owner: Owner
) -> Response | dict[str, Any]:
    """What the assistant says next."""
    ids, tools = await body.ids(service), body.known_tools()
    samplings = forced_by(service, body.choosing().samplings(), tools)
    running = await asked(service, GenerationRequest(tuple(ids), body.max_tokens), owner, samplings)
    head = {
        "id": f"msg_{secrets.token_hex(12)}",
        "type": "message",
        "role": "assistant",
        "model": service.name,
    }
    if body.stream:
        return stream(_streamed(running, head, tools, len(ids)))
    async with running.until_gone(request):
        return await _whole(running, head, tools)


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: Counted, service: Serving) -> dict[str, int]:
    """How many tokens a prompt has, of the template too."""
    return {"input_tokens": len(await body.ids(service))}


async def _whole(running: Running, head: dict[str, Any], tools: Tools | None) -> dict[str, Any]:
    text, end = "", None
    async for _, each in running:
        if isinstance(each, (GeneratedToken, Finished)):
            text += each.text
        end = each
    assert isinstance(end, Finished)
    said, calls = tools.calls(text) if tools else (text, [])
    content: list[dict[str, Any]] = [{"type": "text", "text": said}] if said or not calls else []
    content += [_call_block(call) for call in calls]
    usage = {**_usage(end.usage.prompt, end.usage.reuse), "output_tokens": end.usage.generated}
    return {**head, "content": content, **_ending(end, calls), "usage": usage}


async def _streamed(
    running: Running, head: dict[str, Any], tools: Tools | None, prompt: int
) -> AsyncIterator[bytes]:
    """Text as it comes; where tools may be called, all of it at the end."""
    reuse, text, begun = Reuse(), "", False
    try:
        async for _, each in running:
            if isinstance(each, PrefillProgress):
                reuse = each.reuse
                continue
            if not begun:
                begun = True
                usage = {**_usage(prompt, reuse), "output_tokens": 0}
                start = {**head, "content": [], **_NO_END, "usage": usage}
                yield _event("message_start", message=start)
                yield _event("ping")
                if tools is None:
                    yield _block(0, {"type": "text", "text": ""})
            assert isinstance(each, (GeneratedToken, Finished))
            text += each.text
            if tools is None and each.text:
                delta = {"type": "text_delta", "text": each.text}
                yield _event("content_block_delta", index=0, delta=delta)
            if isinstance(each, Finished):
                for part in _last(each, text, tools):
                    yield part
    except Exception as error:  # the status is sent: what happened is the last event
        yield event(problem_of(error).anthropic(), "error")


def _last(end: Finished, text: str, tools: Tools | None) -> list[bytes]:
    said, calls = tools.calls(text) if tools else (text, [])
    parts, index = [], 0
    if tools is None:
        parts.append(_event("content_block_stop", index=0))
    elif said:
        delta = {"type": "text_delta", "text": said}
        parts.append(_block(0, {"type": "text", "text": ""}))
        parts.append(_event("content_block_delta", index=0, delta=delta))
        parts.append(_event("content_block_stop", index=0))
        index = 1
    for number, call in enumerate(calls, index):
        delta = {"type": "input_json_delta", "partial_json": call.arguments}
        parts.append(_block(number, {**_call_block(call), "input": {}}))
        parts.append(_event("content_block_delta", index=number, delta=delta))
        parts.append(_event("content_block_stop", index=number))
    usage = {"output_tokens": end.usage.generated}
    parts.append(_event("message_delta", delta=_ending(end, calls), usage=usage))
    return [*parts, _event("message_stop")]


_NO_END = {"stop_reason": None, "stop_sequence": None}


def _ending(end: Finished, calls: Sequence[Call]) -> dict[str, Any]:
    reason = "tool_use" if calls and end.reason != "length" else _REASONS[end.reason]
    return {"stop_reason": reason, "stop_sequence": end.stop}


def _usage(prompt: int, reuse: Reuse) -> dict[str, int]:
    return {
        "input_tokens": prompt - reuse.tokens,
        "cache_read_input_tokens": reuse.tokens,
        "cache_creation_input_tokens": 0,
    }


def _call_block(call: Call) -> dict[str, Any]:
    try:
        given = json.loads(call.arguments)
    except ValueError:
        given = {}
    return {
        "type": "tool_use",
        "id": f"toolu_{secrets.token_hex(12)}",
        "name": call.name,
        "input": given,
    }


def _event(kind: str, **data: Any) -> bytes:
    return event({"type": kind, **data}, kind)


def _block(index: int, block: dict[str, Any]) -> bytes:
    return _event("content_block_start", index=index, content_block=block)


def _plain(content: Any) -> str:
    """Text, or blocks of it. Raises InvalidArgument for blocks of any other kind."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidArgument("a content is text, or a list of blocks")
    for block in content:
        if not isinstance(block, Mapping) or not isinstance(block.get("text"), str):
            kind = block.get("type") if isinstance(block, Mapping) else block
            raise InvalidArgument(f"blocks of a content are text here; found {kind!r}")
    return "".join(block["text"] for block in content)


def _messages(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A message as chat templates know it: results of tools are messages of their own."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise InvalidArgument(f"a role is user or assistant; found {role!r}")
    if not isinstance(content, list):
        return [{"role": role, "content": _plain(content)}]
    made: list[dict[str, Any]] = []
    rest, calls, thought = [], [], []
    for block in content:
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "tool_result":
            made.append({"role": "tool", "content": _plain(block.get("content") or "")})
        elif kind == "tool_use":
            function = {"name": str(block.get("name")), "arguments": block.get("input") or {}}
            calls.append({"type": "function", "function": function})
        elif kind in ("thinking", "redacted_thinking"):  # the latter for nobody's eyes
            thought.append(str(block.get("thinking") or ""))
        else:
            rest.append(block)
    thinking = {"reasoning_content": "".join(thought)} if any(thought) else {}
    if calls:
        made.append({"role": role, "content": _plain(rest), "tool_calls": calls, **thinking})
    elif rest:
        made.append({"role": role, "content": _plain(rest), **thinking})
    return made

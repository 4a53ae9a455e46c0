"""Requests and items of OpenAI's responses: messages, tool calls and their results."""

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from kvkeep.engine import Finished
from kvkeep.errors import InvalidArgument
from kvkeep.server.schemas import MAX_TOKENS, RequestBody, SamplingParams
from kvkeep.server.tools import Tools, checked_tools

ID_PATTERN = r"^resp_[0-9a-f]{24}$"
_STATUSES = {"eos": "completed", "stop": "completed", "length": "incomplete", "full": "incomplete"}


class TextOptions(RequestBody):
    format: dict[str, Any] | None = None


class ResponsesRequest(SamplingParams):
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    previous_response_id: Annotated[str | None, Field(pattern=ID_PATTERN)] = None
    max_output_tokens: Annotated[int | None, Field(ge=1, le=MAX_TOKENS)] = None
    store: bool | None = None
    stream: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    text: TextOptions | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    return_progress: bool = False
    timings_per_token: bool = False

    def checked_tools(self) -> Tools | None:
        return checked_tools(chat_tools(self.tools or ()), self.tool_choice)

    def wanted_schema(self) -> dict[str, Any] | None:
        """Return the JSON schema that the output must follow. Raises InvalidArgument."""
        form = (self.text.format if self.text else None) or {"type": "text"}
        if form.get("type") == "json_schema":
            schema = form.get("schema")
            if not isinstance(schema, dict):
                raise InvalidArgument("text.format.schema must be a JSON schema")
            return schema
        if form.get("type") not in ("text", "json_object"):
            raise InvalidArgument(f"text.format.type cannot be {form.get('type')!r}")
        return {"type": "object"} if form["type"] == "json_object" else None


def input_messages(value: Any) -> list[dict[str, Any]]:
    """Return a request's input as chat messages. Raises InvalidArgument for unknown items."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise InvalidArgument("input must be a text, or a list of items")
    return [_input_message(index, item) for index, item in enumerate(value)]


def _input_message(index: int, item: Any) -> dict[str, Any]:
    kind = item.get("type", "message") if isinstance(item, Mapping) else None
    if kind == "message":
        return {"role": item.get("role"), "content": item.get("content")}
    if kind == "function_call":
        function = {"name": str(item.get("name")), "arguments": str(item.get("arguments", "{}"))}
        call = {"type": "function", "id": item.get("call_id"), "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    if kind == "function_call_output":
        return {"role": "tool", "content": str(item.get("output", ""))}
    raise InvalidArgument(
        f"input[{index}] must be a message, a function_call or a function_call_output; "
        f"found {kind or item!r}"
    )


def chat_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return tools in the form of chats, where a function's fields are one level deeper."""
    result = []
    for tool in tools:
        fields = ("name", "description", "parameters")
        function = {key: tool[key] for key in fields if tool.get(key) is not None}
        result.append({"type": tool.get("type"), "function": function})
    return result


class GeneratedOutput:
    """Generated text, as a response's output items and as a chat message."""

    def __init__(self, text: str, tools: Tools | None, item_id: str):
        self.text, calls = tools.parse(text) if tools else (text, [])
        self._calls = [(call, f"call_{secrets.token_hex(12)}") for call in calls]
        self._item_id = item_id

    def items(self) -> list[dict[str, Any]]:
        items = [message_item(self._item_id, self.text)] if self.text or not self._calls else []
        for call, call_id in self._calls:
            items.append(
                {
                    "id": f"fc_{secrets.token_hex(12)}",
                    "type": "function_call",
                    "status": "completed",
                    "call_id": call_id,
                    "name": call.name,
                    "arguments": call.arguments,
                }
            )
        return items

    def message(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self._calls:
            message["tool_calls"] = [
                {
                    "id": call_id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call, call_id in self._calls
            ]
        return message


def message_item(item_id: str, text: str, status: str = "completed") -> dict[str, Any]:
    content = [text_part(text)] if status == "completed" else []
    head = {"id": item_id, "type": "message", "role": "assistant", "status": status}
    return {**head, "content": content}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": []}


def final_fields(end: Finished, prompt: int, cached: int) -> dict[str, Any]:
    """Return status and usage. prompt: its tokens; cached: those that were not evaluated."""
    status = _STATUSES[end.reason]
    incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
    written = end.usage.generated
    usage = {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": cached},
        "output_tokens": written,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + written,
    }
    return {"status": status, "incomplete_details": incomplete, "usage": usage}


def new_response(response_id: str, body: ResponsesRequest, model: str) -> dict[str, Any]:
    """Return the response object of a request that has just begun."""
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": body.previous_response_id,
        "store": body.store is not False,
        "temperature": body.temperature,
        "text": {"format": (body.text.format if body.text else None) or {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_p": body.top_p,
        "truncation": body.truncation or "auto",
        "usage": None,
    }

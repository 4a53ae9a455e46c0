"""Items of OpenAI's responses: messages, tool calls and their results, as input and output."""

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from kvkeep.engine import Finished
from kvkeep.errors import InvalidArgument
from kvkeep.server.tools import Tools

_STATUSES = {"eos": "completed", "stop": "completed", "length": "incomplete", "full": "incomplete"}


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

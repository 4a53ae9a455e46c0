"""Items of OpenAI's responses: messages, calls and their results, and a response made of them."""

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from kvkeep.engine import Finished
from kvkeep.errors import InvalidArgument
from kvkeep.server.tools import Call, Tools

_STATUSES = {"eos": "completed", "stop": "completed", "length": "incomplete", "full": "incomplete"}


def messages_of(given: Any) -> list[dict[str, Any]]:
    """The input of a request as messages. Raises InvalidArgument for items of another kind."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise InvalidArgument("input must be a text, or a list of items")
    return [_message(index, item) for index, item in enumerate(given)]


def _message(index: int, item: Any) -> dict[str, Any]:
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


def function_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Tools as chats have them: here their fields lie one level higher."""
    made = []
    for tool in tools:
        kept = ("name", "description", "parameters")
        function = {key: tool[key] for key in kept if tool.get(key) is not None}
        made.append({"type": tool.get("type"), "function": function})
    return made


class Reply:
    """What the model said: the items of a response, and the message that it is in a chat."""

    def __init__(self, text: str, tools: Tools | None, item_id: str):
        said, calls = tools.calls(text) if tools else (text, [])
        self.text, self.calls = said, calls
        self._ids = [f"fc_{secrets.token_hex(12)}" for _ in calls]
        self._call_ids = [f"call_{secrets.token_hex(12)}" for _ in calls]
        self._item_id = item_id

    def items(self) -> list[dict[str, Any]]:
        found = [message_item(self._item_id, self.text)] if self.text or not self.calls else []
        for call, item_id, call_id in zip(self.calls, self._ids, self._call_ids, strict=True):
            found.append(_call_item(call, item_id, call_id))
        return found

    def message(self) -> dict[str, Any]:
        made: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.calls:
            made["tool_calls"] = [
                {
                    "id": call_id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call, call_id in zip(self.calls, self._call_ids, strict=True)
            ]
        return made


def message_item(item_id: str, text: str, status: str = "completed") -> dict[str, Any]:
    content = [text_part(text)] if status == "completed" else []
    head = {"id": item_id, "type": "message", "role": "assistant", "status": status}
    return {**head, "content": content}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": []}


def _call_item(call: Call, item_id: str, call_id: str) -> dict[str, Any]:
    return {
        "id": item_id,
        "type": "function_call",
        "status": "completed",
        "call_id": call_id,
        "name": call.name,
        "arguments": call.arguments,
    }


def ending(end: Finished, prompt: int, held: int) -> dict[str, Any]:
    """How a response ended. prompt: its tokens; held: those of them that were not evaluated."""
    status = _STATUSES[end.reason]
    why = {"reason": "max_output_tokens"} if status == "incomplete" else None
    written = end.usage.generated
    usage = {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": held},
        "output_tokens": written,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + written,
    }
    return {"status": status, "incomplete_details": why, "usage": usage}

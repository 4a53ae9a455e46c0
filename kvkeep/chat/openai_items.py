"""Items of OpenAI's Responses API, as the messages that they become.

Items of calls that only OpenAI's servers run are calls with results where they hold the results,
and are left out otherwise.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from kvkeep.chat.fields import (
    expect_mapping,
    optional_list,
    optional_mapping,
    optional_text,
    parse_reasoning,
    parse_role,
)
from kvkeep.chat.messages import (
    MediaPart,
    Message,
    ReasoningPart,
    TextPart,
    Tool,
    ToolCall,
    ToolResult,
)
from kvkeep.chat.open_calls import OpenCalls
from kvkeep.chat.openai_content import parse_argument_value, parse_parts, parse_result
from kvkeep.chat.openai_tools import TOOL_SEARCH, joined_name, parse_tools
from kvkeep.errors import InvalidArgument

# Calls that the client runs: the name of their tool, and the field with the arguments.
CLIENT_CALLS = {
    "local_shell_call": ("local_shell", "action"),
    "shell_call": ("shell", "action"),
    "apply_patch_call": ("apply_patch", "operation"),
    "computer_call": ("computer", "action"),
    "tool_search_call": (TOOL_SEARCH, "arguments"),
}
# Calls that OpenAI's servers ran, with their results: the fields of arguments and of the result.
_HOSTED_CALLS = {
    "mcp_call": ("arguments", "output"),
    "file_search_call": ("queries", "results"),
    "code_interpreter_call": ("code", "outputs"),
}

_OTHER_TYPES = frozenset(
    (
        "additional_tools",
        "compaction",
        "compaction_summary",
        "compaction_trigger",
        "configuration_update",
        "context_compaction",
        "custom_tool_call",
        "function_call",
        "image_generation_call",
        "item_reference",
        "mcp_approval_request",
        "mcp_list_tools",
        "message",
        "reasoning",
        "web_search_call",
    )
)


def is_item_type(kind: str) -> bool:
    """Whether items of this type are supported, or left out without a loss."""
    is_call = kind in CLIENT_CALLS or kind in _HOSTED_CALLS
    return is_call or kind in _OTHER_TYPES or kind.endswith("_output")


class ItemReader:
    """Reads a conversation's items in order, and ties results to the calls before them."""

    def __init__(self, find_item: Callable[[str], Mapping[str, Any] | None] = lambda item_id: None):
        """find_item: returns the stored item with an id; None if there is none."""
        self.found_tools: list[Tool] = []  # those that tool searches returned
        self.added_tools: list[tuple[str, list[Any]]] = []  # places and entries of tools in items
        self._find_item = find_item
        self._call_count = 0
        self._open_calls = OpenCalls()

    def messages(self, entry: Any, where: str) -> list[Message]:
        """Return an item's messages. Raises InvalidArgument for what is no item."""
        item = expect_mapping(entry, where)
        item_type = item.get("type")
        if item_type is None:
            item_type = "message" if "role" in item or "id" not in item else "item_reference"
        if not isinstance(item_type, str):
            raise InvalidArgument(f"{where}.type must be text; found {item_type!r:.100}")
        match item_type:
            case "message":
                return [self._message(item, where)]
            case "reasoning":
                text = _reasoning_text(item, where)
                return [Message("assistant", (ReasoningPart(text),))] if text else []
            case "function_call" | "custom_tool_call":
                return [Message("assistant", (self._call(item, where),))]
            case "image_generation_call":
                return [Message("assistant", (MediaPart("image"),))]
            case "item_reference":
                return self.messages(self._referenced(item, where), where)
            case "tool_search_output":
                return [Message("tool", (self._found_tools(item, where),))]
            case "additional_tools":
                place = f"{where}.tools"
                self.added_tools.append((place, optional_list(item.get("tools"), place)))
                return []
            case "compaction_trigger" | "configuration_update":
                return []
        if item_type in CLIENT_CALLS:
            name, field = CLIENT_CALLS[item_type]
            arguments = parse_argument_value(item.get(field))
            call = ToolCall(self._new_id(item, where), name, _without_nulls(arguments))
            return [Message("assistant", (call,))]
        if item_type.endswith("_output"):
            return [Message("tool", (self._result(item, where),))]
        if item_type in _HOSTED_CALLS:
            return self._hosted_call(item, where)
        return [self._message(item, where)] if "role" in item and "content" in item else []

    def _message(self, item: Mapping[str, Any], where: str) -> Message:
        role = parse_role(item, where)
        if role == "tool":  # as in chats
            return Message(role, (self._result({**item, "output": item.get("content")}, where),))
        parts = parse_parts(item.get("content"), f"{where}.content")
        return Message(role, (parse_reasoning(item), *parts) if role == "assistant" else (*parts,))

    def _call(self, item: Mapping[str, Any], where: str) -> ToolCall:
        namespace = optional_text(item, "namespace", where)
        name = joined_name(namespace, optional_text(item, "name", where))
        call_id = self._new_id(item, where)
        if item.get("type") == "custom_tool_call":
            text = {"input": optional_text(item, "input", where)}
            return ToolCall(call_id, name, text, "custom", namespace)
        arguments = parse_argument_value(item.get("arguments"))
        return ToolCall(call_id, name, arguments, namespace=namespace)

    def _new_id(self, item: Mapping[str, Any], where: str) -> str:
        """Return a call's id; one by the order of calls if it has none."""
        call_id = optional_text(item, "call_id", where) or optional_text(item, "id", where)
        call_id = call_id or f"call_{self._call_count}"
        self._call_count += 1
        self._open_calls.add(call_id)
        return call_id

    def _result_id(self, item: Mapping[str, Any], where: str) -> str:
        """Return the id of a result's call: the first call without a result if it has none."""
        ids = [optional_text(item, field, where) for field in ("call_id", "tool_call_id", "id")]
        call_id = ids[0] or ids[1]
        if not call_id and ids[2] in self._open_calls:
            call_id = ids[2]
        if not call_id:
            return self._open_calls.close_next() or ids[2]
        self._open_calls.close(call_id)
        return call_id

    def _result(self, item: Mapping[str, Any], where: str) -> ToolResult:
        content = parse_result(item.get("output"), f"{where}.output")
        call_id, is_error = self._result_id(item, where), bool(item.get("is_error"))
        custom = item.get("type") == "custom_tool_call_output"
        return ToolResult(call_id, content, is_error, "custom" if custom else "function")

    def _found_tools(self, item: Mapping[str, Any], where: str) -> ToolResult:
        """Return the definitions of the tools that a search found, as lines of JSON."""
        entries = optional_list(item.get("tools"), f"{where}.tools")
        tools = parse_tools(entries, f"{where}.tools")
        self.found_tools += tools
        lines = [
            json.dumps(
                {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": dict(tool.parameters),
                },
                ensure_ascii=False,
            )
            for tool in tools
        ]
        text = (TextPart("\n".join(lines)),) if lines else ()
        return ToolResult(self._result_id(item, where), text)

    def _hosted_call(self, item: Mapping[str, Any], where: str) -> list[Message]:
        field, result_field = _HOSTED_CALLS[item["type"]]
        result = item.get("error") or item.get(result_field)
        if result is None:
            return []
        name = optional_text(item, "name", where) or item["type"].removesuffix("_call")
        value = item.get(field)
        arguments = parse_argument_value(value) if field == "arguments" else {field: value}
        call = ToolCall(self._new_id(item, where), name, arguments)
        self._open_calls.close(call.id)
        content = parse_result(result, f"{where}.{result_field}")
        tool_result = ToolResult(call.id, content, is_error=bool(item.get("error")))
        return [Message("assistant", (call,)), Message("tool", (tool_result,))]

    def _referenced(self, item: Mapping[str, Any], where: str) -> Mapping[str, Any]:
        item_id = optional_text(item, "id", where)
        referenced = self._find_item(item_id)
        if referenced is None:
            raise InvalidArgument(
                f"{where}: there is no stored item with id {item_id!r:.100}; send the item itself"
            )
        return referenced


def _reasoning_text(item: Mapping[str, Any], where: str) -> str:
    """Return the text of reasoning, or else of its summary. Encrypted content cannot be read."""
    for field, separator in (("content", ""), ("summary", "\n\n")):
        entries = item.get(field)
        entries = [entries] if isinstance(entries, str) else entries
        texts = [
            entry if isinstance(entry, str) else optional_mapping(entry).get("text")
            for entry in optional_list(entries, f"{where}.{field}")
        ]
        if text := separator.join(text for text in texts if isinstance(text, str)):
            return text
    return ""


def _without_nulls(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in arguments.items()
        if value is not None and (name, value) != ("type", "exec")
    }

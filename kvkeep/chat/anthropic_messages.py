"""Conversations in the form of Anthropic's Messages API, to and from the normal form.

The API has no custom tools and namespaces, so that both become plain functions, and of several
allowed tools it can name only one.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, Literal

from kvkeep.chat.anthropic_blocks import format_parts, parse_blocks
from kvkeep.chat.fields import expect_mapping, optional_list, optional_mapping, optional_text
from kvkeep.chat.messages import (
    Chat,
    Message,
    Part,
    ReasoningPart,
    Role,
    Tool,
    ToolCall,
    ToolChoice,
    ToolResult,
    normalized,
)
from kvkeep.chat.output import GeneratedCall, Output
from kvkeep.errors import InvalidArgument

SIGNATURE = "kvkeep"  # of thinking; some clients drop thinking without one
_ROLES = ("user", "assistant", "system")
_MODES: Mapping[Any, Literal["auto", "none", "required"]] = {
    "auto": "auto",
    "any": "required",
    "tool": "required",
    "none": "none",
}
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_HOSTED_SEARCH = "tool_search_tool"  # the beginning of the types of the hosted API's tool search


def parse_chat(body: Mapping[str, Any]) -> Chat:
    """Return the conversation of a request: its `system`, `messages`, `tools` and `tool_choice`.

    Tools that the hosted API defines are left out: see `hosted_tools`. Raises InvalidArgument.
    """
    tools = parse_tools(body.get("tools"))
    tools_by_name = {tool.name: tool for tool in tools}
    messages = list[Message]()
    if system := body.get("system"):
        messages.append(Message("system", tuple(parse_blocks(system, "system", tools_by_name))))
    entries = body.get("messages")
    if not isinstance(entries, list) or not entries:
        raise InvalidArgument(f"messages must be a list of messages; found {entries!r:.100}")
    for index, entry in enumerate(entries):
        messages += _parse_message(entry, f"messages[{index}]", tools_by_name)
    return Chat(normalized(messages), tools, _parse_choice(body.get("tool_choice"), tools))


def parse_tools(entries: Any) -> tuple[Tool, ...]:
    """Return the tools that the client defines.

    Those with `defer_loading` are deferred, unless the hosted API's tool search was to find them.
    """
    hosted_types = [str(entry["type"]) for entry in hosted_tools(entries)]
    deferring = not any(kind.startswith(_HOSTED_SEARCH) for kind in hosted_types)
    return tuple(
        _parse_tool(entry, f"tools[{index}]", deferring)
        for index, entry in enumerate(entries or ())
        if not _is_hosted(entry)
    )


def hosted_tools(entries: Any) -> list[Mapping[str, Any]]:
    """Return the tools that the hosted API defines, such as its web search."""
    return [entry for entry in optional_list(entries, "tools") if _is_hosted(entry)]


def allows_parallel_calls(tool_choice: Any) -> bool:
    """Whether the model may make several calls in one answer."""
    return not optional_mapping(tool_choice).get("disable_parallel_tool_use")


def format_chat(chat: Chat) -> dict[str, Any]:
    """Return a conversation as the fields of a request."""
    fields: dict[str, Any] = {}
    messages = chat.messages
    if len(messages) > 1 and messages[0].role == "system" and messages[0].parts:
        fields["system"] = format_parts(messages[0].parts)
        messages = messages[1:]
    fields["messages"] = [
        {
            "role": "user" if message.role == "tool" else message.role,
            "content": format_parts(message.parts),
        }
        for message in messages
    ]
    if chat.tools:
        fields["tools"] = [_format_tool(tool) for tool in chat.tools]
    if chat.choice != ToolChoice():
        fields["tool_choice"] = _format_choice(chat.choice)
    return fields


def format_output(output: Output) -> list[dict[str, Any]]:
    """Return an answer as content blocks; at least one, of empty text."""
    blocks = format_parts(
        part.message_part() if isinstance(part, GeneratedCall) else part for part in output.parts
    )
    for block in blocks:
        if block["type"] == "thinking":
            block["signature"] = SIGNATURE
    return blocks or [{"type": "text", "text": ""}]


def _parse_message(entry: Any, where: str, tools: Mapping[str, Tool]) -> list[Message]:
    """Return an entry as messages: one for each run of parts of one role."""
    role = optional_mapping(entry).get("role")
    if role not in _ROLES:
        raise InvalidArgument(f"{where}: role must be user or assistant; found {role!r:.100}")
    parts = parse_blocks(entry.get("content"), f"{where}.content", tools)
    if role == "user":  # results belong to the calls of the message before
        parts.sort(key=lambda part: not isinstance(part, ToolResult))
    runs = groupby(parts, key=lambda part: _part_role(part, role))
    return [Message(run_role, tuple(run)) for run_role, run in runs] or [Message(role)]


def _part_role(part: Part, message_role: Role) -> Role:
    if isinstance(part, ToolResult):
        return "tool"
    return "assistant" if isinstance(part, (ToolCall, ReasoningPart)) else message_role


def _is_hosted(entry: Any) -> bool:
    kind = optional_mapping(entry).get("type")
    return isinstance(kind, str) and kind not in ("custom", "function")


def _parse_tool(entry: Any, where: str, deferring: bool) -> Tool:
    name = optional_mapping(entry).get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidArgument(
            f"{where}.name must have 1 to 128 letters, digits, '_', '.' and '-'; "
            f"found {name!r:.100}"
        )
    description, schema = optional_text(entry, "description", where), entry.get("input_schema")
    if schema is not None:
        expect_mapping(schema, f"{where}.input_schema")
    fields: dict[str, Any] = {"parameters": schema} if schema else {}
    deferred = deferring and bool(entry.get("defer_loading"))
    return Tool(name, description, deferred=deferred, **fields)


def _format_tool(tool: Tool) -> dict[str, Any]:
    fields = {"name": tool.name, "input_schema": tool.parameters}
    if tool.description:
        fields["description"] = tool.description
    return {**fields, "defer_loading": True} if tool.deferred else fields


def _parse_choice(value: Any, tools: Sequence[Tool]) -> ToolChoice:
    if value is None:
        return ToolChoice()
    kind = optional_mapping(value).get("type")
    if not isinstance(kind, str) or kind not in _MODES:
        raise InvalidArgument(
            f"tool_choice.type must be auto, any, tool or none; found {value!r:.100}"
        )
    choice = ToolChoice(_MODES[kind])
    if kind == "tool":
        choice = ToolChoice("required", (str(value.get("name")),))
    names = [tool.name for tool in tools]
    if choice.mode == "required" and not set(choice.names or names) & set(names):
        raise InvalidArgument(f"tool_choice: there is no such tool; the tools are {names}")
    return choice


def _format_choice(choice: ToolChoice) -> dict[str, Any]:
    """Return the choice; the API cannot express several allowed tools, which become all tools."""
    if choice.mode != "required":
        return {"type": choice.mode}
    if choice.names and len(choice.names) == 1:
        return {"type": "tool", "name": choice.names[0]}
    return {"type": "any"}

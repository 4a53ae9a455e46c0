"""Conversations in the form of OpenAI's Responses API, to and from the normal form."""

import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from kvkeep.chat.fields import optional_list
from kvkeep.chat.messages import (
    Chat,
    MediaPart,
    Message,
    Part,
    ReasoningPart,
    Role,
    TextPart,
    Tool,
    ToolCall,
    ToolChoice,
    ToolResult,
    normalized,
)
from kvkeep.chat.openai_content import media_text
from kvkeep.chat.openai_items import CLIENT_CALLS, ItemReader
from kvkeep.chat.openai_tools import (
    TOOL_SEARCH,
    client_types,
    custom_input,
    hosted_tools,
    own_name,
    parse_choice,
    parse_tools,
)
from kvkeep.chat.output import GeneratedCall, Output, arguments_text, parse_arguments
from kvkeep.errors import InvalidArgument

_ID_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "local_shell_call": "lsh",
    "shell_call": "sh",
    "apply_patch_call": "apc",
    "tool_search_call": "tsc",
}
_CALL_TYPES = {name: (item_type, field) for item_type, (name, field) in CLIENT_CALLS.items()}
_MEDIA_FIELDS = {"image": "image_url"}


def parse_chat(
    body: Mapping[str, Any],
    find_item: Callable[[str], Mapping[str, Any] | None] = lambda item_id: None,
) -> Chat:
    """Return the conversation of a request: its instructions, input, tools and tool choice.

    find_item: returns the stored item with an id; None if there is none. Tools in items of type
    `additional_tools` follow the request's own. Tools that only OpenAI's servers run are left out:
    see `openai_tools.hosted_tools`. Raises InvalidArgument.
    """
    reader = ItemReader(find_item)
    messages = _parse_instructions(body.get("instructions"), reader)
    messages += parse_items(input_items(body.get("input")), "input", reader)
    if not messages:
        raise InvalidArgument("input has no message, call or result; at least one is needed")
    tools = _offered_tools(body.get("tools"), reader)
    names = {tool.name for tool in tools}
    found = {tool.name: replace(tool, deferred=True) for tool in reader.found_tools}
    tools = (*tools, *(tool for name, tool in found.items() if name not in names))
    entries = [*(body.get("tools") or ()), *(e for _, added in reader.added_tools for e in added)]
    has_hosted = bool(hosted_tools(entries))
    choice = parse_choice(body.get("tool_choice"), tools, has_hosted=has_hosted)
    return Chat(normalized(messages), tools, choice)


def input_items(value: Any) -> list[Any]:
    """Return the items of an `input`: text is a user's message. Raises InvalidArgument."""
    if isinstance(value, str):
        content = [{"type": "input_text", "text": value}]
        return [{"type": "message", "role": "user", "content": content}]
    if not isinstance(value, list):
        raise InvalidArgument(f"input must be text or a list of items; found {value!r:.100}")
    return value


def parse_items(items: Iterable[Any], where: str, reader: ItemReader) -> list[Message]:
    """Return the messages of items, not yet in normal form. where: names the items in errors."""
    return [
        message
        for index, item in enumerate(items)
        for message in reader.messages(item, f"{where}[{index}]")
    ]


def format_chat(chat: Chat) -> dict[str, Any]:
    """Return a conversation as the fields of a request."""
    fields: dict[str, Any] = {"input": format_messages(chat.messages)}
    if chat.tools:
        fields["tools"] = format_tools(chat.tools)
    if chat.choice != ToolChoice():
        fields["tool_choice"] = _format_choice(chat.choice, chat.tools)
    return fields


def format_messages(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """Return messages as items: one for each run of content, reasoning, call and result."""
    items = []
    for message in messages:
        for is_content, run in groupby(message.parts, key=_is_content):
            parts = list(run)
            if is_content:
                items.append(_message_item(message.role, parts))
            else:
                items += [_format_part(part) for part in parts]
        if not message.parts:
            items.append(_message_item(message.role, ()))
    return items


def format_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Return tools; those of a namespace together in it."""
    entries = []
    for namespace, run in groupby(tools, key=lambda tool: tool.namespace):
        formatted = [_format_tool(tool) for tool in run]
        grouped = {"type": "namespace", "name": namespace, "tools": formatted}
        entries += [grouped] if namespace else formatted
    return entries


def format_output(
    output: Output, tools: Sequence[Tool] = (), client_types: Collection[str] = ()
) -> list[dict[str, Any]]:
    """Return an answer as items in order, without ids. Arguments as of `format_generated_call`."""
    items = []
    for part in output.parts:
        if isinstance(part, GeneratedCall):
            items.append(format_generated_call(part, tools, client_types))
        elif isinstance(part, ReasoningPart):
            items.append(reasoning_item(part.text))
        else:
            items.append(output_message(part.text))
    return items


def new_item_id(item_type: str) -> str:
    """Return an id for an item of this type."""
    return f"{_ID_PREFIXES.get(item_type, 'item')}_{secrets.token_hex(12)}"


def output_message(text: str) -> dict[str, Any]:
    """Return a message of the assistant."""
    content = [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]
    return {"type": "message", "role": "assistant", "status": "completed", "content": content}


def reasoning_item(text: str) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}]
    return {"type": "reasoning", "summary": [], "content": content, "status": "completed"}


def format_generated_call(
    call: GeneratedCall, tools: Sequence[Tool] = (), client_types: Collection[str] = ()
) -> dict[str, Any]:
    """Return a generated call as an item.

    tools: those that the model was offered. client_types: `openai_tools.client_types` of them,
    whose calls have forms of their own.
    """
    tool = next((tool for tool in tools if tool.name == call.name), Tool(call.name))
    fields = {"call_id": call.id, "status": "completed" if call.complete else "incomplete"}
    if call.name in client_types:
        item_type, field = _CALL_TYPES[call.name]
        value = parse_arguments(call.arguments)
        if call.name == "local_shell":
            value = {"type": "exec", "env": {}, **value}
        execution = {"execution": "client"} if call.name == TOOL_SEARCH else {}
        return {"type": item_type, **fields, **execution, field: value}
    if tool.namespace:
        fields["namespace"] = tool.namespace
    fields["name"] = own_name(call.name, tool.namespace)
    if tool.kind == "custom":
        return {"type": "custom_tool_call", **fields, "input": custom_input(call.arguments)}
    return {"type": "function_call", **fields, "arguments": call.arguments}


def _offered_tools(entries: Any, reader: ItemReader) -> tuple[Tool, ...]:
    """Return a request's tools and those in its items, of which the newest definition counts."""
    lists = [("tools", optional_list(entries, "tools")), *reader.added_tools]
    has_search = any(TOOL_SEARCH in client_types(entries) for _, entries in lists)
    own, *added = (parse_tools(entries, where, has_search) for where, entries in lists)
    names = {tool.name for tool in own}
    newest = {tool.name: tool for tools in added for tool in tools if tool.name not in names}
    return (*own, *newest.values())


def _parse_instructions(value: Any, reader: ItemReader) -> list[Message]:
    if value is None or value == "":
        return []
    if isinstance(value, str):
        return [Message("system", (TextPart(value),))]
    if not isinstance(value, list):
        raise InvalidArgument(f"instructions must be text or a list of items; found {value!r:.100}")
    return parse_items(value, "instructions", reader)


def _is_content(part: Part) -> bool:
    return isinstance(part, (TextPart, MediaPart))


def _message_item(role: Role, parts: Sequence[Part]) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [_content(part, role) for part in parts]}


def _content(part: Part, role: Role) -> dict[str, Any]:
    if isinstance(part, MediaPart):
        field = _MEDIA_FIELDS.get(part.kind, "filename")
        return {"type": f"input_{part.kind}", field: part.name}
    assert isinstance(part, TextPart)
    if role == "assistant":
        return {"type": "output_text", "text": part.text, "annotations": []}
    return {"type": "input_text", "text": part.text}


def _format_part(part: Part) -> dict[str, Any]:
    if isinstance(part, ReasoningPart):
        return reasoning_item(part.text)
    if isinstance(part, ToolResult):
        text = media_text(part.content)
        output = [_content(entry, "tool") for entry in part.content] if text is None else text
        item_type = "custom_tool_call_output" if part.kind == "custom" else "function_call_output"
        error = {"is_error": True} if part.is_error else {}  # a field that the hosted API ignores
        return {"type": item_type, "call_id": part.call_id, "output": output, **error}
    assert isinstance(part, ToolCall)
    fields = {"call_id": part.id, "name": own_name(part.name, part.namespace)}
    if part.namespace:
        fields["namespace"] = part.namespace
    if part.kind == "custom":
        text = str(part.arguments.get("input", ""))
        return {"type": "custom_tool_call", **fields, "input": text}
    return {"type": "function_call", **fields, "arguments": arguments_text(part)}


def _format_tool(tool: Tool) -> dict[str, Any]:
    name = own_name(tool.name, tool.namespace)
    fields: dict[str, Any] = {"type": tool.kind, "name": name, "description": tool.description}
    if tool.kind == "function":
        fields |= {"parameters": dict(tool.parameters), "strict": tool.strict}
    return {**fields, "defer_loading": True} if tool.deferred else fields


def _format_choice(choice: ToolChoice, tools: Sequence[Tool]) -> str | dict[str, Any]:
    if choice.names is None:
        return choice.mode
    by_name = {tool.name: tool for tool in tools}
    entries = []
    for tool in (by_name.get(name, Tool(name)) for name in choice.names):
        entry = {"type": tool.kind, "name": own_name(tool.name, tool.namespace)}
        entries.append({**entry, "namespace": tool.namespace} if tool.namespace else entry)
    if choice.mode == "required" and len(entries) == 1:
        return entries[0]
    return {"type": "allowed_tools", "mode": choice.mode, "tools": entries}

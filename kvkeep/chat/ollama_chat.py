"""Conversations in the form of Ollama's API, to and from the normal form.

A message of the API has one thinking, text and list of images and of calls: their order is lost,
and so are names of media, media other than images, marks of errors, and the choice of tools.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from kvkeep.chat.fields import optional_list, optional_text, parse_reasoning, parse_role
from kvkeep.chat.messages import (
    Chat,
    MediaPart,
    Message,
    Part,
    TextPart,
    Tool,
    ToolCall,
    ToolResult,
    call_places,
    content_text,
    normalized,
)
from kvkeep.chat.open_calls import OpenCalls
from kvkeep.chat.openai_content import parse_argument_value
from kvkeep.chat.openai_tools import parse_tools
from kvkeep.errors import InvalidArgument


def parse_chat(messages: Any, tools: Any = None) -> Chat:
    """Return the conversation of a request's `messages` and `tools`. Raises InvalidArgument."""
    if not isinstance(messages, list) or not messages:
        raise InvalidArgument(f"messages must be a list of messages; found {messages!r:.100}")
    calls = OpenCalls()
    result = []
    for index, entry in enumerate(messages):
        where = f"messages[{index}]"
        role = parse_role(entry, where)
        content: tuple[Part, ...] = _parse_content(entry, where)
        if role == "tool":
            content = (ToolResult(_call_id(entry, where, calls), _parse_content(entry, where)),)
        elif role == "assistant":
            new_calls = _parse_calls(entry, where, index)
            for call in new_calls:
                calls.add(call.id, call.name)
            content = (parse_reasoning(entry), *content, *new_calls)
        result.append(Message(role, content))
    return Chat(normalized(result), parse_tools(tools))


def format_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages in the API's form. A message of results becomes one message for each."""
    result, calls = [], call_places(messages)
    for number, message in enumerate(messages):
        if message.role != "tool":
            result.append(_format_message(message))
        for index, part in enumerate(message.results):
            place = calls.get((number, index))
            name = messages[place[0]].calls[place[1]].name if place else ""
            ids = {"tool_name": name, "tool_call_id": part.call_id}
            result.append({"role": "tool", **_format_content(part.content), **ids})
    return result


def format_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.parameters,
            },
        }
        for tool in tools
    ]


def _format_message(message: Message) -> dict[str, Any]:
    content = [part for part in message.parts if isinstance(part, (TextPart, MediaPart))]
    fields = {"role": message.role, **_format_content(content)}
    if message.reasoning:
        fields["thinking"] = message.reasoning
    if message.calls:
        fields["tool_calls"] = [
            format_call(call, index) for index, call in enumerate(message.calls)
        ]
    return fields


def format_call(call: ToolCall, index: int) -> dict[str, Any]:
    function = {"index": index, "name": call.name, "arguments": dict(call.arguments)}
    return {"id": call.id, "function": function}


def _format_content(content: Sequence[TextPart | MediaPart]) -> dict[str, Any]:
    """Return texts, with placeholders for media other than images, and the images as no data."""
    image_count = sum(map(_is_image, content))
    text = content_text(part for part in content if not _is_image(part))
    return {"content": text, "images": [""] * image_count} if image_count else {"content": text}


def _is_image(part: TextPart | MediaPart) -> bool:
    return isinstance(part, MediaPart) and part.kind == "image"


def _parse_content(entry: Mapping[str, Any], where: str) -> tuple[TextPart | MediaPart, ...]:
    """Return placeholders for the images, and the text."""
    images = [MediaPart("image") for _ in optional_list(entry.get("images"), f"{where}.images")]
    text = optional_text(entry, "content", where)
    return (*images, TextPart(text)) if text else tuple(images)


def _parse_calls(entry: Mapping[str, Any], where: str, message_index: int) -> list[ToolCall]:
    """Return a message's calls. Those without an id get one by their place."""
    calls = []
    for index, call in enumerate(optional_list(entry.get("tool_calls"), f"{where}.tool_calls")):
        call_where = f"{where}.tool_calls[{index}]"
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            raise InvalidArgument(f"{call_where}.function must be an object; found {call!r:.100}")
        call_id = optional_text(call, "id", call_where) or f"call_{message_index}_{index}"
        arguments = parse_argument_value(function.get("arguments"))
        calls.append(ToolCall(call_id, optional_text(function, "name", call_where), arguments))
    return calls


def _call_id(entry: Mapping[str, Any], where: str, calls: OpenCalls) -> str:
    """Return the id of the call that a result is of, and close the call.

    Without `tool_call_id`, it is the first call of the tool `tool_name`, or else the first call.
    """
    call_id, name = (
        optional_text(entry, "tool_call_id", where),
        optional_text(entry, "tool_name", where),
    )
    if not call_id:
        return calls.close_next(name)
    calls.close(call_id)
    return call_id

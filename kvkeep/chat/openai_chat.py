"""Conversations in the form of OpenAI's Chat Completions API, to and from the normal form.

A message of the API has one reasoning, content and list of calls. A message whose parts are in
another order becomes several. Namespaces of tools are lost.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from kvkeep.chat.fields import (
    expect_mapping,
    optional_list,
    optional_mapping,
    optional_text,
    parse_reasoning,
    parse_role,
)
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
from kvkeep.chat.open_calls import OpenCalls
from kvkeep.chat.openai_content import (
    media_text,
    parse_argument_value,
    parse_parts,
    parse_result,
)
from kvkeep.chat.openai_tools import (
    custom_input,
    hosted_tools,
    parse_choice,
    parse_functions,
    parse_tools,
)
from kvkeep.chat.output import GeneratedCall, Output, arguments_text
from kvkeep.errors import InvalidArgument

_MEDIA_TYPES = {"image": "image_url", "audio": "audio_url", "video": "video_url"}


def parse_chat(body: Mapping[str, Any]) -> Chat:
    """Return the conversation of a request: its messages, tools and tool choice.

    The deprecated fields `functions` and `function_call` are read too. Tools that only OpenAI's
    servers run are left out: see `openai_tools.hosted_tools`. Raises InvalidArgument.
    """
    tools = parse_tools(body.get("tools"))
    functions = parse_functions(body.get("functions"))
    if functions and not tools:
        choice = parse_choice(body.get("function_call"), functions, "function_call")
        return Chat(parse_messages(body.get("messages")), functions, choice)
    has_hosted = bool(hosted_tools(body.get("tools")))
    choice = parse_choice(body.get("tool_choice"), tools, has_hosted=has_hosted)
    return Chat(parse_messages(body.get("messages")), tools, choice)


def parse_messages(entries: Any) -> tuple[Message, ...]:
    """Return messages in normal form. Calls without an id get one by their order in the chat."""
    if not isinstance(entries, list) or not entries:
        raise InvalidArgument(f"messages must be a list of messages; found {entries!r:.100}")
    reader, messages = _MessageReader(), []
    for index, entry in enumerate(entries):
        messages.append(reader.message(entry, f"messages[{index}]"))
    return normalized(messages)


class _MessageReader:
    """Reads a chat's messages in order, and ties results to the calls before them."""

    def __init__(self) -> None:
        self._calls_by_id: dict[str, ToolCall] = {}
        self._open_calls = OpenCalls()
        self._call_count = 0

    def message(self, entry: Any, where: str) -> Message:
        role = parse_role(entry, where)
        if role == "tool":
            return Message(role, (self._result(entry, where),))
        parts = parse_parts(entry.get("content"), f"{where}.content")
        if role != "assistant":
            return Message(role, tuple(parts))
        parts = [parse_reasoning(entry), *parts]
        if not any(isinstance(part, TextPart) for part in parts):
            parts += _spoken(entry, where)
        return Message(role, (*parts, *self._calls(entry, where)))

    def _calls(self, entry: Mapping[str, Any], where: str) -> Iterable[ToolCall]:
        for index, call in enumerate(optional_list(entry.get("tool_calls"), f"{where}.tool_calls")):
            yield self._call(call, f"{where}.tool_calls[{index}]")
        if entry.get("function_call") is not None:
            yield self._call({"function": entry["function_call"]}, f"{where}.function_call")

    def _call(self, entry: Any, where: str) -> ToolCall:
        fields = expect_mapping(entry, where)
        call_id = optional_text(fields, "id", where) or f"call_{self._call_count}"
        self._call_count += 1
        if "custom" in fields:
            custom = expect_mapping(fields["custom"], f"{where}.custom")
            name = optional_text(custom, "name", f"{where}.custom")
            text = optional_text(custom, "input", f"{where}.custom")
            call = ToolCall(call_id, name, {"input": text}, "custom")
        else:
            function = expect_mapping(fields.get("function"), f"{where}.function")
            name = optional_text(function, "name", f"{where}.function")
            call = ToolCall(call_id, name, parse_argument_value(function.get("arguments")))
        self._open_calls.add(call_id, name)
        self._calls_by_id[call_id] = call
        return call

    def _result(self, entry: Mapping[str, Any], where: str) -> ToolResult:
        """Return a result. Without a call's id, it is of the first call of the same name or any."""
        call_id, name = (optional_text(entry, key, where) for key in ("tool_call_id", "name"))
        content = parse_result(entry.get("content"), f"{where}.content")
        if call_id:
            self._open_calls.close(call_id)
        else:
            call_id = self._open_calls.close_next(name)
        call = self._calls_by_id.get(call_id)
        kind = call.kind if call else "function"
        return ToolResult(call_id, content, bool(entry.get("is_error")), kind)


def format_chat(chat: Chat) -> dict[str, Any]:
    """Return a conversation as the fields of a request."""
    fields: dict[str, Any] = {"messages": format_messages(chat.messages)}
    if chat.tools:
        fields["tools"] = [format_tool(tool) for tool in chat.tools]
    if chat.choice != ToolChoice():
        fields["tool_choice"] = _format_choice(chat.choice, chat.tools)
    return fields


def format_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages in the API's form: each result, and each run of parts in order, is one."""
    result = []
    for message in messages:
        if message.role == "tool":
            result += [_format_result(part) for part in message.results]
        else:
            result += [_format_run(message.role, run) for run in _runs(message.parts)]
    return result


def format_output(output: Output, tools: Sequence[Tool] = ()) -> dict[str, Any]:
    """Return an answer as the message of a choice: all its texts, reasoning and calls.

    tools: those that the model was offered; calls of custom ones have a form of their own.
    """
    message: dict[str, Any] = {"role": "assistant", "content": output.text}
    if output.reasoning:
        message["reasoning_content"] = output.reasoning
    if output.calls:
        kinds = {tool.name: tool.kind for tool in tools}
        message["content"] = output.text or None
        message["tool_calls"] = [
            format_generated_call(call, kinds.get(call.name, "function")) for call in output.calls
        ]
    return message


def format_generated_call(
    call: GeneratedCall, kind: Literal["function", "custom"] = "function"
) -> dict[str, Any]:
    """Return a call of a function or a custom tool."""
    if kind == "custom":
        custom = {"name": call.name, "input": custom_input(call.arguments)}
        return {"id": call.id, "type": "custom", "custom": custom}
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def format_tool(tool: Tool) -> dict[str, Any]:
    if tool.kind == "custom":
        return {"type": "custom", "custom": {"name": tool.name, "description": tool.description}}
    function: dict[str, Any] = {
        "name": tool.name,
        "description": tool.description,
        "parameters": dict(tool.parameters),
    }
    if tool.strict:
        function["strict"] = True
    return {"type": "function", "function": function}


def _spoken(entry: Mapping[str, Any], where: str) -> list[Part]:
    """Return what stands in place of a message's text: a refusal, or speech."""
    parts: list[Part] = [TextPart(optional_text(entry, "refusal", where))]
    if entry.get("audio") is not None:
        transcript = optional_mapping(entry["audio"]).get("transcript")
        has_text = isinstance(transcript, str) and transcript
        parts.append(TextPart(str(transcript)) if has_text else MediaPart("audio"))
    return parts


def _runs(parts: Sequence[Part]) -> list[list[Part]]:
    """Split parts where one cannot follow in the same message: reasoning, content, calls."""

    def rank(part: Part) -> int:
        return 0 if isinstance(part, ReasoningPart) else 2 if isinstance(part, ToolCall) else 1

    runs: list[list[Part]] = [[]]
    for part in parts:
        if runs[-1] and rank(part) < rank(runs[-1][-1]):
            runs.append([])
        runs[-1].append(part)
    return runs


def _format_run(role: Role, parts: Sequence[Part]) -> dict[str, Any]:
    message = Message(role, tuple(parts))
    content = [part for part in parts if isinstance(part, (TextPart, MediaPart))]
    fields: dict[str, Any] = {"role": role, "content": _format_content(content)}
    if message.reasoning:
        fields["reasoning_content"] = message.reasoning
    if message.calls:
        fields["content"] = fields["content"] or None
        fields["tool_calls"] = [_format_call(call) for call in message.calls]
    return fields


def _format_call(call: ToolCall) -> dict[str, Any]:
    if call.kind == "custom":
        custom = {"name": call.name, "input": str(call.arguments.get("input", ""))}
        return {"id": call.id, "type": "custom", "custom": custom}
    function = {"name": call.name, "arguments": arguments_text(call)}
    return {"id": call.id, "type": "function", "function": function}


def _format_result(result: ToolResult) -> dict[str, Any]:
    content = _format_content(result.content)
    error = {"is_error": True} if result.is_error else {}  # a field that the hosted API ignores
    return {"role": "tool", "tool_call_id": result.call_id, "content": content, **error}


def _format_content(parts: Sequence[TextPart | MediaPart]) -> str | list[dict[str, Any]]:
    text = media_text(parts)
    return [_format_part(part) for part in parts] if text is None else text


def _format_part(part: TextPart | MediaPart) -> dict[str, Any]:
    if isinstance(part, TextPart):
        return {"type": "text", "text": part.text}
    if part.kind in _MEDIA_TYPES:
        part_type = _MEDIA_TYPES[part.kind]
        return {"type": part_type, part_type: {"url": part.name}}
    return {"type": "file", "file": {"filename": part.name}}


def _format_choice(choice: ToolChoice, tools: Sequence[Tool]) -> str | dict[str, Any]:
    if choice.names is None:
        return choice.mode
    kinds = {tool.name: tool.kind for tool in tools}
    entries = [
        {"type": (kind := kinds.get(name, "function")), kind: {"name": name}}
        for name in choice.names
    ]
    if choice.mode == "required" and len(entries) == 1:
        return entries[0]
    return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": entries}}

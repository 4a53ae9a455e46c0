"""Tools: their description in the prompt, and the parsing of the model's calls.

For templates that do not support tools, such as SmolLM2's, the system message describes them in the
form of Hermes models, `<tool_call>` around JSON, which most small models follow:
https://github.com/NousResearch/Hermes-Function-Calling.
"""

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvkeep.errors import InvalidArgument
from kvkeep.models.text.codec import TextCodec

_OPEN_TAG, _CLOSE_TAG = "<tool_call>", "</tool_call>"
_CALL_PATTERN = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|$)", re.DOTALL)
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_MAX_TOOLS = 128
_NO_PARAMETERS = {"type": "object", "properties": {}}


@dataclass(frozen=True)
class ParsedCall:
    name: str  # of the tool
    arguments: str  # JSON
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")

    def openai_entry(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True)
class Tools:
    """The tools that the model may call; false if there are none."""

    entries: Sequence[Mapping[str, Any]] = ()  # of OpenAI's field `tools`
    choice: str = "auto"  # or "required", or the name of the tool that must be called

    def __bool__(self) -> bool:
        return bool(self.entries)

    @property
    def names(self) -> list[str]:
        return [tool["function"]["name"] for tool in self.entries]

    @property
    def forced(self) -> bool:
        """Whether the model must call a tool."""
        return self.choice != "auto"

    def forced_call_schema(self) -> dict[str, Any]:
        """Return the JSON schema of a forced call: bare JSON with a name and arguments."""
        call_schemas = [
            {
                "type": "object",
                "properties": {
                    "name": {"const": tool["function"]["name"]},
                    "arguments": tool["function"].get("parameters") or _NO_PARAMETERS,
                },
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for tool in self.entries
            if self.choice in ("required", tool["function"]["name"])
        ]
        return {"anyOf": call_schemas}

    def for_template(
        self, tokenizer: TextCodec, messages: list[dict[str, Any]]
    ) -> tuple[list[dict[str, Any]], Sequence[Mapping[str, Any]] | None]:
        """Return messages and tools to render; plain text and None for templates without tools."""
        if not self:
            return messages, None
        if _template_supports_tools(tokenizer):
            return messages, self.entries
        plain_messages = [_without_tools(message) for message in messages]
        description = _tool_description(self.entries)
        if (first_message := plain_messages[0])["role"] == "system":
            content = f"{first_message['content']}\n\n{description}"
            plain_messages[0] = {**first_message, "content": content}
        else:
            plain_messages.insert(0, {"role": "system", "content": description})
        return plain_messages, None

    def parse(self, text: str) -> tuple[str, list[ParsedCall]]:
        """Split generated text into its text outside of calls, and its calls of known tools."""
        if not self:
            return text, []
        call_texts = _CALL_PATTERN.findall(text)
        if calls := [call for call_text in call_texts for call in self._parse_calls(call_text)]:
            return _CALL_PATTERN.sub("", text).strip(), calls
        bare_calls = self._parse_calls(text.strip())
        return ("", bare_calls) if bare_calls else (text, [])

    def _parse_calls(self, text: str) -> list[ParsedCall]:
        """Parse JSON as one call or a list. Returns [] unless all are calls of known tools."""
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return []
        values = value if isinstance(value, list) else [value]
        parsed_calls = [_parse_call(value) for value in values]
        calls = [call for call in parsed_calls if call and call.name in self.names]
        return calls if len(calls) == len(values) else []


def validate_tools(entries: Sequence[Mapping[str, Any]], choice: Any) -> Tools:
    """Return the tools of OpenAI's `tools` and `tool_choice`. Raises InvalidArgument."""
    if len(entries) > _MAX_TOOLS:
        raise InvalidArgument(f"at most {_MAX_TOOLS} tools are supported; found {len(entries)}")
    for index, tool in enumerate(entries):
        function = tool.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if tool.get("type") != "function" or not isinstance(name, str) or not _NAME.fullmatch(name):
            raise InvalidArgument(
                f"tools[{index}] must be a function named with letters, digits, '_', '.' and '-'"
            )
    if isinstance(choice, Mapping):  # chats nest the name in "function"; responses do not
        function = choice.get("function", choice)
        choice = function.get("name") if isinstance(function, Mapping) else None
    tools = Tools(entries, choice or "auto")
    if tools.choice == "none" or (not entries and tools.choice == "auto"):
        return Tools()
    if tools.choice not in ("auto", "required", *tools.names) or not entries:
        raise InvalidArgument(f"tool_choice: unknown tool; the tools are {tools.names}")
    return tools


def _parse_call(value: Any) -> ParsedCall | None:
    """Parse one call: Hermes and Mistral write "arguments", Llama "parameters"."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return ParsedCall(value["name"], arguments)


def _template_supports_tools(tokenizer: TextCodec) -> bool:
    """Whether the text that the template renders depends on the tools given to it."""
    probe_tool = {"type": "function", "function": {"name": "kvkeeptool", "parameters": {}}}
    messages = [{"role": "user", "content": "a"}]
    try:
        return "kvkeeptool" in tokenizer.chat(messages, tools=[probe_tool])
    except InvalidArgument:
        return False


def _tool_description(tools: Sequence[Mapping[str, Any]]) -> str:
    """Describe the tools, and how to call them, for the system message."""
    functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    call = f'{_OPEN_TAG}\n{{"name": <name>, "arguments": <object>}}\n{_CLOSE_TAG}'
    return f"You may call these functions:\n{functions}\n\nTo call one, answer:\n{call}"


def _without_tools(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message whose tool calls or tool result are plain text."""
    result = {key: message[key] for key in ("role", "content") if key in message}
    if message.get("role") == "tool":
        text = f"<tool_response>\n{result['content']}\n</tool_response>"
        return {"role": "user", "content": text}
    calls = []
    for call in message.get("tool_calls") or ():
        function = call.get("function", {}) if isinstance(call, Mapping) else {}
        arguments = function.get("arguments", "{}")
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        name = json.dumps(function.get("name"))
        calls.append(f'{_OPEN_TAG}\n{{"name": {name}, "arguments": {text}}}\n{_CLOSE_TAG}')
    if calls:
        result["content"] = "\n".join([*filter(None, [result.get("content")]), *calls])
    return result

"""Tools: what the model is told of them, and its calls, found in what it writes.

Templates that know of tools are handed them. To others, SmolLM2's among them, they are described in
the system message in the form that Hermes models are trained on, `<tool_call>` around JSON, which
most small models follow: https://github.com/NousResearch/Hermes-Function-Calling.
"""

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvkeep.errors import InvalidArgument
from kvkeep.models.text.codec import TextCodec

OPENING = "<tool_call>"
_CALL = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|$)", re.DOTALL)
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_MOST = 128


@dataclass(frozen=True)
class Call:
    """A call of a tool. arguments: JSON, as text."""

    name: str
    arguments: str

    def entry(self) -> dict[str, Any]:
        """As OpenAI's API has it."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


@dataclass(frozen=True)
class Tools:
    """The tools of a request. choice: "auto", "required", or the name of the one to be called."""

    given: Sequence[Mapping[str, Any]]
    choice: str = "auto"

    @property
    def names(self) -> list[str]:
        return [tool["function"]["name"] for tool in self.given]

    @property
    def forced(self) -> bool:
        return self.choice != "auto"

    def schema(self) -> dict[str, Any]:
        """Of the call that must be made: the bare JSON of it."""
        wanted = [
            tool["function"]
            for tool in self.given
            if self.choice in ("required", tool["function"]["name"])
        ]
        return {"anyOf": [_schema_of(function) for function in wanted]}

    def messages(
        self, codec: TextCodec, messages: Sequence[Mapping[str, Any]]
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
        """What the template is given: messages, and tools where it knows of them."""
        given = [dict(tool) for tool in self.given]
        if _known_to_template(codec):
            return [dict(message) for message in messages], given
        told = [_without_tools(message) for message in messages]
        text = _told(self.given)
        if told and told[0]["role"] == "system":
            told[0] = {**told[0], "content": f"{told[0]['content']}\n\n{text}"}
        else:
            told.insert(0, {"role": "system", "content": text})
        return told, None

    def calls(self, text: str) -> tuple[str, list[Call]]:
        """What the model wrote beside its calls, and these; only of tools that there are."""
        found = [call for part in _CALL.findall(text) for call in self._parsed(part)]
        if found:
            return _CALL.sub("", text).strip(), found
        whole = self._parsed(text.strip())
        return ("", whole) if whole else (text, [])

    def _parsed(self, text: str) -> list[Call]:
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            return []
        entries = found if isinstance(found, list) else [found]
        calls = [call for entry in entries if (call := _call(entry)) and call.name in self.names]
        return calls if len(calls) == len(entries) else []


def checked_tools(tools: Sequence[Mapping[str, Any]], choice: Any) -> Tools | None:
    """The tools of a request as OpenAI's clients give them; None where none may be called.

    Raises InvalidArgument for what is no tool, and a choice that there is not.
    """
    if len(tools) > _MOST:
        raise InvalidArgument(f"there are at most {_MOST} tools; found {len(tools)}")
    for index, tool in enumerate(tools):
        function = tool.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if tool.get("type") != "function" or not isinstance(name, str) or not _NAME.fullmatch(name):
            raise InvalidArgument(
                f"tools[{index}] must be a function, its name of letters, digits, '_', '.' and '-'"
            )
    if isinstance(choice, Mapping):
        function = choice.get("function", choice)
        choice = function.get("name") if isinstance(function, Mapping) else None
    made = Tools(tools, choice or "auto")
    if made.choice == "none" or (not tools and made.choice == "auto"):
        return None
    if made.choice not in ("auto", "required", *made.names) or not tools:
        raise InvalidArgument(f"tool_choice: there is no such tool; there are {made.names}")
    return made


def _schema_of(function: Mapping[str, Any]) -> dict[str, Any]:
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, "arguments": parameters},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _call(entry: Any) -> Call | None:
    """Hermes and Mistral say "arguments", Llama "parameters"."""
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        return None
    arguments = entry.get("arguments", entry.get("parameters", {}))
    if isinstance(arguments, str):
        return Call(entry["name"], arguments)
    return Call(entry["name"], json.dumps(arguments, ensure_ascii=False))


def _known_to_template(codec: TextCodec) -> bool:
    """Whether what it writes depends on the tools that it is given."""
    tool = {"type": "function", "function": {"name": "kvkeeptool", "parameters": {}}}
    try:
        return "kvkeeptool" in codec.chat([{"role": "user", "content": "a"}], tools=[tool])
    except InvalidArgument:
        return False


def _told(tools: Sequence[Mapping[str, Any]]) -> str:
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    form = '<tool_call>\n{"name": <name>, "arguments": <object>}\n</tool_call>'
    return f"You may call these functions:\n{listed}\n\nTo call one, answer:\n{form}"


def _without_tools(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message for a template that knows neither calls nor their results."""
    made = {key: message[key] for key in ("role", "content") if key in message}
    if message.get("role") == "tool":
        return {"role": "user", "content": f"<tool_response>\n{made['content']}\n</tool_response>"}
    calls = []
    for call in message.get("tool_calls") or ():
        function = call.get("function", {}) if isinstance(call, Mapping) else {}
        arguments = function.get("arguments", "{}")
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        calls.append(
            f'{OPENING}\n{{"name": {json.dumps(function.get("name"))}, "arguments": {text}}}\n'
            "</tool_call>"
        )
    if calls:
        made["content"] = "\n".join([*filter(None, [made.get("content")]), *calls])
    return made

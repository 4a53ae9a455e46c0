"""Grammars of calls of tools: which calls they allow, and calls as JSON."""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvkeep.chat.messages import Tool
from kvkeep.chat.rendered_calls import RenderedCall
from kvkeep.server.grammar import moved_schema
from kvkeep.server.lark_rules import (
    LarkRules,
    compact_json,
    either,
    literal,
    spaced_json,
)


@dataclass(frozen=True)
class AllowedCalls:
    """The calls that a grammar allows. bare_names: of the tools whose calls may be bare JSON."""

    rules: LarkRules
    tools: Sequence[Tool]
    bare_names: Collection[str] = ()

    def each(self, write: Callable[[Tool], str]) -> str:
        """Return the alternatives of the tools."""
        return "(" + either(map(write, self.tools)) + ")"

    def repeated(self, write: Callable[[Tool], str], between: str = "") -> str:
        return self.rules.repeated(self.each(write), between)


def call_schema(
    tools: Sequence[Tool],
    arguments_key: str = "arguments",
    name_key: str = "name",
    first: Mapping[str, Any] | None = None,
    last: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the JSON schema of a call: an object with a tool's name and its arguments.

    first: properties before these. last: properties that may be behind them.
    """
    call_schemas = [
        {
            "type": "object",
            "properties": {
                **(first or {}),
                name_key: {"const": tool.name},
                arguments_key: moved_schema(
                    object_schema(tool), f"#/anyOf/{index}/properties/{arguments_key}"
                ),
                **(last or {}),
            },
            "required": [*(first or ()), name_key, arguments_key],
            "additionalProperties": False,
        }
        for index, tool in enumerate(tools)
    ]
    return {"anyOf": call_schemas}


def forced_call_schema(tools: Sequence[Tool]) -> dict[str, Any]:
    """Return the JSON schema of a forced call: bare JSON with a name and arguments."""
    return call_schema(tools)


def write_rendered_call(form: RenderedCall, rules: LarkRules, tools: Sequence[Tool]) -> str:
    """Return the expression of one call in the bytes in which the chat template writes it."""
    write_json = spaced_json if form.separators == "spaced" else compact_json
    end = [rules.template_text(form.after)]
    if form.end is not None:
        end += ["/[a-zA-Z0-9]{9}/", rules.template_text(form.end)]

    def write(tool: Tool) -> str:
        name = json.dumps(tool.name, ensure_ascii=False)[1:-1]
        beginning = rules.template_text(form.before), literal(name)
        parts = *beginning, rules.template_text(form.between), write_json(object_schema(tool))
        return rules.add(" ".join(filter(None, (*parts, *end))))

    return either(map(write, tools))


def object_schema(tool: Tool) -> Mapping[str, Any]:
    return {**tool.parameters, "type": "object"}

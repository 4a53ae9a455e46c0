"""Tools as functions of OpenAI's API, and the canonical order of the keys of their schemas.

An object of JSON has no order. Some clients keep schemas in hash maps, and send the same tools in
another order with each process. Without one order of ours, such a tool would change the prompt from
there on.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from kvkeep.chat.messages import Tool

# The order in which most schemas are written, and so the one that models know. Others follow by
# name.
_KEYWORDS = (
    *("$schema", "$id", "$ref", "title", "type", "description", "enum", "const", "default"),
    *("format", "pattern", "minLength", "maxLength", "minimum", "maximum", "items", "properties"),
    *("required", "additionalProperties", "anyOf", "oneOf", "allOf"),
)
_RANKS = {keyword: rank for rank, keyword in enumerate(_KEYWORDS)}
_SCHEMA_MAPS = ("$defs", "definitions", "dependentSchemas", "patternProperties")  # by name
_VALUES = ("const", "default", "enum", "example", "examples")  # values, and no schemas


def function_fields(tool: Tool) -> dict[str, object]:
    """Return a tool as a function of OpenAI's API."""
    return {"name": tool.name, "description": tool.description, "parameters": tool.parameters}


def tool_line(tool: Tool) -> str:
    """Return a tool's definition as a line of JSON."""
    return json.dumps(function_fields(tool), ensure_ascii=False)


def tool_function(tool: Tool, in_full: bool) -> dict[str, Any]:
    """Return a tool as chat templates take it. in_full: see `_in_full`."""
    fields = function_fields(tool)
    if in_full:
        fields["parameters"] = _in_full(tool.parameters)
    return {"type": "function", "function": fields}


def tools_text(tools: Iterable[Tool]) -> str:
    """Return a JSON list of tools, for templates that take it in the system message."""
    return json.dumps([function_fields(tool) for tool in tools], ensure_ascii=False)


def _in_full(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an equal schema that states each property's description, and what objects hold."""
    properties = schema.get("properties")
    if not isinstance(properties, Mapping):
        return schema
    stated = dict(properties)
    for name, value in properties.items():
        if isinstance(value, Mapping):
            described = {**_in_full(value), "description": value.get("description") or ""}
            is_object = value.get("type") == "object"
            stated[name] = {"additionalProperties": {}, **described} if is_object else described
    return {**schema, "properties": stated}


def canonical_schema(schema: Any) -> Any:
    """Return an equal JSON schema whose keys are in canonical order.

    Properties that are required come first, in the order of `required`, which is a list and so the
    author's. The others follow by name.
    """
    if isinstance(schema, list):
        return list(map(canonical_schema, schema))
    if not isinstance(schema, Mapping):
        return schema
    keys = sorted(schema, key=lambda key: (_RANKS.get(key, len(_RANKS)), key))
    return {key: _canonical_member(key, schema) for key in keys}


def _canonical_member(key: str, schema: Mapping[str, Any]) -> Any:
    value = schema[key]
    if key in _VALUES:
        return _sorted_value(value)
    if key == "properties" and isinstance(value, Mapping):
        required = schema.get("required")
        names = required if isinstance(required, list) else []
        first = [name for name in names if isinstance(name, str)]
        order = dict.fromkeys(name for name in (*first, *sorted(value)) if name in value)
        return {name: canonical_schema(value[name]) for name in order}
    if key in _SCHEMA_MAPS and isinstance(value, Mapping):
        return {name: canonical_schema(value[name]) for name in sorted(value)}
    return canonical_schema(value)


def _sorted_value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _sorted_value(value[key]) for key in sorted(value)}
    return list(map(_sorted_value, value)) if isinstance(value, list) else value

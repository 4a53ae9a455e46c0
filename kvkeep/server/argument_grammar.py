"""Grammars of a call's arguments in forms other than JSON, by the tool's schema.

Each known argument comes at most once, in the order of the schema, and with a value of one of its
types. What is inside of arrays and objects is free.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from kvkeep.chat.messages import Tool
from kvkeep.chat.tagged_calls import referenced, value_types
from kvkeep.server.lark_rules import LarkRules, either, json_value, literal

_DEFINITIONS = ("$defs", "definitions")
_TYPES = ("string", "number", "boolean", "null", "array", "object")
_INTEGER = "-?(0|[1-9][0-9]{0,39})"
_NUMBER = rf"/{_INTEGER}(\.[0-9]{{1,40}})?([eE][+-]?[0-9]{{1,2}})?/"
_FREE_KEY = r"/[A-Za-z_][A-Za-z0-9_]{0,60}/"


@dataclass(frozen=True)
class ValueSyntax:
    """A syntax of values. string: an expression; text: that of one string."""

    string: str
    text: Callable[[str], str]
    key: str
    true: str = "true"
    false: str = "false"
    null: str = "null"
    comma: str = "/, ?/"
    colon: str = "/: ?/"

    def scalar(self, value: str | float | bool | None) -> str:
        """Return the expression of one value that is neither a list nor an object."""
        if isinstance(value, str):
            return self.text(value)
        if value is None:
            return literal(self.null)
        if isinstance(value, bool):
            return literal(self.true if value else self.false)
        return literal(json.dumps(value))


def python_syntax() -> ValueSyntax:
    """Return the syntax of Python's literals."""
    string = r"""/"([^"\\\n]|\\[^xuU\n])*"/ | /'([^'\\\n]|\\[^xuU\n])*'/"""
    words = {"true": "True", "false": "False", "null": "None"}
    return ValueSyntax(
        string, lambda text: f"{literal(literal(text))} | {literal(repr(text))}", string, **words
    )


def quoted_syntax(rules: LarkRules, quote: str) -> ValueSyntax:
    """Return Gemma's syntax: a marker around texts, none around keys."""
    marker = rules.marker(quote)
    return ValueSyntax(
        f"{marker} {rules.text_up_to(quote)}",
        lambda text: f"{marker} {literal(text)} {marker}",
        r"/[^:,{}\[\]<>\"\s]{1,100}/",
        comma='","',
        colon='":"',
    )


def named_arguments(rules: LarkRules, tool: Tool, syntax: ValueSyntax, equals: str) -> str:
    """Return `key=value` for the arguments, with commas. Needs the rules of `define_values`."""
    if not _has_properties(tool):
        item = rules.add(f'{_FREE_KEY} "{equals}" value')
        return f"({item} ({syntax.comma} {item})*)?"
    items = []
    for key, schema, is_required in _properties(tool):
        values = list(map(syntax.scalar, _choices(schema, tool.parameters)))
        types = sorted(value_types(tool, key) & frozenset(_TYPES))
        rules_of_types = {name: f"value_{name}" for name in types}
        if "number" in types and not _has_fractions(schema):
            rules_of_types["number"] = f"/{_INTEGER}/"
        values = values or list(rules_of_types.values()) or ["value"]
        items.append((f"{literal(key + equals)} ({either(values)})", is_required))
    return rules.separated(items, syntax.comma) if items else ""


def define_values(rules: LarkRules, syntax: ValueSyntax) -> None:
    """Define the rules of values."""
    comma, pair = syntax.comma, f"({syntax.key}) {syntax.colon} value"
    rules.define("value", either(f"value_{name}" for name in _TYPES))
    rules.define("value_string", syntax.string)
    rules.define("value_number", _NUMBER)
    rules.define("value_boolean", f"{literal(syntax.true)} | {literal(syntax.false)}")
    rules.define("value_null", literal(syntax.null))
    rules.define("value_array", f'"[" (value ({comma} value)*)? "]"')
    rules.define("value_object", f'"{{" ({pair} ({comma} {pair})*)? "}}"')


def tagged_arguments(
    rules: LarkRules, tool: Tool, begin: Callable[[str], str], end: str, behind: str = ""
) -> str:
    """Return values between tags, one after another.

    begin: returns what is before the value of a key, in an expression. end: a marker, or a text
    that is not in values. behind: an expression.
    """
    if not _has_properties(tool):
        return f"({begin('')} {rules.text_up_to(end)} {behind})*"
    items = []
    for key, schema, is_required in _properties(tool):
        types = value_types(tool, key)
        choices = _choices(schema, tool.parameters)
        if any(isinstance(choice, str) for choice in choices):
            texts = (c if isinstance(c, str) else json.dumps(c) for c in choices)
            value = f"({either(map(literal, texts))}) {rules.marker(end)}"
        elif not types or "string" in types:
            value = rules.text_up_to(end)
        else:
            definitions = {
                name: tool.parameters[name] for name in _DEFINITIONS if name in tool.parameters
            }
            value = f"{json_value({**definitions, **schema})} {rules.marker(end)}"
        item = f"{begin(key)} {value} {behind}"
        items.append(item if is_required else f"({item})?")
    return " ".join(items)


def _has_properties(tool: Tool) -> bool:
    return isinstance(tool.parameters.get("properties"), Mapping)


def _properties(tool: Tool) -> Iterator[tuple[str, Mapping[str, Any], bool]]:
    """Yield key, schema and whether it is required, for each property."""
    required = tool.parameters.get("required")
    for key, schema in tool.parameters["properties"].items():
        is_required = isinstance(required, list) and key in required
        yield key, schema if isinstance(schema, Mapping) else {}, is_required


def _choices(
    schema: Any, root: Mapping[str, Any], known: dict[str, list[Any]] | None = None
) -> list[Any]:
    """Return the allowed values, if they are stated and none is a list or an object.

    root: the schema that `$ref` refers to. known: those of references that were followed.
    """
    known = {} if known is None else known
    if not isinstance(schema, Mapping):
        return []
    if isinstance(reference := schema.get("$ref"), str) and reference.startswith("#/"):
        if reference not in known:
            known[reference] = []  # a reference to itself
            known[reference] = _choices(referenced(reference, root), root, known)
        return known[reference]
    for keyword in ("anyOf", "oneOf", "allOf"):
        parts = schema.get(keyword)
        if isinstance(parts, list) and (keyword != "allOf" or len(parts) == 1):
            alternatives = [_choices(part, root, known) for part in parts]
            distinct = {(type(value), value): value for value in chain(*alternatives)}
            return list(distinct.values()) if all(alternatives) else []
    if schema.get("type") == "null":
        return [None]
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list):
        return []
    is_scalars = not any(isinstance(value, list | Mapping) for value in values)
    return values if is_scalars else []


def _has_fractions(schema: Any) -> bool:
    """Whether a number by the schema may be no integer."""
    if not isinstance(schema, Mapping):
        return True
    types = schema.get("type")
    if isinstance(types, str | list):
        names = [types] if isinstance(types, str) else types
        return "number" in names or "integer" not in names
    parts = schema.get("anyOf") or schema.get("oneOf")
    if not isinstance(parts, list):
        return True
    return any(map(_has_fractions, (part for part in parts if part != {"type": "null"})))

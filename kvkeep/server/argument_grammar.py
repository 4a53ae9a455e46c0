"""Grammars of a call's arguments in forms other than JSON, by the tool's schema.

Each known argument comes at most once, in the order of the schema, and with a value of one of its
types. What is inside of arrays and objects is free.
"""

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvkeep.chat.gemma_calls import GEMMA_KEY
from kvkeep.chat.messages import Tool
from kvkeep.chat.python_calls import PYTHON_KEY
from kvkeep.chat.scanner import SPACE
from kvkeep.chat.schema_references import References, stated_types
from kvkeep.chat.tagged_calls import LABEL, types_of
from kvkeep.errors import InvalidArgument
from kvkeep.server.lark_rules import LarkRules, either, json_value, literal
from kvkeep.server.resolved_schemas import with_definitions

_TYPES = ("string", "number", "boolean", "null", "array", "object")
_INTEGER = "-?(0|[1-9][0-9]{0,39})"
_NUMBER = rf"/{_INTEGER}(\.[0-9]{{1,40}})?([eE][+-]?[0-9]{{1,2}})?/"
_SCALARS = {
    "boolean": '"true" | "false"',
    "integer": f"/{_INTEGER}/",
    "null": '"null"',
    "number": _NUMBER,
}
# Where parameters may name properties that the forms beside JSON do not follow.
_ELSEWHERE = frozenset(("anyOf", "oneOf", "allOf", "$ref", "patternProperties"))
_FREE_KEY = r"/[A-Za-z_][A-Za-z0-9_]{0,60}/"


@dataclass(frozen=True)
class ValueSyntax:
    """A syntax of values. string: an expression; text: that of one string.

    key: an expression of the keys of objects. name: the keys of arguments that can be read.
    """

    string: str
    text: Callable[[str], str]
    key: str
    name: re.Pattern[str]
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
        string,
        lambda text: f"{literal(literal(text))} | {literal(repr(text))}",
        string,
        PYTHON_KEY,
        **words,
    )


def quoted_syntax(rules: LarkRules, quote: str) -> ValueSyntax:
    """Return Gemma's syntax: a marker around texts, none around keys."""
    marker = rules.marker(quote)
    return ValueSyntax(
        f"{marker} {rules.text_up_to(quote)}",
        lambda text: f"{marker} {literal(text)} {marker}",
        r"/[^:,{}\[\]<>\"\s]{1,100}/",
        re.compile(rf'(?!"|{re.escape(quote)}){GEMMA_KEY.pattern}'),
        comma='","',
        colon='":"',
    )


def named_arguments(rules: LarkRules, tool: Tool, syntax: ValueSyntax, equals: str) -> str:
    """Return `key=value` for the arguments, with commas. Needs the rules of `define_values`.

    Raises InvalidArgument for parameters that cannot be followed.
    """
    arguments = arguments_of(tool, syntax.name)
    if arguments is None:
        item = rules.add(f'{_FREE_KEY} "{equals}" value')
        return f"({item} ({syntax.comma} {item})*)?"
    items = []
    for key, schema, is_required in arguments.each():
        values = list(map(syntax.scalar, arguments.choices(schema)))
        types = sorted(types_of(arguments.references, schema) & frozenset(_TYPES))
        rules_of_types = {name: f"value_{name}" for name in types}
        if "number" in types and not arguments.has_fractions(schema):
            rules_of_types["number"] = f"/{_INTEGER}/"
        values = values or list(rules_of_types.values()) or ["value"]
        value = rules.add_once(either(values))
        items.append((f"{literal(key + equals)} {value}", is_required))
    return rules.separated(items, syntax.comma) if items else ""


def can_be_written(tool: Tool, syntax: ValueSyntax) -> bool:
    """Whether `named_arguments` can follow a tool's parameters."""
    try:
        arguments_of(tool, syntax.name)
    except InvalidArgument:
        return False
    return True


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
    rules: LarkRules,
    tool: Tool,
    begin: Callable[[str], str],
    end: str,
    behind: str = "",
    name: re.Pattern[str] = LABEL,
) -> str:
    """Return values between tags, one after another.

    begin: returns what is before the value of a key, in an expression. end: a marker, or a text
    that is not in values. behind: an expression. name: the keys that can be read. Raises
    InvalidArgument for parameters that cannot be followed.
    """
    arguments = arguments_of(tool, name)
    if arguments is None:
        return f"({begin('')} {rules.text_up_to(end)} {behind})*"
    items, free_text, values = [], rules.text_up_to(end), dict[str, str]()
    for key, schema, is_required in arguments.each():
        schema_json = json.dumps(schema)
        if schema_json not in values:
            value = arguments.tagged_value(schema)
            values[schema_json] = f"{rules.add_once(value)} {rules.marker(end)}" if value else ""
        item = f"{begin(key)} {values[schema_json] or free_text} {behind}"
        items.append(rules.add(item) if is_required else f"{rules.add(item)}?")
    return " ".join(items)


@dataclass(frozen=True)
class _Arguments:
    """The arguments of a tool, by its prepared parameters."""

    references: References
    schemas: Mapping[str, Any]
    required: Collection[str]
    definitions: Mapping[str, Any]

    def each(self) -> Iterator[tuple[str, Any, bool]]:
        """Yield key, schema and whether it is required, for each argument."""
        for key in dict.fromkeys((*self.schemas, *sorted(self.required))):
            yield key, self.schemas.get(key, {}), key in self.required

    def tagged_value(self, schema: Any) -> str:
        """Return the expression of a value between tags; empty for any text."""
        choices, types = self.choices(schema), types_of(self.references, schema)
        if any(isinstance(choice, str) for choice in choices):
            texts = (c if isinstance(c, str) else json.dumps(c) for c in choices)
            return either(map(literal, texts))
        if not types or "string" in types:
            return ""
        scalars = self._bare_types(schema)
        if scalars <= _SCALARS.keys():
            return either(_SCALARS[name] for name in sorted(scalars))
        return json_value(with_definitions(schema, self.definitions))

    def choices(self, schema: Any) -> list[Any]:
        """Return the allowed values, if they are stated and none is a list or an object."""
        result = dict[tuple[type, Any], Any]()
        for part in self.references.alternatives(schema, to_types=False):
            values = _stated_values(part) if isinstance(part, Mapping) else []
            if not values or any(isinstance(value, list | Mapping) for value in values):
                return []
            result.update(((type(value), value), value) for value in values)
        return list(result.values())

    def has_fractions(self, schema: Any) -> bool:
        """Whether a number by the schema may be no integer."""
        parts = list(self.references.alternatives(schema, to_types=True))
        return not all(isinstance(p, Mapping) and _integers_only(p) for p in parts)

    def _bare_types(self, schema: Any) -> set[str]:
        """Return the types of a value of which nothing else is stated; otherwise {""}."""
        result, pending, passed = set[str](), [schema], set[int]()
        while pending:
            part = pending.pop()
            if id(part) in passed:
                continue
            passed.add(id(part))
            (key, *others) = part if isinstance(part, Mapping) and part else ("",)
            if others or key not in ("type", "$ref", "anyOf", "oneOf"):
                return {""}
            if key == "type":
                result.update(stated_types(part))
            else:
                pending += [self.references.target(part)] if key == "$ref" else part[key]
        return result


def arguments_of(tool: Tool, name: re.Pattern[str]) -> _Arguments | None:
    """Return the arguments of a tool; None if it names none.

    name: the keys that can be read. Raises InvalidArgument for other keys, and for parameters that
    name their properties somewhere else than at the top.
    """
    parameters = tool.parameters
    references = References(parameters)
    schemas, required = references.arguments()
    for key in (*schemas, *required):
        if not key or not name.fullmatch(key) or key.strip(SPACE) != key:
            raise InvalidArgument(f"calls in the model's form cannot have the name {key[:100]!r}")
    if not (schemas or required or parameters.get("additionalProperties") is False):
        if not _ELSEWHERE.isdisjoint(parameters):
            raise InvalidArgument("they do not name their properties at the top")
        if "properties" not in parameters:
            return None
    return _Arguments(references, schemas, required, parameters.get("$defs", {}))


def _stated_values(schema: Mapping[str, Any]) -> list[Any]:
    if schema.get("type") == "null":
        return [None]
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) else []


def _integers_only(schema: Mapping[str, Any]) -> bool:
    types = stated_types(schema)
    return bool(types) and "number" not in types

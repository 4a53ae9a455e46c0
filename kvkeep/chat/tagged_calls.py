"""Calls whose arguments are tagged texts: those of Qwen3-Coder, MiniMax M2 and GLM.

A value's tags do not tell its type: the tool's schema does.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvkeep.chat.json_calls import stream_object
from kvkeep.chat.json_text import JsonText
from kvkeep.chat.messages import Tool
from kvkeep.chat.output import CallArguments
from kvkeep.chat.python_calls import json_string_part, read_python_value
from kvkeep.chat.reading import AnswerReading, NotACall, Steps
from kvkeep.chat.scanner import SPACE, Scanner
from kvkeep.chat.schema_references import References, stated_types

_KEY, _KEY_END, _VALUE, _VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
GLM_MARKERS = (_KEY, _KEY_END, _VALUE, _VALUE_END)
LABEL = re.compile(r"[^<>\n\ud800-\udfff]{0,256}")
_QUOTED_LABEL = re.compile(r'[^"<>\n\ud800-\udfff]{0,256}')


@dataclass(frozen=True)
class FunctionTags:
    """The tags of a call, in front of its name and of each parameter's, and behind these.

    close: the text behind a name. newline: left out at both ends of a value. kind: see
    `AnswerReading.name_begins`.
    """

    function: str
    function_end: str
    parameter: str
    parameter_end: str = "</parameter>"
    close: str = ">"
    label: re.Pattern[str] = LABEL
    newline: str = "\n"
    kind: str = "function"


FUNCTION_TAGS = FunctionTags("<function=", "</function>", "<parameter=")
SEED_TAGS = replace(FUNCTION_TAGS, newline="", kind="seed")  # values have no lines of their own
INVOKE_TAGS = FunctionTags(
    *('<invoke name="', "</invoke>", '<parameter name="'),
    close='">',
    label=_QUOTED_LABEL,
    newline="",
    kind="invoke",
)
FUNCTION = FUNCTION_TAGS.function
_JSON_TYPES: Mapping[type, str] = {
    str: "string",
    bool: "boolean",
    int: "number",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}
_TYPES_BY_CHAR = {
    '"': "string",
    "[": "array",
    "{": "object",
    "t": "boolean",
    "f": "boolean",
    "n": "null",
}
_MAX_SPACE = 1000  # characters between an end tag and what follows it


def read_function_tag(
    reading: AnswerReading, end: str, tags: FunctionTags = FUNCTION_TAGS, in_block: bool = True
) -> Steps[None]:
    """Read `name>`, `<parameter=key>value</parameter>` for each argument, and `</function>`.

    The arguments may be JSON instead. end: the marker behind the function. in_block: whether a
    marker of a block of calls was before it. A name that something else follows begins no call.
    """
    reading.name_begins(tags.kind if in_block else "bare function")
    name = yield from begin_function_tag(reading, tags, end if in_block else None)
    tool = reading.require_tool(name)
    if (yield from reading.skip_space()) == "{":
        yield reading.start_call(name)
        yield from stream_object(reading, (tags.function_end, end))
        yield from reading.skip_space()
        yield from reading.take(tags.function_end)
        reading.scanner.mark()
        return
    yield reading.start_call(name)
    opening, is_whole, types = "{", False, ArgumentTypes(tool)
    while (yield from reading.skip_space()):
        marker = yield from reading.take(tags.parameter, tags.function_end)
        if marker != tags.parameter:
            is_cut_off = tags.parameter.startswith(reading.scanner.rest)
            is_whole = marker is not None or not is_cut_off
            break
        key = (yield from reading.take_match(tags.label)).strip(SPACE)
        yield from reading.take(tags.close)
        yield reading.arguments(f"{opening}{json.dumps(key, ensure_ascii=False)}: ")
        opening = ", "
        followers = (tags.parameter, tags.function_end, end)
        yield from _read_value(reading, types.of(key), tags.parameter_end, followers, tags.newline)
    yield from _end_object(reading, opening, is_whole)


def begin_function_tag(
    reading: AnswerReading, tags: FunctionTags = FUNCTION_TAGS, block_end: str | None = None
) -> Steps[str]:
    """Read `name>` and the space behind it. Returns the name.

    Raises NotACall unless it names a tool, and JSON, a parameter or the end of the function comes
    next. In a block of calls its end may come too, or that of the answer. block_end: None outside.
    """
    name = (yield from reading.take_match(tags.label)).strip(SPACE)
    yield from reading.expect(tags.close)
    reading.require_tool(name)
    yield from reading.skip_space()
    followers = ["{", tags.parameter, tags.function_end]
    if block_end is not None:
        followers.append(block_end)
    if not (yield from reading.comes_next(*followers)):
        is_cut_off = any(text.startswith(reading.scanner.rest) for text in followers)
        if block_end is None or not is_cut_off:
            raise NotACall
    return name


def read_glm_call(reading: AnswerReading, end: str) -> Steps[None]:
    """Read `name` and `<arg_key>key</arg_key><arg_value>value</arg_value>` for each argument.

    end: the marker behind the call, which is not read.
    """
    reading.name_begins("glm")
    name = (yield from reading.take_match(LABEL)).strip(SPACE)
    tool = reading.require_tool(name)
    at_end = not (yield from reading.skip_space())
    if not (at_end or (yield from reading.comes_next(_KEY, end))):
        raise NotACall
    yield reading.start_call(name)
    opening, types = "{", ArgumentTypes(tool)
    while (yield from reading.skip_space()) and (yield from reading.take(_KEY)):
        key = (yield from reading.take_match(LABEL)).strip(SPACE)
        yield from reading.take(_KEY_END)
        yield from reading.skip_space()
        yield from reading.take(_VALUE)
        yield reading.arguments(f"{opening}{json.dumps(key, ensure_ascii=False)}: ")
        opening = ", "
        yield from _read_value(reading, types.of(key), _VALUE_END, (_KEY, end))
    yield from _end_object(reading, opening, is_whole=bool(reading.scanner.rest))


def _end_object(reading: AnswerReading, opening: str, is_whole: bool) -> Steps[None]:
    if is_whole:
        yield reading.arguments("{}" if opening == "{" else "}")
    yield reading.end_call(complete=is_whole)


def _read_value(
    reading: AnswerReading,
    types: frozenset[str],
    end: str,
    followers: tuple[str, ...],
    newline: str = "",
) -> Steps[None]:
    """Read a value up to its end tag, and yield it as JSON.

    types: that the value may have; empty if unknown. followers: an end tag before anything else is
    part of the value. newline: left out at both ends, if it is there.
    """
    if newline:
        yield from reading.take(newline)
    is_text, parts = types == {"string"}, []
    if is_text:
        yield reading.arguments('"')
    while True:
        length, end_length = _value_length(reading, end, followers, newline)
        text = reading.scanner.plain(reading.scanner.advance(length))
        if text and is_text:
            yield reading.arguments(json_string_part(text))
        parts.append(text)
        if end_length:
            reading.scanner.advance(end_length)
            break
        if not (yield from reading.more()):
            if not is_text:
                yield reading.arguments("".join(parts))
            return
    yield reading.arguments('"' if is_text else _typed_value("".join(parts), types))


def _value_length(
    reading: AnswerReading, end: str, followers: tuple[str, ...], newline: str
) -> tuple[int, int]:
    """Return the certain length of a value at the start of the rest, and of the end behind it.

    The latter is 0 if the end is not found.
    """
    scanner = reading.scanner
    follower_forms = [form for marker in followers for form in scanner.forms(marker)]
    start = 0
    while True:
        found = [
            (place, form)
            for form in scanner.forms(end)
            if (place := scanner.rest.find(form, start)) >= 0
        ]
        if not found:
            break
        place, form = min(found)
        before = place - (scanner.rest[:place].endswith(newline) and len(newline))
        following = scanner.rest[place + len(form) :]
        behind = following.lstrip(SPACE)
        if len(following) - len(behind) > _MAX_SPACE:
            start = place + 1
            continue
        if behind.startswith(tuple(follower_forms)) or (scanner.closed and not behind):
            return before, place + len(form) - before
        if not scanner.closed and any(form.startswith(behind) for form in follower_forms):
            return before, 0  # what follows may come
        start = place + 1
    length = scanner.certain_length((end,))
    if not scanner.closed and scanner.rest[:length].endswith(newline):
        length -= len(newline)
    return length, 0


def _typed_value(text: str, types: frozenset[str]) -> str:
    """Return a value as JSON: of one of the types if it can be, otherwise text."""
    value = JsonText()
    stripped = text.strip(SPACE)
    length, json_text = value.push(stripped + " ")
    if value.done and length >= len(stripped):
        value_type = _TYPES_BY_CHAR.get(json_text.strip(SPACE)[0], "number")
        if value_type != "string" and (not types or value_type in types):
            return json_text.strip(SPACE)
        if value_type == "string" and types and "string" not in types:
            return json_text.strip(SPACE)
    if types and "string" not in types and (literal := _python_literal(stripped)):
        literal_type = _TYPES_BY_CHAR.get(literal[0])
        if literal_type in types & {"array", "object"}:
            return literal
    return json.dumps(text, ensure_ascii=False)


def _python_literal(text: str) -> str | None:
    """Return a Python literal as JSON, such as `{'a': None}`; None for other texts."""
    scanner = Scanner((), ())
    scanner.append([text])
    scanner.closed = True
    reading, parts = AnswerReading(scanner, (), str), list[str]()
    try:
        for event in read_python_value(reading):
            assert isinstance(event, CallArguments)
            parts.append(event.delta)
    except NotACall:
        return None
    return None if scanner.rest.strip(SPACE) else "".join(parts)


class ArgumentTypes:
    """The JSON types of the arguments of a call, by the tool's schema. Integers are numbers."""

    def __init__(self, tool: Tool):
        self._references = References(tool.parameters)
        self._schemas, _ = self._references.arguments()

    def of(self, key: str) -> frozenset[str]:
        """Return the types that an argument may have; empty if unknown."""
        return types_of(self._references, self._schemas.get(key))


def types_of(references: References, schema: Any) -> frozenset[str]:
    """Return the JSON types of the values of a part of a schema; empty if unknown."""
    result = set[str]()
    for part in references.alternatives(schema, to_types=True):
        types = _stated_types(part) if isinstance(part, Mapping) else None
        if not types:
            return frozenset()
        result |= types
    return frozenset(result)


def _stated_types(schema: Mapping[str, Any]) -> frozenset[str]:
    if isinstance(schema.get("type"), (str, list)):
        names = stated_types(schema)
        return frozenset("number" if name == "integer" else name for name in names)
    values = schema["enum"] if isinstance(schema.get("enum"), list) else []
    values = [*values, *([schema["const"]] if "const" in schema else [])]
    return frozenset(_JSON_TYPES.get(type(value), "") for value in values)

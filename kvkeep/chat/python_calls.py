"""Calls written as in Python: `name(key="text", other=[1, True])`."""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from kvkeep.chat.json_text import JsonText
from kvkeep.chat.messages import ToolCall
from kvkeep.chat.reading import AnswerReading, NotACall, Steps, tool_name
from kvkeep.chat.schema_references import argument_schemas

_NAME = re.compile(r"[A-Za-z_][\w.-]{0,255}")
PYTHON_KEY = re.compile(r"[A-Za-z_]\w{0,255}")
_SCALAR = re.compile(r"[^\s,:\[\]{}()\"'\ud800-\udfff]{0,400}")
_STRING_RUN = re.compile(r"[^\"'\\\ud800-\udfff]+")
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{0,2}|u[0-9a-fA-F]{0,4}|U[0-9a-fA-F]{0,8}|[^xuU])?", re.S)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": "", "0": "\0"}
_MAX_DEPTH = 100
_CLOSING = {"[": "]", "(": ")", "{": "}"}


def read_python_calls(reading: AnswerReading) -> Steps[None]:
    """Read calls, one after another, up to what is none. They may stand in a list or `print`.

    Raises NotACall before the first begins.
    """
    calls_before, brackets = reading.call_count, 0
    while True:
        while (yield from reading.skip_space()) in ("[", ","):
            brackets += (yield from reading.take("[", ",")) == "["
        try:
            brackets += yield from _read_call(reading)
        except NotACall:
            if reading.call_count == calls_before:
                raise
            break
        while brackets and (yield from reading.skip_space()) in (")", "]"):
            yield from reading.take(")", "]")
            brackets -= 1
        reading.scanner.mark()


def _read_call(reading: AnswerReading) -> Steps[int]:
    """Read a call. Returns 1 if it is printed, and so one more bracket ends it."""
    reading.name_begins("python")
    name = yield from reading.take_match(_NAME)
    yield from reading.expect("(")
    printed = name == "print" and name not in reading.tools
    if printed:
        yield from reading.skip_space()
        reading.name_begins("python")
        name = yield from reading.take_match(_NAME)
        yield from reading.expect("(")
    if tool_name(name, reading.tools) is None:
        name = name.removesuffix(".call")  # as Llama 3 calls its own tools
    positional = iter(argument_schemas(reading.require_tool(name)))
    yield reading.start_call(name)
    opening = "{"
    try:
        while (yield from reading.skip_space()) != ")":
            key = yield from reading.take_match(PYTHON_KEY)
            yield from reading.skip_space()
            value = ""
            if key and not (yield from reading.take("=")):
                key, value = "", key  # such as `True`: the value of the next parameter
            yield reading.arguments(f"{opening}{json.dumps(key or next(positional, ''))}: ")
            opening = ", "
            if value:
                yield from _read_scalar(reading, value)
            else:
                yield from read_python_value(reading)
            if (yield from reading.skip_space()) != ")":
                yield from reading.expect(",")
        yield from reading.expect(")")
    except NotACall:
        yield reading.end_call(complete=False)
        return int(printed)
    yield reading.arguments("{}" if opening == "{" else "}")
    yield reading.end_call()
    return int(printed)


def read_python_value(reading: AnswerReading, depth: int = 0) -> Steps[None]:
    """Read a Python or JSON literal and yield it as JSON. Raises NotACall for what is none."""
    char = yield from reading.skip_space()
    if char in ('"', "'"):
        yield from _read_string(reading)
    elif char in _CLOSING and depth < _MAX_DEPTH:
        yield from _read_items(reading, char, depth)
    else:
        yield from _read_scalar(reading, (yield from reading.take_match(_SCALAR)))


def _read_items(reading: AnswerReading, bracket: str, depth: int) -> Steps[None]:
    """Read a list, tuple or dict."""
    closing, is_dict, is_first = _CLOSING[bracket], bracket == "{", True
    yield from reading.expect(bracket)
    yield reading.arguments("{" if is_dict else "[")
    while (yield from reading.skip_space()) != closing:
        if not is_first:
            yield reading.arguments(", ")
        is_first = False
        if is_dict:
            if (yield from reading.skip_space()) not in ('"', "'"):
                raise NotACall
            yield from _read_string(reading)
            yield from reading.skip_space()
            yield from reading.expect(":")
            yield reading.arguments(": ")
        yield from read_python_value(reading, depth + 1)
        if (yield from reading.skip_space()) != closing:
            yield from reading.expect(",")
    yield from reading.expect(closing)
    yield reading.arguments("}" if is_dict else "]")


def _read_string(reading: AnswerReading) -> Steps[None]:
    """Read a string in single, double or three quotes."""
    scanner = reading.scanner
    quote = yield from reading.expect('"""', "'''", '"', "'")
    yield reading.arguments('"')
    while not (yield from reading.take(quote)):
        text = scanner.advance(_run_length(scanner.rest))
        if text:
            yield reading.arguments(json_string_part(scanner.plain(text)))
        elif scanner.rest[:1] == "\\":
            yield reading.arguments(json_string_part((yield from _read_escape(reading))))
        elif scanner.rest:  # the other quote, or a control token
            yield reading.arguments(json_string_part(scanner.plain(scanner.advance(1))))
        elif not (yield from reading.more()):
            raise NotACall
    yield reading.arguments('"')


def _run_length(text: str) -> int:
    match = _STRING_RUN.match(text)
    return match.end() if match else 0


def _read_escape(reading: AnswerReading) -> Steps[str]:
    """Read an escape and return the character; text that is none stays."""
    scanner = reading.scanner
    while (match := _ESCAPE.match(scanner.rest)) and match.end() == len(scanner.rest):
        length = {"x": 4, "u": 6, "U": 10}.get(scanner.rest[1:2], 2)
        if len(match[0]) == length or not (yield from reading.more()):
            break
    escape = scanner.advance(match.end() if match else 1)[1:]
    if escape[:1] in ("x", "u", "U") and len(escape) in (3, 5, 9):
        code = int(escape[1:], 16)
        return chr(code) if code < 0x110000 and not 0xD800 <= code < 0xE000 else "\ufffd"
    if escape in _ESCAPES:
        return _ESCAPES[escape]
    return escape if escape in ("\\", "'", '"') else f"\\{escape}"


def json_string_part(text: str) -> str:
    """Return a text as it stands inside a JSON string."""
    return _json(text)[1:-1]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def write_python_calls(calls: Iterable[ToolCall]) -> str:
    """Return calls as a list, in the form that `read_python_calls` reads."""
    return f"[{', '.join(map(_call_text, calls))}]"


def write_python_lines(calls: Iterable[ToolCall]) -> str:
    """Return calls in lines, their values as JSON, which `read_python_calls` reads, too."""
    lines = []
    for call in calls:
        values = (f"{key}={_json(value)}" for key, value in call.arguments.items())
        lines.append(f"{call.name}({', '.join(values)})")
    return "\n".join(lines)


def is_python_call(call: ToolCall) -> bool:
    """Whether the name and the keys of a call can be written as names."""
    return bool(_NAME.fullmatch(call.name)) and all(map(PYTHON_KEY.fullmatch, call.arguments))


def _call_text(call: ToolCall) -> str:
    values = (f"{key}={_literal(value)}" for key, value in call.arguments.items())
    return f"{call.name}({', '.join(values)})"


def _literal(value: Any) -> str:
    """Return a value of JSON as a Python literal, with double quotes around texts."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, Mapping):
        items = (f"{_literal(key)}: {_literal(item)}" for key, item in value.items())
        return f"{{{', '.join(items)}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    return repr(value)


def _read_scalar(reading: AnswerReading, text: str) -> Steps[None]:
    """Yield a number or word as JSON. Raises NotACall behind any other text."""
    value = JsonText()
    _, json_text = value.push(text + " ")
    is_scalar = bool(text) and value.done
    yield reading.arguments(json_text.strip() if is_scalar else text)
    if not is_scalar:
        raise NotACall

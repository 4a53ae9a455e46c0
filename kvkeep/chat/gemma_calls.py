"""Calls as Gemma 4 writes them: `call:name{key:<|"|>text<|"|>,other:[1,true]}`."""

import json
import re

from kvkeep.chat.json_text import JsonText
from kvkeep.chat.python_calls import json_string_part
from kvkeep.chat.reading import AnswerReading, NotACall, Steps
from kvkeep.chat.scanner import SPACE

_NAME = re.compile(r"[\w.-]{1,256}")
GEMMA_KEY = re.compile(r"[^:,{}\[\]\ud800-\udfff]{1,256}")
_SCALAR = re.compile(r"[^,\]}\ud800-\udfff]{1,4096}")
_MAX_DEPTH = 100


def read_gemma_call(reading: AnswerReading, quote: str) -> Steps[None]:
    """Read a call. quote: the marker around texts. Raises NotACall before it begins."""
    yield from reading.skip_space()
    yield from reading.expect("call:")
    reading.name_begins("gemma")
    name = (yield from reading.take_match(_NAME)).strip(SPACE)
    reading.require_tool(name)
    if (yield from reading.skip_space()) not in ("{", ""):
        raise NotACall
    yield reading.start_call(name)
    try:
        yield from _read_object(reading, quote, 0)
    except NotACall:
        yield reading.end_call(complete=False)
    else:
        yield reading.end_call()


def begin_gemma_call(reading: AnswerReading) -> Steps[None]:
    """Read `call:name{`."""
    yield from reading.skip_space()
    yield from reading.expect("call:")
    reading.require_tool((yield from reading.take_match(_NAME)).strip(SPACE))
    yield from reading.skip_space()
    yield from reading.expect("{")


def _read_object(reading: AnswerReading, quote: str, depth: int) -> Steps[None]:
    yield from reading.expect("{")
    opening = "{"
    while (yield from reading.skip_space()) != "}":
        yield reading.arguments(opening)
        opening = ", "
        if (yield from reading.comes_next(quote, '"')):
            yield from _read_value(reading, quote, depth)
        else:
            key = yield from reading.take_match(GEMMA_KEY)
            yield reading.arguments(json.dumps(key.strip(SPACE), ensure_ascii=False))
        yield from reading.skip_space()
        yield from reading.expect(":")
        yield reading.arguments(": ")
        yield from _read_value(reading, quote, depth)
        if (yield from reading.skip_space()) != "}":
            yield from reading.expect(",")
    yield from reading.expect("}")
    yield reading.arguments("{}" if opening == "{" else "}")


def _read_array(reading: AnswerReading, quote: str, depth: int) -> Steps[None]:
    yield from reading.expect("[")
    yield reading.arguments("[")
    is_first = True
    while (yield from reading.skip_space()) != "]":
        if not is_first:
            yield reading.arguments(", ")
        is_first = False
        yield from _read_value(reading, quote, depth)
        if (yield from reading.skip_space()) != "]":
            yield from reading.expect(",")
    yield from reading.expect("]")
    yield reading.arguments("]")


def _read_value(reading: AnswerReading, quote: str, depth: int) -> Steps[None]:
    char = yield from reading.skip_space()
    if depth > _MAX_DEPTH:
        raise NotACall
    if (yield from reading.take(quote)):
        yield from _read_quoted(reading, quote)
    elif char == "{":
        yield from _read_object(reading, quote, depth + 1)
    elif char == "[":
        yield from _read_array(reading, quote, depth + 1)
    elif char == '"':
        yield from _read_json_string(reading)
    else:
        text = (yield from reading.take_match(_SCALAR)).strip(SPACE)
        value = JsonText()
        length, json_text = value.push(text + " ")
        is_json = value.done and length >= len(text)
        is_json = is_json and json_text[:1] not in ("{", "[", '"')
        yield reading.arguments(
            json_text.strip(SPACE) if is_json else json.dumps(text, ensure_ascii=False)
        )


def _read_quoted(reading: AnswerReading, quote: str) -> Steps[None]:
    """Read a text up to its end, and the end."""
    scanner = reading.scanner
    yield reading.arguments('"')
    while True:
        found = scanner.find((quote,))
        length = found[0] if found else scanner.certain_length((quote,))
        if length:
            yield reading.arguments(json_string_part(scanner.plain(scanner.advance(length))))
        if found:
            scanner.advance(found[2])
            break
        if not (yield from reading.more()):
            raise NotACall
    yield reading.arguments('"')


def _read_json_string(reading: AnswerReading) -> Steps[None]:
    scanner, value = reading.scanner, JsonText()
    while not value.done:
        length, text = value.push(scanner.rest)
        scanner.advance(length)
        yield reading.arguments(text)
        if not value.done and not (yield from reading.more()):
            raise NotACall

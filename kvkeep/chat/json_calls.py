"""Calls as JSON: an object with the name and the arguments of a tool, or a list of them."""

import json
import re
from collections.abc import Sequence

from kvkeep.chat.json_text import JsonText
from kvkeep.chat.messages import ToolCall
from kvkeep.chat.reading import AnswerReading, NotACall, Steps

_NAME_KEYS = ("name", "tool_name", "function")
_ARGUMENT_KEYS = ("arguments", "parameters")
_NAME_BEGINNING = re.compile(r'"name"\s*:\s*"([^"]*)("?)')


def bare_call_beginning(name: str) -> str:
    """Return how a call without markers begins where other answers are JSON too."""
    return f'{{"name": {json.dumps(name, ensure_ascii=False)}, "parameters": {{'


def write_json_calls(calls: Sequence[ToolCall]) -> str:
    """Return calls as a list of JSON objects."""
    objects = [{"name": call.name, "arguments": dict(call.arguments)} for call in calls]
    return json.dumps(objects, ensure_ascii=False)


def read_json_calls(
    reading: AnswerReading,
    ends: tuple[str, ...] = (),
    needs_arguments: bool = False,
    forced: bool = False,
) -> Steps[None]:
    """Read an object, several, or a list, up to what is no such object.

    Objects that are no calls of known tools are text. ends: markers that end malformed
    arguments. needs_arguments: whether an object without arguments is no call. forced: whether an
    object that the end of the answer cuts off is a call.
    """
    calls_before = reading.call_count
    if (yield from reading.skip_space()) not in ("{", "["):
        raise NotACall
    is_list = yield from reading.take("[")
    while (yield from reading.skip_space()) == "{":
        if reading.call_count > calls_before:
            reading.scanner.mark()
        try:
            yield from _read_call(reading, ends, needs_arguments)
        except NotACall:
            if forced and reading.scanner.closed:
                yield from _call_without_arguments(reading)
                return
            yield from _rest_of_object(reading)
        if (yield from reading.skip_space()) in (",", ";"):
            yield from reading.take(",", ";")
    if is_list and (yield from reading.take("]")) and reading.call_count > calls_before:
        reading.scanner.mark()


def _read_call(
    reading: AnswerReading, ends: tuple[str, ...], needs_arguments: bool, nested: bool = False
) -> Steps[None]:
    """Read `{"name": ..., "arguments": ...}`. Raises NotACall before the call begins."""
    calls_before, name, arguments = reading.call_count, "", None
    yield from reading.expect("{")
    try:
        while True:
            yield from reading.skip_space()
            key = json.loads((yield from _string(reading)))
            yield from reading.skip_space()
            yield from reading.expect(":")
            if key in _ARGUMENT_KEYS and name and reading.call_count == calls_before:
                reading.arguments_begin()
            next_char = yield from reading.skip_space()
            if key == "function" and next_char == "{" and not nested:
                yield from _read_call(reading, ends, needs_arguments, nested=True)
            elif key in _NAME_KEYS and next_char == '"' and not name:
                if not needs_arguments:
                    reading.name_begins("json", skipped=1)
                name = json.loads((yield from _string(reading)))
                reading.require_tool(name)
            elif key in _ARGUMENT_KEYS and name and reading.call_count == calls_before:
                yield from _read_arguments(reading, name, ends)
            elif key in _ARGUMENT_KEYS and arguments is None:
                arguments = object_text((yield from read_json_value(reading)))
            else:
                yield from read_json_value(reading)
            yield from reading.skip_space()
            if (yield from reading.expect(",", "}")) == "}":
                break
    except NotACall:
        if reading.call_count == calls_before:
            raise
        return  # what follows the arguments is text
    if reading.call_count == calls_before:
        if arguments is None and needs_arguments:
            raise NotACall
        reading.require_tool(name)
        yield from reading.whole_call(name, "{}" if arguments is None else arguments)
    reading.scanner.mark()


def _read_arguments(reading: AnswerReading, name: str, ends: tuple[str, ...]) -> Steps[None]:
    """Read the arguments of a call, which begins with them."""
    if (yield from reading.skip_space()) != "{":
        yield from reading.whole_call(name, object_text((yield from read_json_value(reading))))
        return
    yield reading.start_call(name)
    yield from stream_object(reading, ends)


def stream_object(reading: AnswerReading, ends: tuple[str, ...]) -> Steps[None]:
    """Read a JSON object as the arguments of the call that was begun, and end the call.

    ends: markers before which malformed arguments end, besides the end of the answer.
    """
    scanner, value = reading.scanner, JsonText()
    while not (value.done or value.failed):
        length, text = value.push(scanner.rest)
        scanner.advance(length)
        if text:
            yield reading.arguments(text)
        if not (value.done or value.failed or (yield from reading.more())):
            break
    if not value.done:
        yield from raw_arguments(reading, ends)
    yield reading.end_call(complete=value.done)


def raw_arguments(reading: AnswerReading, ends: tuple[str, ...]) -> Steps[None]:
    """Read malformed arguments up to a marker or the end, as they are."""
    scanner = reading.scanner
    while True:
        found = scanner.find(ends)
        length = scanner.certain_length(ends) if found is None else found[0]
        if length:
            yield reading.arguments(scanner.advance(length))
        if found or not (yield from reading.more()):
            return


def object_text(text: str) -> str:
    """Return the JSON object of arguments that may be null, or a string with the object.

    Raises NotACall for other values.
    """
    try:
        value = json.loads(text)
        if isinstance(value, str):
            text = value.strip() or "null"
            value = json.loads(text)
    except (ValueError, RecursionError):  # such as a number of thousands of digits
        raise NotACall from None
    if value is None:
        return "{}"
    if not isinstance(value, dict):
        raise NotACall
    return text


def _string(reading: AnswerReading) -> Steps[str]:
    if reading.scanner.rest[:1] != '"':
        raise NotACall
    return (yield from read_json_value(reading))


def read_json_value(reading: AnswerReading) -> Steps[str]:
    """Read a JSON value and return its text. Raises NotACall if it is malformed."""
    scanner, value, parts = reading.scanner, JsonText(), []
    while not value.done:
        length, text = value.push(scanner.rest)
        scanner.advance(length)
        parts.append(text)
        if value.failed or (not value.done and not (yield from reading.more())):
            raise NotACall
    return scanner.plain("".join(parts))


def _rest_of_object(reading: AnswerReading) -> Steps[None]:
    """Read on to the end of an object that is no call; all of it is text."""
    scanner, value = reading.scanner, JsonText()
    written = scanner.written[scanner.written.index("{") :]
    length, _ = value.push(written)
    unread = written[length:]  # needs what follows to be understood
    yield from reading.written_text()
    while not (value.done or value.failed):
        length, _ = value.push(unread + scanner.rest)
        if length >= len(unread):
            scanner.advance(length - len(unread))
            unread = ""
            yield from reading.written_text()
        if not (value.done or value.failed or (yield from reading.more())):
            break


def _call_without_arguments(reading: AnswerReading) -> Steps[None]:
    """Yield a call that was cut off before its arguments, if its tool is certain."""
    match = _NAME_BEGINNING.search(reading.scanner.written)
    written, is_whole = (match[1], match[2]) if match else ("", "")
    names = [name for name in reading.tools if name == written or not is_whole]
    names = [name for name in names if name.startswith(written)]
    reading.scanner.mark()
    if len(names) == 1:
        yield reading.start_call(names[0])
        yield reading.end_call(complete=False)

"""The beginnings of calls: what makes it certain, before its arguments, that a tool is called.

Each function reads a beginning, and raises NotACall for anything else. Of a call in JSON the name
must be the first member, besides the type.
"""

import re

from kvkeep.chat.reading import AnswerReading, NotACall, Steps, tool_name

_JSON_NAME = re.compile(r'[^"\\\n\ud800-\udfff]{1,256}')
_PYTHON_NAME = re.compile(r"[A-Za-z_][\w.-]{0,255}")
_PYTHON_KEY = re.compile(r"[A-Za-z_]\w{0,255}")
_JSON_ID = re.compile(r'[^"\\\n\ud800-\udfff]{0,64}')
_ARGUMENT_KEYS = ('"arguments"', '"parameters"')


def begin_json(reading: AnswerReading) -> Steps[None]:
    """Read the beginning of an object, or of a list of objects, up to the name of a call."""
    yield from _first_object(reading)
    if (yield from reading.take('"type"')):
        yield from _colon(reading)
        yield from reading.expect('"function"')
        yield from _comma(reading)
    if (yield from reading.take('"function"')):
        yield from _colon(reading)
        yield from reading.expect("{")
        yield from reading.skip_space()
    yield from reading.expect('"name"')
    yield from _colon(reading)
    yield from _json_name(reading)


def begin_json_call(reading: AnswerReading) -> Steps[None]:
    """Read the beginning of a call as JSON, up to its arguments, which must be an object."""
    yield from begin_json(reading)
    yield from _comma(reading)
    yield from reading.expect(*_ARGUMENT_KEYS)
    yield from reading.skip_space()
    yield from reading.expect(":")
    reading.arguments_begin()
    yield from reading.skip_space()
    yield from reading.expect("{")


def _first_object(reading: AnswerReading) -> Steps[None]:
    """Read the beginning of an object, or of a list of objects, up to its first key."""
    yield from reading.skip_space()
    yield from reading.take("[")
    yield from reading.skip_space()
    yield from reading.expect("{")
    yield from reading.skip_space()


def begin_command(reading: AnswerReading) -> Steps[None]:
    """Read the beginning of `[{"tool_call_id": "0", "tool_name": "name"`."""
    yield from _first_object(reading)
    if (yield from reading.take('"tool_call_id"')):
        yield from _colon(reading)
        yield from reading.expect('"')
        yield from reading.take_match(_JSON_ID)
        yield from reading.expect('"')
        yield from _comma(reading)
    yield from reading.expect('"tool_name"', '"name"')
    yield from _colon(reading)
    yield from _json_name(reading)


def begin_keyed(reading: AnswerReading) -> Steps[None]:
    """Read the beginning of `[{"name": {...}}]`."""
    yield from _first_object(reading)
    yield from _json_name(reading)
    yield from _colon(reading)


def begin_python(reading: AnswerReading) -> Steps[None]:
    """Read the beginning of calls as in Python, in a list or not: `name(` and an argument."""
    yield from reading.skip_space()
    yield from reading.take("[")
    yield from reading.skip_space()
    name = yield from reading.take_match(_PYTHON_NAME)
    yield from reading.expect("(")
    if tool_name(name, reading.tools) is None:
        name = name.removesuffix(".call")
    reading.require_tool(name)
    yield from reading.skip_space()
    if not (yield from reading.take(")", '"', "'")):
        if not (yield from reading.take_match(_PYTHON_KEY)):
            raise NotACall
        yield from reading.skip_space()
        yield from reading.expect("=")


def begin_json_or_python(reading: AnswerReading) -> Steps[None]:
    """Read the beginning of JSON, or of calls as in Python."""
    yield from reading.skip_space()
    yield from reading.take("[")
    is_json = (yield from reading.skip_space()) == "{"
    yield from (begin_json if is_json else begin_python)(reading)


def _json_name(reading: AnswerReading) -> Steps[None]:
    yield from reading.expect('"')
    reading.require_tool((yield from reading.take_match(_JSON_NAME)))
    yield from reading.expect('"')


def _colon(reading: AnswerReading) -> Steps[None]:
    yield from reading.skip_space()
    yield from reading.expect(":")
    yield from reading.skip_space()


def _comma(reading: AnswerReading) -> Steps[None]:
    yield from reading.skip_space()
    yield from reading.expect(",")
    yield from reading.skip_space()

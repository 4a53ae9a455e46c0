"""Calls without a marker of their own, which are known by how they begin.

JSON of a call, in a block of code or not; a list of calls as in Python; a name and JSON below it.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvkeep.chat.call_syntax import FENCE, TAG_END, close_block, read_arguments
from kvkeep.chat.json_calls import read_json_calls
from kvkeep.chat.python_calls import read_python_calls
from kvkeep.chat.reading import AnswerReading, NotACall, Steps
from kvkeep.chat.scanner import SPACE
from kvkeep.chat.tagged_calls import FUNCTION, GLM_MARKERS, LABEL

_JSON_NAME = re.compile(r'[^"\\\n\ud800-\udfff]{1,256}')
_PYTHON_NAME = re.compile(r"[A-Za-z_][\w.-]{0,255}")
_NAME_KEY, _ARGUMENT_KEYS = '"name"', ('"arguments"', '"parameters"')
_FENCES = (f"{FENCE}json", FENCE)
_TOOLS, _TOOLS_END = "<tools>", "</tools>"


@dataclass(frozen=True)
class BareForm:
    """A form of calls without a marker.

    begin: reads the beginning of a call of a known tool, and raises NotACall for anything else.
    read: reads such calls from their beginning. is_json: whether an answer by a grammar may look
    the same. in_text: whether they may begin a line of text too, with a bracket.
    """

    begin: Callable[[AnswerReading], Steps[None]]
    read: Callable[[AnswerReading], Steps[None]]
    is_json: bool = True
    in_text: bool = False


def bare_form_next(reading: AnswerReading, forms: Sequence[BareForm]) -> Steps[BareForm | None]:
    """Return the form in which a call comes next. Nothing is read."""
    for form in forms if reading.scanner.rest else ():
        if (yield from _comes_next(reading, form.begin)):
            return form
    return None


def call_comes_next(reading: AnswerReading, opener: str) -> Steps[bool]:
    """Return whether the opener comes next, and a call of a known tool in any form behind it.

    Of a call in JSON the name must be the first member. Nothing is read.
    """

    def begin(reading: AnswerReading) -> Steps[None]:
        yield from reading.expect(opener)
        yield from _begin_tagged(reading, opener)

    return (yield from _comes_next(reading, begin))


def _comes_next(
    reading: AnswerReading, begin: Callable[[AnswerReading], Steps[None]]
) -> Steps[bool]:
    reading.scanner.mark()
    try:
        yield from begin(reading)
    except NotACall:
        return False
    finally:
        reading.scanner.unread()
    return True


def _begin_tagged(reading: AnswerReading, opener: str) -> Steps[None]:
    """Read what is behind an opener, up to the name of a call."""
    yield from reading.skip_space()
    if opener == FUNCTION or (yield from reading.take(FUNCTION)):
        reading.require_tool((yield from reading.take_match(LABEL)).strip(SPACE))
        yield from reading.expect(">")
    elif (yield from reading.comes_next("[", "{")):
        yield from _begin_json(reading)
    else:
        reading.require_tool((yield from reading.take_match(LABEL)).strip(SPACE))
        yield from reading.skip_space()
        yield from reading.expect(GLM_MARKERS[0], TAG_END)


def _begin_json(reading: AnswerReading) -> Steps[None]:
    """Read the beginning of an object, or of a list of objects, up to the name of a call."""
    if (yield from reading.take("[")):
        yield from reading.skip_space()
    yield from reading.expect("{")
    yield from reading.skip_space()
    if (yield from reading.take('"type"')):
        yield from _colon(reading)
        yield from reading.expect('"function"')
        yield from _comma(reading)
    if (yield from reading.take('"function"')):
        yield from _colon(reading)
        yield from reading.expect("{")
        yield from reading.skip_space()
    yield from reading.expect(_NAME_KEY)
    yield from _colon(reading)
    yield from reading.expect('"')
    reading.require_tool((yield from reading.take_match(_JSON_NAME)))
    yield from reading.expect('"')


def _begin_json_call(reading: AnswerReading) -> Steps[None]:
    """Read the beginning of a call as JSON, up to the key of its arguments."""
    yield from _begin_json(reading)
    yield from _comma(reading)
    yield from reading.expect(*_ARGUMENT_KEYS)


def _colon(reading: AnswerReading) -> Steps[None]:
    yield from reading.skip_space()
    yield from reading.expect(":")
    yield from reading.skip_space()


def _comma(reading: AnswerReading) -> Steps[None]:
    yield from reading.skip_space()
    yield from reading.expect(",")
    yield from reading.skip_space()


def _read_json(reading: AnswerReading) -> Steps[None]:
    yield from read_json_calls(reading, needs_arguments=True)
    yield from reading.written_text()


def _begin_enclosed(reading: AnswerReading, *starts: str) -> Steps[None]:
    yield from reading.expect(*starts)
    yield from reading.skip_space()
    yield from _begin_json_call(reading)


def _read_enclosed(reading: AnswerReading, starts: Sequence[str], end: str) -> Steps[None]:
    calls_before = reading.call_count
    yield from reading.expect(*starts)
    yield from read_json_calls(reading, (end,), needs_arguments=True)
    yield from close_block(reading, calls_before, end)


def _enclosed(end: str, *starts: str) -> BareForm:
    """Return the form of calls as JSON between two markers. starts: a longer one comes first."""
    return BareForm(
        lambda reading: _begin_enclosed(reading, *starts),
        lambda reading: _read_enclosed(reading, starts, end),
    )


def _begin_python_list(reading: AnswerReading) -> Steps[None]:
    yield from reading.expect("[")
    yield from reading.skip_space()
    reading.require_tool((yield from reading.take_match(_PYTHON_NAME)))
    yield from reading.expect("(")


def _read_python_list(reading: AnswerReading) -> Steps[None]:
    yield from read_python_calls(reading)
    yield from reading.written_text()


def read_recipient(reading: AnswerReading) -> Steps[None]:
    """Read a call by its name, or `all` before text, which is no text."""
    if (yield from reading.take("all\n")):
        reading.scanner.mark()
    else:
        yield from _read_named_call(reading)


def _begin_named(reading: AnswerReading) -> Steps[None]:
    yield from reading.expect(*(f"{name}\n" for name in reading.tools))
    if (yield from reading.skip_space()) != "{":
        raise NotACall


def _read_named_call(reading: AnswerReading) -> Steps[None]:
    """Read the name of a tool and, on the next line, the JSON of its arguments."""
    name = yield from reading.expect(*(f"{name}\n" for name in reading.tools))
    if (yield from reading.skip_space()) != "{":
        raise NotACall
    yield from read_arguments(reading, name.strip(SPACE))


JSON_CALLS = BareForm(_begin_json_call, _read_json)
JSON_LINES = BareForm(_begin_json_call, _read_json, in_text=True)
FENCED_CALLS = _enclosed(FENCE, *_FENCES)
CALLS_IN_TOOLS = _enclosed(_TOOLS_END, _TOOLS)
PYTHON_LIST = BareForm(_begin_python_list, _read_python_list, is_json=False)
NAMED_CALL = BareForm(_begin_named, _read_named_call, is_json=False)

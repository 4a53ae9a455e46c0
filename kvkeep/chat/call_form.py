"""Forms in which models write calls of tools: how they begin, and how they are read."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvkeep.chat.json_calls import object_text, read_json_value, stream_object
from kvkeep.chat.messages import ToolCall
from kvkeep.chat.reading import AnswerReading, NotACall, Steps
from kvkeep.chat.scanner import SPACE

Begin = Callable[[AnswerReading], Steps[None]]
FENCE = "```"


@dataclass(frozen=True)
class CallForm:
    """A form of calls.

    opener: the marker that begins a block of calls. markers: the others. read: reads a block behind
    its opener; what it has read when it raises NotACall is text. begins_line: whether the opener
    must begin a line, and in no block of code. begin: reads the beginning of a call behind an
    opener in reasoning; None if the opener is no tag.
    """

    opener: str
    markers: tuple[str, ...]
    read: Callable[[AnswerReading], Steps[None]]
    begin: Begin | None = None
    begins_line: bool = False


@dataclass(frozen=True)
class BareForm:
    """A form of calls without a marker.

    begin: reads the beginning of a call. read: reads such calls from their beginning. is_json:
    whether an answer by a grammar may look the same. in_text: whether they may begin a line of text
    too, with a bracket.
    """

    begin: Begin
    read: Callable[[AnswerReading], Steps[None]]
    is_json: bool = True
    in_text: bool = False


@dataclass(frozen=True)
class CallText:
    """A form in which calls are written into the text of a message, between two markers.

    result_role: the role of the messages of their results.
    """

    start: str
    end: str
    write: Callable[[Sequence[ToolCall]], str]
    result_role: str = "tool"


def comes_next(reading: AnswerReading, begin: Begin) -> Steps[bool]:
    """Return whether a beginning comes next. Nothing is read."""
    reading.scanner.mark()
    reading.names_tool = False
    try:
        yield from begin(reading)
    except NotACall:
        return False
    finally:
        reading.names_tool = False
        reading.scanner.unread()
    return True


def bare_form_next(reading: AnswerReading, forms: Sequence[BareForm]) -> Steps[BareForm | None]:
    """Return the form in which a call comes next. Nothing is read."""
    for form in forms if reading.scanner.rest else ():
        if (yield from comes_next(reading, form.begin)):
            return form
    return None


def close_block(reading: AnswerReading, calls_before: int, *ends: str) -> Steps[None]:
    """Read the end of a block, if it comes. All is text if the block had no calls."""
    scanner = reading.scanner
    if reading.call_count == calls_before:
        raise NotACall
    if scanner.written.strip(SPACE + "]},;"):
        yield from reading.written_text()
    while (char := (yield from reading.skip_space())) and char in "]}":
        scanner.advance(1)
    if not (yield from reading.take(*ends)):
        yield from reading.written_text()


def read_arguments(
    reading: AnswerReading, name: str, call_id: str = "", ends: tuple[str, ...] = ()
) -> Steps[None]:
    """Read the JSON arguments of a known tool, or null."""
    char = yield from reading.skip_space()
    if char == "{":
        yield reading.start_call(name, call_id)
        yield from stream_object(reading, ends)
    elif not char:
        yield reading.start_call(name, call_id)
        yield reading.end_call(complete=False)
    else:
        arguments = object_text((yield from read_json_value(reading)))
        yield from reading.whole_call(name, arguments, call_id)

"""Answers in channels, as gpt-oss writes them (the "harmony" format).

An answer is messages: `<|start|>assistant`, a header with the channel and the recipient,
`<|message|>`, content, `<|end|>`. The prompt ends behind the first `<|start|>assistant`.
https://cookbook.openai.com/articles/openai-harmony
"""

import re
from collections.abc import Callable, Iterator, Sequence

from kvkeep.chat.json_calls import object_text, read_json_calls, read_json_value, stream_object
from kvkeep.chat.output import OutputEvent
from kvkeep.chat.reading import AnswerReading, NotACall, Steps

_START, CHANNEL, _MESSAGE, _CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
_END, _CALL, _RETURN = "<|end|>", "<|call|>", "<|return|>"
REASONING_CHANNEL, FINAL_HEADER = "analysis", f"{CHANNEL}final{_MESSAGE}"
# From the channel on, whose name is the group.
MESSAGE_HEADER = re.compile(r"<\|channel\|>\s*(\w+)[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>")
CHANNEL_MARKERS = (_START, CHANNEL, _MESSAGE, _CONSTRAIN, _END, _CALL, _RETURN)
_ENDS = (_END, _CALL, _RETURN)
_ROLE, _RECIPIENT_KEY = "assistant", "to="
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
_UNFINISHED_HEADER = re.compile(r"(<\|\w+\|>)?(assistant)?[^<]*(<\|\w+\|>[^<]*)*")
_STARTS = (_START, CHANNEL, _MESSAGE, _ROLE, _RECIPIENT_KEY)  # of a header
_BETWEEN_MESSAGES = "\n\n"
_MAX_HEADER = 1000  # characters; what is longer is text
_MAX_MARKER = max(map(len, CHANNEL_MARKERS))
_Emit = Callable[[str], Iterator[OutputEvent]]


def read_channels(
    reading: AnswerReading, in_reasoning: bool, forced: bool, has_schema: bool
) -> Steps[None]:
    """Read the messages of an answer.

    in_reasoning: whether it begins inside the reasoning. forced: whether content outside of the
    reasoning is JSON of calls. has_schema: whether it is JSON by a schema, and so text to its end.
    """
    scanner, last = reading.scanner, ""
    if in_reasoning:
        reading.begin_reasoning()
        yield from _read_content(reading, reading.reasoning_text)
        last = REASONING_CHANNEL
    elif not (yield from reading.comes_next(*_STARTS, f" {_RECIPIENT_KEY}")):
        yield from _read_text(reading, forced, has_schema)
        last = "final"
    while scanner.rest or (yield from reading.more()):
        scanner.mark()
        if not (yield from reading.skip_space()):
            continue
        if (yield from reading.take(*_ENDS)):
            continue
        recipient, channel = "", "final"
        if (yield from reading.comes_next(*_STARTS)):
            recipient, channel = yield from _read_header(reading)
        if channel == REASONING_CHANNEL and not recipient:
            if last == channel:
                yield from reading.reasoning_text(_BETWEEN_MESSAGES)
            else:
                reading.begin_reasoning()
            yield from _read_content(reading, reading.reasoning_text)
        elif recipient:
            channel = "call"
            yield from _read_call(reading, recipient)
        elif channel:
            if last == "final":
                yield from reading.text(_BETWEEN_MESSAGES)
            channel = "final"
            yield from _read_text(reading, forced, has_schema)
        last = channel


def _read_header(reading: AnswerReading) -> Steps[tuple[str, str]]:
    """Read a header; return the recipient, and the channel ("" if no message follows)."""
    scanner = reading.scanner
    while not (found := scanner.find((_MESSAGE, *_ENDS))) or found[0] > _MAX_HEADER:
        if len(scanner.rest) > _MAX_HEADER + _MAX_MARKER:
            scanner.advance(_MAX_HEADER)
            yield from reading.written_text()
            yield from _read_content(reading, reading.text)
            return "", ""
        if not (yield from reading.more()):
            scanner.advance(len(scanner.rest))
            if not _UNFINISHED_HEADER.fullmatch(scanner.plain(scanner.written)):
                yield from reading.written_text()
            return "", ""
    place, marker, length = found
    header = scanner.plain(scanner.advance(place))
    scanner.advance(length)
    if marker != _MESSAGE:
        return "", ""
    recipients, channels = _RECIPIENT.findall(header), _CHANNEL_NAME.findall(header)
    recipient = recipients[-1] if recipients else ""
    return "" if recipient == _ROLE else recipient, channels[-1] if channels else "final"


def _read_content(
    reading: AnswerReading, emit: _Emit, ends: Sequence[str] = (*_ENDS, _START)
) -> Steps[None]:
    """Read the content of a message, and its end."""
    scanner = reading.scanner
    while True:
        found = scanner.find(ends)
        length = found[0] if found else scanner.certain_length(ends)
        if length:
            yield from emit(scanner.advance(length))
        if found:
            scanner.advance(found[2] if found[1] in _ENDS else 0)
            return
        if not (yield from reading.more()):
            return


def _read_text(reading: AnswerReading, forced: bool, has_schema: bool) -> Steps[None]:
    """Read text of the answer, or the JSON of forced calls."""
    if forced and (yield from reading.skip_space()) in ("{", "["):
        reading.scanner.mark()
        yield from read_json_calls(reading, _ENDS, forced=True)
        yield from reading.written_text()
    if has_schema:
        control_markers = reading.scanner.control_markers
        ends = [end for end in (*_ENDS, _START) if end in control_markers]
        yield from _read_content(reading, reading.text, ends)
    else:
        yield from _read_content(reading, reading.text)


def _read_call(reading: AnswerReading, recipient: str) -> Steps[None]:
    """Read a message to a recipient. It is text, as it was written, if that is no known tool."""
    try:
        name = reading.require_tool(recipient).name
        reading.arguments_begin()
        if (yield from reading.skip_space()) == "{":
            yield reading.start_call(name)
            yield from stream_object(reading, _ENDS)
        elif not reading.scanner.rest:
            yield reading.start_call(name)
            yield reading.end_call(complete=False)
        elif (yield from reading.comes_next(*_ENDS)):
            yield from reading.whole_call(name, "{}")
        else:
            arguments = object_text((yield from read_json_value(reading)))
            yield from reading.whole_call(name, arguments)
        yield from reading.skip_space()
    except NotACall:
        yield from reading.written_text()
    yield from _read_content(reading, reading.text)

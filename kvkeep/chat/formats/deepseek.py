"""Answers of DeepSeek's models: calls with a separator behind their names."""

import re
from functools import partial

from kvkeep.chat.call_form import FENCE, CallForm, close_block, read_arguments
from kvkeep.chat.formats.tagged import TAGGED
from kvkeep.chat.output_format import OutputFormat
from kvkeep.chat.reading import AnswerReading, Steps

_NAME = re.compile(r"[\w.:-]{1,256}")
_BLOCK, _BLOCK_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_SEPARATOR = "<｜tool▁sep｜>"


def _read_block(reading: AnswerReading, in_call: bool = False) -> Steps[None]:
    """Read DeepSeek's calls, up to the end of their block. in_call: whether a call has begun."""
    calls_before = reading.call_count
    if not in_call:
        yield from reading.skip_space()
        yield from reading.expect(_CALL)
    while True:
        yield from _read_call(reading)
        yield from reading.skip_space()
        yield from reading.take(_CALL_END)
        reading.scanner.mark()
        yield from reading.skip_space()
        if not (yield from reading.take(_CALL)):
            break
    yield from close_block(reading, calls_before, _BLOCK_END)


def _read_call(reading: AnswerReading) -> Steps[None]:
    """Read `name<｜tool▁sep｜>{...}`, or `function<｜tool▁sep｜>name`, a line and fenced JSON."""
    yield from reading.skip_space()
    reading.name_begins("deepseek")
    name = yield from reading.take_match(_NAME)
    yield from reading.skip_space()
    yield from reading.expect(_SEPARATOR)
    is_fenced = (yield from reading.skip_space()) not in ("{", "")
    if is_fenced:
        reading.name_begins("fenced")
        name = yield from reading.take_match(_NAME)
        yield from reading.skip_space()
        yield from reading.expect("```json")
    reading.require_tool(name)
    yield from read_arguments(reading, name, ends=(_CALL_END,))
    if is_fenced:
        yield from reading.skip_space()
        yield from reading.take(FENCE)


def _begin_call(reading: AnswerReading, opener: str = "") -> Steps[None]:
    """Read `name` and its separator, or `function`, the separator, a name and a line.

    opener: the marker of a call, if a marker of a block of calls was before it.
    """
    yield from reading.skip_space()
    if opener:
        yield from reading.expect(opener)
        yield from reading.skip_space()
    name = yield from reading.take_match(_NAME)
    yield from reading.skip_space()
    yield from reading.expect(_SEPARATOR)
    if (yield from reading.skip_space()) != "{":
        name = yield from reading.take_match(_NAME)
        yield from reading.skip_space()
        yield from reading.expect("```json")
    reading.require_tool(name)


_SIGNS = ((_CALL,),)
_CALLS = CallForm(
    _BLOCK,
    (_BLOCK_END, _CALL, _CALL_END, _SEPARATOR),
    _read_block,
    partial(_begin_call, opener=_CALL),
)
_SINGLE_CALL = CallForm(_CALL, (), partial(_read_block, in_call=True), _begin_call)

DEEPSEEK = OutputFormat(
    "deepseek",
    signs=_SIGNS,
    control_signs=_SIGNS,
    calls=(_CALLS, _SINGLE_CALL, TAGGED),
)

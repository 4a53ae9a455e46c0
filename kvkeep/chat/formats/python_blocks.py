"""Answers with calls as in Python between two markers: those of LFM2 and OLMo 3."""

from collections.abc import Sequence
from functools import partial

from kvkeep.chat.call_beginnings import begin_json_or_python, begin_python
from kvkeep.chat.call_form import Begin, CallForm, CallText, close_block
from kvkeep.chat.formats.tagged import TAGGED
from kvkeep.chat.json_calls import read_json_calls, write_json_calls
from kvkeep.chat.messages import ToolCall
from kvkeep.chat.output_format import OutputFormat
from kvkeep.chat.python_calls import (
    is_python_call,
    read_python_calls,
    write_python_calls,
    write_python_lines,
)
from kvkeep.chat.reading import AnswerReading, Steps

_OLMO = "<function_calls>", "</function_calls>"
_LFM2, _LFM2_END = "<|tool_call_start|>", "<|tool_call_end|>"


def python_form(opener: str, *ends: str, begin: Begin | None = begin_python) -> CallForm:
    return CallForm(opener, ends, lambda reading: _read_python(reading, *ends), begin)


def _read_python(reading: AnswerReading, *ends: str) -> Steps[None]:
    """Read calls written as in Python."""
    calls_before = reading.call_count
    yield from read_python_calls(reading)
    yield from close_block(reading, calls_before, *ends)


def read_json_or_python(reading: AnswerReading, end: str) -> Steps[None]:
    """Read a list of calls as in Python or, if the system text requests it, of JSON objects."""
    calls_before = reading.call_count
    yield from reading.skip_space()
    yield from reading.take("[")
    if (yield from reading.skip_space()) == "{":
        yield from read_json_calls(reading, (end,))
    else:
        yield from read_python_calls(reading)
    yield from close_block(reading, calls_before, end)


def _write_lfm2(calls: Sequence[ToolCall]) -> str:
    """Return calls as `read_json_or_python` reads them."""
    if all(map(is_python_call, calls)):
        return write_python_calls(calls)
    return write_json_calls(calls)


_LFM2_SIGNS = (_LFM2,), ("<|tool_list_start|>",)
_LFM2_CALLS = CallForm(
    _LFM2, (_LFM2_END,), partial(read_json_or_python, end=_LFM2_END), begin_json_or_python
)

OLMO3 = OutputFormat(
    "olmo3",
    signs=((_OLMO[0],),),
    calls=(python_form(*_OLMO), TAGGED),
    call_text=CallText(*_OLMO, write_python_lines, "environment"),
)
LFM2 = OutputFormat(
    "lfm2",
    signs=_LFM2_SIGNS,
    control_signs=_LFM2_SIGNS,
    calls=(_LFM2_CALLS, TAGGED),
    call_text=CallText(_LFM2, _LFM2_END, _write_lfm2),
)

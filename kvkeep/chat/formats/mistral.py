"""Answers of Mistral's models: `[TOOL_CALLS]` with JSON, or with a name and `[ARGS]`."""

import re

from kvkeep.chat.call_beginnings import begin_json
from kvkeep.chat.call_form import CallForm, close_block, read_arguments
from kvkeep.chat.formats.tagged import TAGGED
from kvkeep.chat.json_calls import read_json_calls
from kvkeep.chat.output_format import THINK, BlockMarkers, OutputFormat
from kvkeep.chat.reading import AnswerReading, Steps

_NAME = re.compile(r"[\w.:-]{1,256}")
_ID = re.compile(r"\w{1,64}")


def _read_mistral(reading: AnswerReading) -> Steps[None]:
    """Read `[TOOL_CALLS]` with a list of JSON objects, or `name[CALL_ID]id[ARGS]{...}`."""
    calls_before = reading.call_count
    if (yield from reading.skip_space()) in ("{", "["):
        yield from read_json_calls(reading)
        yield from close_block(reading, calls_before)
        return
    reading.name_begins("mistral")
    name = yield from reading.take_match(_NAME)
    call_id = ""
    marker = yield from reading.take("[CALL_ID]", "[ARGS]")
    if marker == "[CALL_ID]":
        call_id = yield from reading.take_match(_ID)
        yield from reading.expect("[ARGS]")
    reading.require_tool(name)
    yield from read_arguments(reading, name, call_id)


def _begin_mistral(reading: AnswerReading) -> Steps[None]:
    """Read the beginning of JSON, or a name before `[CALL_ID]`, `[ARGS]` or JSON."""
    if (yield from reading.skip_space()) in ("{", "["):
        yield from begin_json(reading)
        return
    reading.require_tool((yield from reading.take_match(_NAME)))
    yield from reading.skip_space()
    yield from reading.expect("[CALL_ID]", "[ARGS]", "{")


_SIGNS = ("[TOOL_CALLS]",), ("[THINK]",)
_CALLS = CallForm("[TOOL_CALLS]", ("[CALL_ID]", "[ARGS]"), _read_mistral, _begin_mistral)

MISTRAL = OutputFormat(
    "mistral",
    signs=_SIGNS,
    control_signs=_SIGNS,
    reasoning=(BlockMarkers("[THINK]", "[/THINK]"), THINK),
    calls=(_CALLS, TAGGED),
)

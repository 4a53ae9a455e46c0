"""Answers with calls as JSON between two markers, and with markers around the final text.

Those of Granite, Phi-4-mini, Apriel, Nemotron Nano 2 and Apertus.
"""

import json

from kvkeep.chat.call_beginnings import begin_json, begin_keyed
from kvkeep.chat.call_form import Begin, CallForm, CallText, close_block, read_arguments
from kvkeep.chat.formats.tagged import TAG_END, TAGGED
from kvkeep.chat.json_calls import read_json_calls, read_json_value, write_json_calls
from kvkeep.chat.output_format import THINK, BlockMarkers, OutputFormat
from kvkeep.chat.reading import AnswerReading, NotACall, Steps

_CALL, _CALL_END = "<|tool_call|>", "<|/tool_call|>"
_APERTUS, _APERTUS_END = "<|tools_prefix|>", "<|tools_suffix|>"
_APRIEL_TEXT = "[BEGIN FINAL RESPONSE]"


def json_form(opener: str, *ends: str, begin: Begin | None = begin_json) -> CallForm:
    return CallForm(opener, ends, lambda reading: _read_json(reading, *ends), begin)


def _read_json(reading: AnswerReading, *ends: str) -> Steps[None]:
    """Read JSON up to one of the markers, which may be missing."""
    calls_before = reading.call_count
    yield from read_json_calls(reading, ends)
    yield from close_block(reading, calls_before, *ends)


def _read_keyed(reading: AnswerReading, end: str) -> Steps[None]:
    """Read a list of objects whose only key is the name of a tool: `[{"name": {...}}]`."""
    calls_before = reading.call_count
    yield from reading.skip_space()
    yield from reading.take("[")
    while (yield from reading.skip_space()) == "{":
        yield from reading.expect("{")
        if (yield from reading.skip_space()) != '"':
            raise NotACall
        reading.name_begins("keyed", skipped=1)
        name = json.loads((yield from read_json_value(reading)))
        yield from reading.skip_space()
        yield from reading.expect(":")
        reading.require_tool(name)
        yield from read_arguments(reading, name, ends=(end,))
        yield from reading.skip_space()
        yield from reading.take("}")
        reading.scanner.mark()
        yield from reading.skip_space()
        yield from reading.take(",")
    yield from close_block(reading, calls_before, end)


_CALLS = json_form(_CALL, _CALL_END, TAG_END)
_APERTUS_CALLS = CallForm(
    _APERTUS, (_APERTUS_END,), lambda reading: _read_keyed(reading, _APERTUS_END), begin_keyed
)
_PHI4_SIGNS = (("<|tool|>", "<|/tool|>"),)

GRANITE = OutputFormat(
    "granite",
    signs=((_CALL,), ("<|start_of_role|>",)),
    reasoning=(THINK, BlockMarkers("Here is my thought process:", "Here is my response:")),
    calls=(_CALLS, TAGGED),
    wrappers=(BlockMarkers("<response>", "</response>"),),
    call_text=CallText(_CALL, "", write_json_calls, "tool_response"),
)
PHI4_MINI = OutputFormat(
    "phi4-mini",
    signs=_PHI4_SIGNS,
    control_signs=(*_PHI4_SIGNS, (_CALL,)),
    calls=(_CALLS, TAGGED),
    call_text=CallText(_CALL, _CALL_END, write_json_calls, "tool_response"),
)
APRIEL = OutputFormat(
    "apriel",
    signs=(("<tool_calls>", _APRIEL_TEXT),),
    reasoning=(BlockMarkers("Here are my reasoning steps:", _APRIEL_TEXT), THINK),
    calls=(json_form("<tool_calls>", "</tool_calls>"), TAGGED),
    wrappers=(BlockMarkers(_APRIEL_TEXT, "[END FINAL RESPONSE]", has_lines=True),),
)
NEMOTRON2 = OutputFormat(
    "nemotron2", signs=(("<TOOLCALL>",),), calls=(json_form("<TOOLCALL>", "</TOOLCALL>"), TAGGED)
)
APERTUS = OutputFormat(
    "apertus",
    signs=((_APERTUS,),),
    reasoning=(BlockMarkers("<|inner_prefix|>", "<|inner_suffix|>"), THINK),
    calls=(_APERTUS_CALLS, TAGGED),
)

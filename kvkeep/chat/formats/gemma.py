"""Answers of Gemma 3 (fenced code), Gemma 4 and FunctionGemma (`call:name{...}`)."""

from functools import partial

from kvkeep.chat.call_form import FENCE, CallForm, close_block
from kvkeep.chat.formats.python_blocks import python_form
from kvkeep.chat.formats.tagged import TAGGED
from kvkeep.chat.gemma_calls import begin_gemma_call, read_gemma_call
from kvkeep.chat.json_calls import read_json_calls
from kvkeep.chat.output_format import THINK, BlockMarkers, OutputFormat
from kvkeep.chat.reading import AnswerReading, Steps


def _read_fenced_json(reading: AnswerReading) -> Steps[None]:
    """Read JSON in a code block, which must have arguments to be a call."""
    calls_before = reading.call_count
    yield from read_json_calls(reading, (FENCE,), needs_arguments=True)
    yield from close_block(reading, calls_before, FENCE)


def _read_calls(reading: AnswerReading, quote: str, end: str) -> Steps[None]:
    calls_before = reading.call_count
    yield from read_gemma_call(reading, quote)
    yield from close_block(reading, calls_before, end)


def _form(opener: str, end: str, quote: str) -> CallForm:
    read = partial(_read_calls, quote=quote, end=end)
    return CallForm(opener, (end, quote), read, begin_gemma_call)


_CALL, _CHANNEL, _FUNCTION_CALL = "<|tool_call>", "<|channel>", "<start_function_call>"
_GEMMA4_SIGNS, _FUNCTION_GEMMA_SIGNS = ((_CALL,), (_CHANNEL,)), ((_FUNCTION_CALL,),)

GEMMA3 = OutputFormat(
    "gemma3",
    signs=(("<start_of_turn>",),),
    calls=(
        python_form("```tool_code", FENCE, begin=None),
        CallForm("```json", (), _read_fenced_json),
        TAGGED,
    ),
)
GEMMA4 = OutputFormat(
    "gemma4",
    signs=_GEMMA4_SIGNS,
    control_signs=_GEMMA4_SIGNS,
    reasoning=(BlockMarkers(_CHANNEL, "<channel|>", "thought"), THINK),
    calls=(_form(_CALL, "<tool_call|>", '<|"|>'), TAGGED),
)
FUNCTION_GEMMA = OutputFormat(
    "function-gemma",
    signs=_FUNCTION_GEMMA_SIGNS,
    control_signs=_FUNCTION_GEMMA_SIGNS,
    calls=(_form(_FUNCTION_CALL, "<end_function_call>", "<escape>"), TAGGED),
)

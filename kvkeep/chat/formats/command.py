"""Answers of Cohere's Command models: calls as JSON behind `<|START_ACTION|>` or `Action:`."""

from kvkeep.chat.call_beginnings import begin_command
from kvkeep.chat.call_form import FENCE, CallForm, close_block
from kvkeep.chat.formats.json_blocks import json_form
from kvkeep.chat.formats.tagged import TAGGED
from kvkeep.chat.json_calls import read_json_calls
from kvkeep.chat.output_format import THINK, BlockMarkers, OutputFormat
from kvkeep.chat.reading import AnswerReading, Steps


def _read_action(reading: AnswerReading) -> Steps[None]:
    """Read the fenced JSON behind `Action:`."""
    calls_before = reading.call_count
    yield from reading.skip_space()
    yield from reading.expect("```json")
    yield from read_json_calls(reading, (FENCE,))
    yield from close_block(reading, calls_before, FENCE)


_ACTION = "<|START_ACTION|>"
_SIGNS = (_ACTION,), ("<|START_THINKING|>",)
_WRAPPERS = (
    BlockMarkers("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    BlockMarkers("<|START_TEXT|>", "<|END_TEXT|>"),
)

COMMAND_R7B = OutputFormat(
    "command-r7b",
    signs=_SIGNS,
    control_signs=_SIGNS,
    reasoning=(BlockMarkers("<|START_THINKING|>", "<|END_THINKING|>"), THINK),
    calls=(json_form(_ACTION, "<|END_ACTION|>", begin=begin_command), TAGGED),
    wrappers=_WRAPPERS,
)
COMMAND_R = OutputFormat(
    "command-r",
    signs=(("<|CHATBOT_TOKEN|>", "Action:"),),
    calls=(CallForm("Action:", (), _read_action), TAGGED),
    wrappers=_WRAPPERS,
)

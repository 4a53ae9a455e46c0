"""Answers of gpt-oss: messages in channels, by OpenAI's Harmony format."""

from kvkeep.chat.output_format import BlockMarkers, OutputFormat

_SIGNS = (("<|channel|>", "<|message|>"),)

HARMONY = OutputFormat(
    "harmony",
    signs=_SIGNS,
    control_signs=_SIGNS,
    reasoning=(BlockMarkers("<|channel|>analysis<|message|>", "<|end|>"),),
    channels=True,
)

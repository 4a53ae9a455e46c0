"""The beginning of an answer that a client states, written behind the prompt of the answer."""

import re

from kvkeep.chat.channels import FINAL_HEADER
from kvkeep.chat.messages import Message
from kvkeep.chat.output_format import BlockMarkers, OutputFormat
from kvkeep.models.text.codec import TextCodec
from kvkeep.models.text.control_tokens import ChatText

_NEXT_MESSAGE = "<|start|>assistant"


def write_prefill(
    codec: TextCodec, output_format: OutputFormat, prompt: ChatText, message: Message
) -> tuple[ChatText, bool]:
    """Return a prompt with the message's reasoning and text, and whether it ends in reasoning.

    prompt: ends where the assistant's answer begins, perhaps with a reasoning block that is open or
    empty. The message's own reasoning replaces it, also if its text states it, as
    "<think>\\n\\n</think>".
    """
    text = message.text
    if message.reasoning:
        markers = output_format.reasoning[0]
        prompt = _without_reasoning_block(codec, output_format, prompt)
        prompt += codec.template_text(_opening(markers)) + message.reasoning
        if not text:
            return prompt, True
        return prompt + codec.template_text(_closing(output_format, markers)) + text, False
    for markers in output_format.reasoning:
        if text.lstrip().startswith(markers.start):
            prompt = _without_reasoning_block(codec, output_format, prompt)
            return prompt + text, markers.end not in text
    if open_markers := open_reasoning(output_format, prompt):
        prompt += codec.template_text(_closing(output_format, open_markers))
    elif output_format.channels and not prompt.endswith(FINAL_HEADER):
        prompt += codec.template_text(FINAL_HEADER)
    return prompt + text, False


def open_reasoning(output_format: OutputFormat, prompt: str) -> BlockMarkers | None:
    """Return the markers of the reasoning block that begins at the prompt's end, if one does."""
    end = prompt.rstrip()
    for markers in output_format.reasoning:
        if end.endswith((markers.start, markers.start + markers.label)):
            return markers
    return None


def _without_reasoning_block(
    codec: TextCodec, output_format: OutputFormat, prompt: ChatText
) -> ChatText:
    """Return the prompt without an open or empty reasoning block at its end."""
    for markers in output_format.reasoning:
        start, label, end = map(re.escape, (markers.start, markers.label, markers.end))
        if match := re.search(rf"{start}(?:{label})?\s*(?:{end})?\s*\Z", prompt):
            sealed_block = codec.template_text(match[0]).sealed
            return ChatText(prompt[: match.start()], prompt.sealed.removesuffix(sealed_block))
    return prompt


def _opening(markers: BlockMarkers) -> str:
    has_own_line = markers.label or markers.start == "<think>"
    return f"{markers.start}{markers.label}\n" if has_own_line else markers.start


def _closing(output_format: OutputFormat, markers: BlockMarkers) -> str:
    if output_format.channels:
        return f"{markers.end}{_NEXT_MESSAGE}{FINAL_HEADER}"
    if markers.start == "<think>":
        return f"\n{markers.end}\n\n"
    return f"\n{markers.end}" if markers.label else markers.end

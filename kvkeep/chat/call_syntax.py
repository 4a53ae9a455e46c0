"""The forms in which models write calls of tools, by the marker that begins them."""

from collections.abc import Callable
from dataclasses import dataclass

from kvkeep.chat.json_calls import read_json_calls
from kvkeep.chat.reading import AnswerReading, NotACall, Steps
from kvkeep.chat.scanner import SPACE

_TAG, _TAG_END = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class CallForm:
    """A form of calls.

    opener: the marker that begins a block of calls. markers: the others. read: reads a block behind
    its opener; what it has read when it raises NotACall is text.
    """

    opener: str
    markers: tuple[str, ...]
    read: Callable[[AnswerReading], Steps[None]]


def _read_tagged(reading: AnswerReading) -> Steps[None]:
    """Read `<tool_call>` with JSON."""
    calls_before = reading.call_count
    if (yield from reading.skip_space()) not in ("{", "["):
        raise NotACall
    yield from read_json_calls(reading, _TAG_END)
    yield from _close_block(reading, calls_before, _TAG_END)


def _close_block(reading: AnswerReading, calls_before: int, end: str) -> Steps[None]:
    """Read the end of a block, with brackets before it. It is text if the block had no calls."""
    if reading.call_count == calls_before:
        raise NotACall
    while (char := (yield from reading.skip_space())) and char in "]}":
        reading.scanner.advance(1)
    if not (yield from reading.take(end)) and reading.scanner.written.strip(SPACE):
        raise NotACall


TAGGED = CallForm(_TAG, (_TAG_END,), _read_tagged)

"""Reading of a message's generation: its content blocks, whole or as events, and why it ends."""

from collections.abc import Iterator
from typing import Any

from kvkeep.chat.output import Output, OutputBuilder, OutputEvent, ReasoningDelta
from kvkeep.chat.output_reader import OutputReader
from kvkeep.engine import Finished, GeneratedToken, PrefillProgress
from kvkeep.server.anthropic.blocks import ContentBlockStream, content_blocks
from kvkeep.server.chat_input import StopAfterFirstCall, is_cut_off
from kvkeep.server.generation_stream import StreamEvent

_STOP_REASONS = {
    "eos": "end_turn",
    "length": "max_tokens",
    "full": "model_context_window_exceeded",
    "stop": "stop_sequence",
}


class AnswerReader:
    """A reader of a generation's events, which gives the content blocks of a message."""

    def __init__(self, reader: OutputReader, end: StopAfterFirstCall | None, is_empty: bool):
        """end: ends the generation with its first call; None if there may be several.

        is_empty: whether no token is generated: the message then has no blocks.
        """
        self._reader, self._end, self._is_empty = reader, end, is_empty
        self._builder, self._blocks = OutputBuilder(), ContentBlockStream()
        self._unread = 0  # tokens since the last event
        self.thinking_tokens = 0

    def push(self, event: StreamEvent) -> list[OutputEvent]:
        if isinstance(event, PrefillProgress):
            return []
        if isinstance(event, GeneratedToken):
            self._unread += 1
            events = self._reader.push(event.pieces)
        else:
            events = [*self._reader.push([event.text]), *self._reader.finish()]
        if self._end is not None:
            events = self._end.up_to_first_call(events)
        if events:
            has_thinking = any(isinstance(each, ReasoningDelta) for each in events)
            self.thinking_tokens += self._unread if has_thinking else 0
            self._unread = 0
        self._builder.push(events)
        return events

    def streamed(self, event: StreamEvent) -> Iterator[bytes]:
        """Read an event, and yield the events of content blocks that follow from it."""
        for output_event in self.push(event):
            yield from self._blocks.push(output_event)

    def stream_end(self) -> Iterator[bytes]:
        """Yield the last events of content blocks."""
        if not self._is_empty:
            yield from self._blocks.finish()

    @property
    def output(self) -> Output:
        return self._builder.output

    @property
    def content(self) -> list[dict[str, Any]]:
        """The whole content blocks."""
        return [] if self._is_empty else content_blocks(self.output)

    def stop_fields(self, finished: Finished) -> dict[str, Any]:
        """Return why the message ends. A call that is cut off is not to be run."""
        reason = _STOP_REASONS[finished.reason]
        if self.output.calls_to_run and not is_cut_off(finished, self._end):
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": finished.stop}

"""Content blocks of an answer: the events of their streaming, and whole blocks."""

from collections.abc import Iterator
from typing import Any

from pydantic_core import from_json

from kvkeep.chat.anthropic_messages import SIGNATURE, format_output
from kvkeep.chat.output import (
    CallArguments,
    CallEnded,
    CallStarted,
    Output,
    OutputEvent,
    ReasoningDelta,
    TextDelta,
)
from kvkeep.server.sse import sse_event

_EMPTY_BLOCKS: dict[str, dict[str, Any]] = {
    "text": {"type": "text", "text": ""},
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
}


class ContentBlockStream:
    """Turns the events of an answer into the events of its content blocks, one open at a time."""

    def __init__(self) -> None:
        self._index = -1  # of the newest block
        self._open_type = ""  # of the open block; "" if there is none

    def push(self, event: OutputEvent) -> Iterator[bytes]:
        match event:
            case TextDelta():
                yield from self._open("text")
                yield self._delta("text_delta", text=event.text)
            case ReasoningDelta():
                yield from self._open("thinking")
                yield self._delta("thinking_delta", thinking=event.text)
            case CallStarted():
                yield from self._close()
                block = {"type": "tool_use", "id": event.id, "name": event.name, "input": {}}
                yield self._start("tool_use", block)
            case CallArguments():
                yield self._delta("input_json_delta", partial_json=event.delta)
            case CallEnded():
                yield from self._close()

    def finish(self) -> Iterator[bytes]:
        """Close the last block. An answer has at least one block: one of empty text."""
        if self._index < 0:
            yield from self._open("text")
        yield from self._close()

    def _open(self, block_type: str) -> Iterator[bytes]:
        """Open a block, unless one of the type is open."""
        if self._open_type != block_type:
            yield from self._close()
            yield self._start(block_type, _EMPTY_BLOCKS[block_type])

    def _close(self) -> Iterator[bytes]:
        if self._open_type == "thinking":
            yield self._delta("signature_delta", signature=SIGNATURE)
        if self._open_type:
            self._open_type = ""
            yield message_event("content_block_stop", index=self._index)

    def _start(self, block_type: str, block: dict[str, Any]) -> bytes:
        self._open_type = block_type
        self._index += 1
        return message_event("content_block_start", index=self._index, content_block=block)

    def _delta(self, delta_type: str, **fields: str) -> bytes:
        delta = {"type": delta_type, **fields}
        return message_event("content_block_delta", index=self._index, delta=delta)


def message_event(event_type: str, **data: Any) -> bytes:
    return sse_event({"type": event_type, **data}, event_type)


def content_blocks(output: Output) -> list[dict[str, Any]]:
    """Return an answer's content blocks. A call that was cut off has the arguments up to there."""
    blocks = format_output(output)
    tool_uses = [block for block in blocks if block["type"] == "tool_use"]
    for block, call in zip(tool_uses, output.calls, strict=True):
        if not call.complete:
            block["input"] = _partial_object(call.arguments)
    return blocks


def _partial_object(text: str) -> dict[str, Any]:
    """Return the beginning of a JSON object, as clients read a stream that ends early."""
    try:
        value = from_json(text, allow_partial=True)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}

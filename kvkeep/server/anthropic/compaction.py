"""`compaction` of a message: the model's summary of the conversation, as the answer's only block.

Later requests begin with the block, in place of the messages that it summarizes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from kvkeep.chat.anthropic_messages import SIGNATURE
from kvkeep.chat.messages import Chat, Message, TextPart, ToolChoice, normalized
from kvkeep.chat.output import OutputEvent
from kvkeep.chat.output_reader import OutputReader
from kvkeep.engine import Finished
from kvkeep.server.anthropic.answers import AnswerReader
from kvkeep.server.anthropic.blocks import message_event
from kvkeep.server.generation_stream import StreamEvent

_INSTRUCTIONS = (
    "Summarize this conversation, so that it can go on from your summary alone. Say what was asked "
    "for, what was done and found, what was decided and why, and what is to be done next. Keep "
    "names, paths and values that are still needed. Answer with the summary alone."
)


def asking_for_summary(chat: Chat, instructions: str) -> Chat:
    """Return a conversation that ends with a request for its summary. No tool can be called.

    instructions: the request; blank for a default.
    """
    request = Message("user", (TextPart(instructions if instructions.strip() else _INSTRUCTIONS),))
    choice = ToolChoice("none")
    return replace(chat, messages=normalized([*chat.messages, request]), choice=choice)


class SummaryReader(AnswerReader):
    """A reader of a generation that writes a summary. It leaves out reasoning.

    It returns no summary that the model did not end itself: clients drop what it would stand for.
    """

    def __init__(self, reader: OutputReader, tool_changes: Sequence[dict[str, Any]]):
        """tool_changes: the last change of each tool in the conversation, as blocks."""
        super().__init__(reader, None, is_empty=False)
        self._tool_changes = list(tool_changes)
        self._is_complete = False

    def push(self, event: StreamEvent) -> list[OutputEvent]:
        self._is_complete = isinstance(event, Finished) and event.reason == "eos"
        return super().push(event)

    def streamed(self, event: StreamEvent) -> Iterator[bytes]:
        self.push(event)
        yield from ()  # clients take the summary as a whole

    def stream_end(self) -> Iterator[bytes]:
        (block,) = self.content
        delta = {"type": "compaction_delta", "content": block["content"]}
        start = {**block, "content": None}
        yield message_event("content_block_start", index=0, content_block=start)
        yield message_event("content_block_delta", index=0, delta=delta)
        yield message_event("content_block_stop", index=0)

    @property
    def content(self) -> list[dict[str, Any]]:
        """The block. Its content is None if the model wrote no complete summary."""
        summary = self.output.text.strip() if self._is_complete else ""
        fields = {"content": summary or None, "signature": SIGNATURE}
        return [{"type": "compaction", **fields, "tool_changes": self._tool_changes}]

    def stop_fields(self, finished: Finished) -> dict[str, Any]:
        return {"stop_reason": "compaction", "stop_sequence": None}

"""Reading of a response's generation: its items, and the events of its stream."""

import itertools
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvkeep.chat.output import TextDelta
from kvkeep.chat.output_reader import OutputReader
from kvkeep.engine import Finished, GeneratedToken, PrefillProgress
from kvkeep.models.text.codec import TextCodec
from kvkeep.server.answer_tokens import AnswerTokens, Attributed
from kvkeep.server.chat_input import StopAfterFirstCall, is_cut_off
from kvkeep.server.errors import ApiError
from kvkeep.server.generation_stream import StreamEvent
from kvkeep.server.openai.response_items import ItemEvent, ResponseItems
from kvkeep.server.openai.usage import logprobs_entry
from kvkeep.server.sse import sse_event


class ResponseReading:
    """Reads the tokens of a response, and makes its items of them."""

    def __init__(
        self,
        reader: OutputReader,
        items: ResponseItems,
        codec: TextCodec,
        early_end: StopAfterFirstCall | None = None,
        generates: bool = True,
    ):
        """early_end: ends the generation with its only call; None if there may be several.

        generates: whether there is an answer, and not the evaluation of the prompt alone.
        """
        self.status = "in_progress"
        self._answer, self._items, self._codec = AnswerTokens(reader), items, codec
        self._early_end, self._generates = early_end, generates

    @property
    def reasoning_tokens(self) -> int:
        """The number of tokens of the reasoning."""
        return self._answer.reasoning_tokens

    @property
    def output(self) -> list[dict[str, Any]]:
        """The items so far."""
        return self._items.items

    def begin(self) -> Iterator[ItemEvent]:
        """Yield the events of items that precede the answer."""
        yield from self._items.begin()

    def push(self, event: GeneratedToken | Finished) -> Iterator[ItemEvent]:
        """Yield the events of the stream that follow from the generation's next event."""
        if isinstance(event, GeneratedToken):
            yield from self._push_outputs(self._answer.push(event))
        elif not self._generates:
            self.status = "completed"
        else:
            yield from self._push_outputs(self._answer.push(event))
            is_partial = self._items.ends_with_partial_call or is_cut_off(event, self._early_end)
            self.status = "incomplete" if is_partial else "completed"
            yield from self._items.finish(self.status)

    def read(self, event: StreamEvent) -> None:
        """Read the generation's next event."""
        if not isinstance(event, PrefillProgress):
            deque(self.push(event), maxlen=0)

    def _push_outputs(self, parts: Sequence[Attributed]) -> Iterator[ItemEvent]:
        events = [event for event, _ in parts]
        if self._early_end is not None:
            events = self._early_end.up_to_first_call(events)
        for event, tokens in parts[: len(events)]:
            logprobs = []
            if isinstance(event, TextDelta):
                logprobs = [logprobs_entry(self._codec, token) for token in tokens if token.logprob]
            yield from self._items.push(event, logprobs)


class EventEncoder:
    """Encodes the events of one stream, numbered from 0."""

    def __init__(self) -> None:
        self._numbers = itertools.count()

    def encode(self, event_type: str, **fields: Any) -> bytes:
        data = {"type": event_type, "sequence_number": next(self._numbers), **fields}
        return sse_event(data, event_type)

    def failure(self, response: Mapping[str, Any], error: ApiError) -> Iterator[bytes]:
        """Yield the last events of a stream that failed. response: as far as it came."""
        code = str(error.code or error.error_type)
        yield self.encode("error", code=code, message=error.message, param=error.param)
        details = {"code": code, "message": error.message}
        failed = {**response, "status": "failed", "error": details}
        yield self.encode("response.failed", response=failed)

"""Answers of `/api/chat` and `/api/generate`: whole, or as lines of JSON (NDJSON)."""

import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from starlette.responses import StreamingResponse

from kvkeep.chat.ollama_chat import format_call
from kvkeep.chat.output import (
    CallArguments,
    CallEnded,
    CallStarted,
    GeneratedCall,
    OutputEvent,
    ReasoningDelta,
    TextDelta,
)
from kvkeep.engine import Finished, GeneratedToken, Usage
from kvkeep.models.text.codec import TextCodec
from kvkeep.server.alignment import own_fields
from kvkeep.server.errors import logged_api_error
from kvkeep.server.openai.usage import logprobs_entry
from kvkeep.server.sse import KeepaliveResponse, OnClose, json_line

NDJSON: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The result; lines of JSON unless `stream` is false.",
        "content": {"application/json": {"schema": {}}, "application/x-ndjson": {}},
    }
}
_DONE_REASONS = {"eos": "stop", "stop": "stop", "length": "length", "full": "length"}


@dataclass
class AnswerFormat:
    """Formats the answer to one request.

    in_message: in `message`, as `/api/chat` has it, or else in `response`, as `/api/generate`.
    """

    model_name: str
    tokenizer: TextCodec
    in_message: bool
    _call: GeneratedCall | None = field(default=None, init=False)  # begun and not ended
    _call_count: int = field(default=0, init=False)

    def content(
        self, events: Sequence[OutputEvent], tokens: Sequence[GeneratedToken] = ()
    ) -> dict[str, Any]:
        """Return the fields of a part of the answer; {} if it has no content.

        A call that was cut off is text, the beginning of its JSON, since clients run the calls that
        they get.
        """
        text, thinking, calls = "", "", []
        for event in events:
            match event:
                case TextDelta():
                    text += event.text
                case ReasoningDelta():
                    thinking += event.text
                case CallStarted():
                    self._call = GeneratedCall(event.id, event.name, "")
                case CallArguments():
                    assert self._call is not None
                    arguments = self._call.arguments + event.delta
                    self._call = GeneratedCall(self._call.id, self._call.name, arguments)
                case CallEnded(complete=True):
                    assert self._call is not None
                    calls.append(format_call(self._call.message_part(), self._call_count))
                    self._call_count += 1
                case CallEnded():
                    assert self._call is not None
                    name = json.dumps(self._call.name, ensure_ascii=False)
                    text += f'{{"name": {name}, "arguments": {self._call.arguments}'
        logprobs = [logprobs_entry(self.tokenizer, token) for token in tokens if token.logprob]
        if not (text or thinking or calls or logprobs):
            return {}
        return self._fields(text, thinking, calls) | ({"logprobs": logprobs} if logprobs else {})

    def empty(self) -> dict[str, Any]:
        """Return the fields of a part without content."""
        return self._fields("", "", [])

    def _fields(self, text: str, thinking: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        more: dict[str, Any] = {"thinking": thinking} if thinking else {}
        if calls:
            more["tool_calls"] = calls
        if self.in_message:
            return {"message": {"role": "assistant", "content": text, **more}}
        return {"response": text, **more}

    def chunk(self, fields: dict[str, Any], **more: Any) -> dict[str, Any]:
        created_at = datetime.now(UTC).isoformat()
        return {"model": self.model_name, "created_at": created_at, "done": False, **fields, **more}

    def last(self, fields: dict[str, Any], finished: Finished, **more: Any) -> dict[str, Any]:
        done = {"done": True, "done_reason": _DONE_REASONS[finished.reason]}
        usage = finished.usage
        return self.chunk(fields, **done, **_durations(usage), **own_fields(usage), **more)


def _durations(usage: Usage) -> dict[str, int]:
    """Return token counts, and times in nanoseconds."""
    seconds = (usage.queue_seconds, usage.prefill_seconds, usage.decode_seconds)
    queue, prefill, decode = (round(value * 1e9) for value in seconds)
    return {
        "total_duration": queue + prefill + decode,
        "load_duration": queue,
        "prompt_eval_count": usage.prompt,
        "prompt_eval_duration": prefill,
        "eval_count": usage.generated,
        "eval_duration": decode,
    }


def ndjson_response(
    chunks: AsyncIterator[dict[str, Any]], on_close: OnClose, keepalive: dict[str, Any]
) -> StreamingResponse:
    """Return a streaming response. keepalive: sent at once, and while there are no chunks.

    on_close: see `KeepaliveResponse`.
    """

    async def lines() -> AsyncIterator[bytes]:
        yield _line(keepalive)
        try:
            async for chunk in chunks:
                yield _line(chunk)
        except Exception as error:  # the status is already sent
            yield _line(logged_api_error(error, "a stream of lines failed").ollama_body())

    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return KeepaliveResponse(
        *(lines(), _line(keepalive), on_close), media_type="application/x-ndjson", headers=headers
    )


def _line(fields: dict[str, Any]) -> bytes:
    return f"{json_line(fields)}\n".encode()

"""Server-sent events: their wire form (HTML standard), and their OpenAPI descriptions."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from kvkeep.server.errors import ApiError, logged_api_error

OnClose = Callable[[], Awaitable[None]] | None
DONE = b"data: [DONE]\n\n"  # the last event of a stream of OpenAI's API
_COMMENT = b": keepalive\n\n"
_FIRST_SILENCE_SECONDS, _SILENCE_SECONDS = 1.0, 5.0
_EVENT_STREAM_CONTENT: dict[str, Any] = {"text/event-stream": {}}
EVENTS: dict[int | str, dict[str, Any]] = {
    200: {"description": "Server-sent events.", "content": _EVENT_STREAM_CONTENT}
}
JSON_OR_EVENTS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The result; server-sent events if `stream` is true.",
        "content": {"application/json": {"schema": {}}, **_EVENT_STREAM_CONTENT},
    }
}


def json_line(data: Any) -> str:
    """Return a JSON value as text in which no client finds the end of a line.

    Some split streams as `str.splitlines` does, also at U+0085, U+2028 and U+2029, which JSON
    permits in its texts.
    """
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "\x85\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def sse_event(data: Any, event_type: str | None = None) -> bytes:
    """Encode an event. data: a JSON value. event_type: for APIs that have types."""
    event_line = f"event: {event_type}\n" if event_type else ""
    return f"{event_line}data: {json_line(data)}\n\n".encode()


def sse_response(
    events: AsyncIterator[bytes],
    on_close: OnClose,
    error_event: str | None = None,
    error_body: Callable[[ApiError], dict[str, Any]] = ApiError.openai_body,
    keepalive: bytes = _COMMENT,
) -> StreamingResponse:
    """Return a streaming response. error_event, error_body: type and data of an error's event.

    on_close: see `KeepaliveResponse`. keepalive: what is sent while there are no events.
    """

    async def events_or_error() -> AsyncIterator[bytes]:
        try:
            async for event in events:
                yield event
        except Exception as error:  # the status is already sent
            api_error = logged_api_error(error, "a stream of events failed")
            yield sse_event(error_body(api_error), error_event)

    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}  # for proxies
    return KeepaliveResponse(
        events_or_error(), keepalive, on_close, media_type="text/event-stream", headers=headers
    )


class KeepaliveResponse(StreamingResponse):
    """A streaming response that sends something after a second, and after each 5 s of silence.

    Clients and proxies would otherwise give up during a long prefill.
    """

    def __init__(
        self,
        content: AsyncIterator[bytes],
        keepalive: bytes,
        on_close: OnClose = None,
        **options: Any,
    ):
        """content: each item must be a whole event, since keepalives are sent between items.

        on_close: releases what the content uses, whether it was iterated or not: of a client that
        is gone before its first item, not even the content's `finally` blocks run.
        """
        super().__init__(content, **options)
        self._keepalive, self._on_close = keepalive, on_close
        self._last_sent = 0.0  # time of the event loop

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            if self._on_close is not None:
                await asyncio.shield(self._on_close())

    async def stream_response(self, send: Send) -> None:
        loop = asyncio.get_running_loop()

        async def send_and_note(message: Message) -> None:
            await send(message)
            self._last_sent = loop.time()
            # A client that is gone is noticed in the loop. Without a pause, events that are ready
            # would be written to its closed connection, of which asyncio warns.
            await asyncio.sleep(0)

        keepalives: asyncio.Task[None] | None = None

        async def send_and_keep_alive(message: Message) -> None:
            nonlocal keepalives
            if message["type"] == "http.response.body" and not message.get("more_body"):
                await _cancelled(keepalives)  # nothing may follow the end
                keepalives = None
            await send_and_note(message)
            if message["type"] == "http.response.start":
                keepalives = asyncio.create_task(self._send_keepalives(send_and_note))

        try:
            await super().stream_response(send_and_keep_alive)
        finally:
            await _cancelled(keepalives)

    async def _send_keepalives(self, send: Send) -> None:
        loop, first_silence = asyncio.get_running_loop(), _FIRST_SILENCE_SECONDS
        while True:
            silence = loop.time() - self._last_sent
            if silence < first_silence:
                await asyncio.sleep(first_silence - silence)
                continue
            first_silence = _SILENCE_SECONDS
            body = {"type": "http.response.body", "body": self._keepalive, "more_body": True}
            await send(body)


async def _cancelled(task: asyncio.Task[None] | None) -> None:
    """Cancel a task, if there is one, and wait for its end."""
    if task is not None:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task

"""Server-sent events: their wire form (HTML standard), and their OpenAPI descriptions."""

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.responses import StreamingResponse

from kvkeep.server.errors import ApiError, api_error_for

DONE = b"data: [DONE]\n\n"  # the last event of a stream of OpenAI's API
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


def sse_event(data: Any, event_type: str | None = None) -> bytes:
    """Encode an event. data: a JSON value. event_type: for APIs that have types."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    event_line = f"event: {event_type}\n" if event_type else ""
    return f"{event_line}data: {text}\n\n".encode()


def sse_response(
    events: AsyncIterator[bytes],
    error_event: str | None = None,
    error_body: Callable[[ApiError], dict[str, Any]] = ApiError.openai_body,
) -> StreamingResponse:
    """Return a streaming response. error_event, error_body: type and data of an error's event."""

    async def events_or_error() -> AsyncIterator[bytes]:
        try:
            async for event in events:
                yield event
        except Exception as error:  # the status is already sent
            yield sse_event(error_body(api_error_for(error)), error_event)

    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}  # for proxies
    return StreamingResponse(events_or_error(), media_type="text/event-stream", headers=headers)

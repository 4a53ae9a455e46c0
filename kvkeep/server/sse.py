"""Server-sent events: their wire form (HTML standard), and their OpenAPI descriptions."""

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.responses import StreamingResponse

from kvkeep.server.errors import ApiError, api_error_for

DONE = b"data: [DONE]\n\n"  # ends a stream of OpenAI's API
_CONTENT: dict[str, Any] = {"text/event-stream": {}}
EVENTS: dict[int | str, dict[str, Any]] = {
    200: {"description": "Server-sent events.", "content": _CONTENT}
}
JSON_OR_EVENTS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The result; server-sent events if `stream` is true.",
        "content": {"application/json": {"schema": {}}, **_CONTENT},
    }
}


def sse_event(data: Any, name: str | None = None) -> bytes:
    """Encode one event. data: a JSON value; name: the event type, for APIs that have types."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    event_line = f"event: {name}\n" if name else ""
    return f"{event_line}data: {text}\n\n".encode()


def openai_error_event(error: ApiError) -> bytes:
    return sse_event(error.openai_body())


def sse_response(
    events: AsyncIterator[bytes], error_event: Callable[[ApiError], bytes] = openai_error_event
) -> StreamingResponse:
    """Return a streaming response with headers that keep proxies from caching and buffering.

    error_event: encodes the last event of a stream that fails.
    """
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    stream = _with_error_event(events, error_event)
    return StreamingResponse(stream, media_type="text/event-stream", headers=headers)


async def _with_error_event(
    events: AsyncIterator[bytes], error_event: Callable[[ApiError], bytes]
) -> AsyncIterator[bytes]:
    try:
        async for event in events:
            yield event
    except Exception as error:  # the status is already sent
        yield error_event(api_error_for(error))

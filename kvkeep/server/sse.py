"""Server-sent events: their wire form (HTML standard), and their OpenAPI descriptions."""

import json
from collections.abc import AsyncIterator
from typing import Any

from starlette.responses import StreamingResponse

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
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {text}\n\n".encode()


def sse_response(events: AsyncIterator[bytes]) -> StreamingResponse:
    """Return a streaming response that proxies are told neither to cache nor to buffer."""
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(events, media_type="text/event-stream", headers=headers)

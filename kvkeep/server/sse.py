"""Server-sent events, as the HTML standard has them."""

import json
from collections.abc import AsyncIterator
from typing import Any

from starlette.responses import StreamingResponse

DONE = b"data: [DONE]\n\n"  # how OpenAI's API ends a stream


def event(data: Any, name: str | None = None) -> bytes:
    """One event. data: a JSON value; name: its kind, for APIs that name them."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {text}\n\n".encode()


def stream(events: AsyncIterator[bytes]) -> StreamingResponse:
    """They reach the client as they come: nothing between may keep them back."""
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(events, media_type="text/event-stream", headers=headers)

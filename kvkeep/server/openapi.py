"""The OpenAPI document: what every route may answer beside what it is for."""

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel


class ErrorFields(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | int | None = None


class Error(BaseModel):
    """How an error is told, but at /v1/messages, which tells it as Anthropic's API does."""

    error: ErrorFields


ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": what, "model": Error}
    for status, what in (
        (400, "What was asked is malformed, or cannot be done."),
        (401, "There is no such key."),
        (403, "A page that asks is not allowed to."),
        (404, "There is nothing of that name."),
        (405, "Not by that method."),
        (409, "The session reads or writes."),
        (412, "The session is at another revision."),
        (413, "The body is too large."),
        (421, "The server is asked by another host's name."),
        (429, "There is no room now; Retry-After says when to come back."),
        (500, "Something failed inside."),
        (503, "The server is about to end."),
    )
}


_EVENTS: dict[str, Any] = {"text/event-stream": {}}
EVENTS: dict[int | str, dict[str, Any]] = {
    200: {"description": "Server-sent events.", "content": _EVENTS}
}
STREAMED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer; server-sent events where `stream` is true.",
        "content": {"application/json": {"schema": {}}, **_EVENTS},
    }
}


def describe(app: FastAPI) -> None:
    """Makes the document say what is answered to a malformed request: 400, and not 422."""
    usual = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = usual()
            for path in document["paths"].values():
                for operation in path.values():
                    operation["responses"].pop("422", None)
            for name in ("HTTPValidationError", "ValidationError"):
                document["components"]["schemas"].pop(name, None)
        assert app.openapi_schema is not None
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]

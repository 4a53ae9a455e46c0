"""Errors as HTTP clients see them: status, body in the form of each API, and OpenAPI schema."""

import logging
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from kvkeep import errors

_log = logging.getLogger("kvkeep.server")
CONTEXT_LENGTH_CODE = "context_length_exceeded"
ANTHROPIC_PATH = "/v1/messages"
OLLAMA_PATHS = "/api/"  # the beginning of the paths of Ollama's API
# pydantic's errors of values that have the right type, and the names of types in its unions.
_NUMBER_ERRORS = {"greater_than", "greater_than_equal", "less_than", "less_than_equal"}
_SIZE_ERRORS = {*_NUMBER_ERRORS, "string_too_long", "too_long", "value_error"}
_TYPE_LABEL = re.compile(
    r"[\[(]|^(str|int|float|bool|tuple|list|dict|[A-Z]\w*[a-z][A-Z]\w*)$|^constrained-"
)
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    409: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


@dataclass
class ApiError(Exception):
    """An error response. error_type: OpenAI's `type`; param: the invalid field; extra: others.

    closes: whether the connection is closed, since it is unclear where the request ends. details:
    for programs, in Anthropic's form.
    """

    status: int
    message: str
    error_type: str = "invalid_request_error"
    code: str | None = None
    param: str | None = None
    retry_after: float | None = None  # seconds
    extra: Mapping[str, Any] | None = None
    closes: bool = False
    details: Mapping[str, Any] | None = None

    def openai_body(self) -> dict[str, Any]:
        """Return OpenAI's form of the body. `code` defaults to the status, as in llama.cpp."""
        fields = {"message": self.message, "type": self.error_type, "param": self.param}
        return {"error": {**fields, "code": self.code or self.status, **(self.extra or {})}}

    def anthropic_body(self) -> dict[str, Any]:
        """Return Anthropic's form, with its words for a prompt that is too long."""
        error_type, message = _ANTHROPIC_TYPES.get(self.status, self.error_type), self.message
        extra = self.extra or {}
        if "n_prompt_tokens" in extra:
            limit = min(extra["n_ctx"], extra["n_prompt_tokens"] - 1)  # room for one token more
            message = f"prompt is too long: {extra['n_prompt_tokens']} tokens > {limit} maximum"
        details = {} if self.details is None else {"details": dict(self.details)}
        return {"type": "error", "error": {"type": error_type, "message": message, **details}}

    def ollama_body(self) -> dict[str, Any]:
        return {"error": self.message}

    def body(self, path: str) -> dict[str, Any]:
        """Return the body in the form of the API that the request's path belongs to."""
        if path.startswith(ANTHROPIC_PATH):
            return self.anthropic_body()
        return self.ollama_body() if path.startswith(OLLAMA_PATHS) else self.openai_body()

    def response(self, path: str) -> JSONResponse:
        """Return the HTTP response. path: of the request."""
        headers = {}
        if self.retry_after is not None:
            headers["Retry-After"] = str(math.ceil(self.retry_after))
        if self.closes:
            headers["Connection"] = "close"
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.body(path), self.status, headers)


# The types of errors that are not logged: their messages say what a client has to know.
EXPECTED_ERRORS = (ApiError, errors.KvkeepError, RequestValidationError, HTTPException)


def api_error_for(error: BaseException) -> ApiError:
    """Return the error response for an exception; unknown exceptions reveal no internals."""
    message = str(error)
    match error:
        case ApiError():
            return error
        case RequestValidationError():
            return _malformed_request_error(error.errors())
        case HTTPException():
            error_type = "not_found_error" if error.status_code == 404 else "invalid_request_error"
            return ApiError(error.status_code, str(error.detail), error_type)
        case errors.NoSuchSession():
            return ApiError(404, message, "not_found_error", "session_not_found")
        case errors.NoSuchSnapshot():
            return ApiError(404, message, "not_found_error", "snapshot_not_found")
        case errors.NoSuchPin():
            return ApiError(404, message, "not_found_error", "pin_not_found")
        case errors.InvalidArgument() | errors.UnsupportedModel():
            return ApiError(400, message)
        case errors.ContextFull():
            message = f"the request exceeds the available context size: {message}"
            return ApiError(400, message, "exceed_context_size_error", CONTEXT_LENGTH_CODE)
        case errors.Busy():
            return ApiError(409, message, "conflict_error", "session_busy")
        case errors.WrongRevision():
            return ApiError(412, message, "conflict_error", "wrong_revision")
        case errors.NoRoom() if math.isinf(error.retry_after):  # it can never fit
            return ApiError(400, message, "invalid_request_error", "too_large")
        case errors.NoRoom():
            return ApiError(429, message, "rate_limit_error", retry_after=error.retry_after)
        case errors.Cancelled():
            return ApiError(503, message, "unavailable_error", "cancelled", retry_after=1.0)
        case errors.HeldElsewhere():
            retry_after = max(1.0, error.until - time.time())
            extra = {"writer": error.writer}
            return ApiError(409, message, "conflict_error", "held", None, retry_after, extra)
        case errors.Moved():
            return ApiError(409, message, "conflict_error", "moved", retry_after=1.0)
        case errors.Locked():
            return ApiError(409, message, "conflict_error", "locked")
        case errors.KvkeepError():
            return ApiError(500, message, "server_error")
    return ApiError(500, "internal server error; see the server's log", "server_error")


def logged_api_error(error: Exception, place: str) -> ApiError:
    """Return the error response for an exception, and log one that is not expected.

    place: where it was raised, in words.
    """
    if not isinstance(error, EXPECTED_ERRORS):
        _log.error("%s", place, exc_info=error)
    return api_error_for(error)


def _malformed_request_error(details: Sequence[Any]) -> ApiError:
    """details: pydantic's descriptions of the errors. The first one is reported.

    Of a field with several types, it is that of the type which the value has, but for its size; or
    else the deepest in the value, which is of the type that was meant.
    """
    field = [each for each in details if each["loc"][:2] == details[0]["loc"][:2]]
    deepest = max(field, key=lambda each: len(each["loc"]))
    detail = next((each for each in field if each["type"] in _SIZE_ERRORS), deepest)
    param = ".".join(str(part) for part in detail["loc"][1:] if not _TYPE_LABEL.search(str(part)))
    found, message = detail.get("input"), str(detail["msg"]).removeprefix("Value error, ")
    if detail["type"] in _NUMBER_ERRORS:
        message += f"; found {found!r:.100}"
    elif detail["type"] == "string_too_long":
        message += f"; found {len(str(found))}"
    return ApiError(400, f"{param}: {message}" if param else message, param=param or None)


class ErrorFields(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | int | None = None


class ErrorBody(BaseModel):
    """An error in OpenAI's format; the routes of Anthropic's and Ollama's APIs use theirs."""

    error: ErrorFields | str  # Ollama's is a text


ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"description": description, "model": ErrorBody}
    for status, description in (
        (400, "The request is malformed or cannot be processed."),
        (401, "The API key is missing or unknown."),
        (403, "The origin of the page is not allowed."),
        (404, "There is nothing with that name."),
        (405, "The method is not allowed."),
        (408, "The body did not arrive in time."),
        (409, "The session is busy."),
        (412, "The session is at another revision."),
        (413, "The body is too large."),
        (421, "The Host header is not allowed."),
        (429, "The server is at its limit; Retry-After says when to try again."),
        (500, "The server failed."),
        (503, "The server is shutting down."),
    )
}

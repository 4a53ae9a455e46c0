"""Errors as clients of each API know them: a status, and a body that says what to do."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.responses import JSONResponse

from kvkeep import errors


@dataclass
class Problem(Exception):
    """An error that an HTTP client is told. kind: as OpenAI's `type`; code: for programs."""

    status: int
    message: str
    kind: str = "invalid_request_error"
    code: str | None = None
    param: str | None = None
    retry_after: float | None = None
    more: Mapping[str, Any] | None = None

    def body(self) -> dict[str, Any]:
        """As OpenAI's API has it, with llama.cpp's number beside it."""
        fields = {"message": self.message, "type": self.kind, "param": self.param}
        return {"error": {**fields, "code": self.code or self.status, **(self.more or {})}}

    def anthropic(self) -> dict[str, Any]:
        """As Anthropic's API has it."""
        return {"type": "error", "error": {"type": self.kind, "message": self.message}}

    def response(self, anthropic: bool = False) -> JSONResponse:
        headers = {}
        if self.retry_after is not None:
            headers["Retry-After"] = str(math.ceil(self.retry_after))
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        body = self.anthropic() if anthropic else self.body()
        return JSONResponse(body, self.status, headers)


def problem_of(error: BaseException) -> Problem:
    """What a client is told of an error. What is not ours says nothing of the inside."""
    message = str(error)
    match error:
        case Problem():
            return error
        case errors.NoSuchSession():
            return Problem(404, message, "not_found_error", "session_not_found")
        case errors.InvalidArgument() | errors.UnsupportedModel():
            return Problem(400, message)
        case errors.ContextFull():
            return Problem(400, message, "exceed_context_size_error")
        case errors.Busy():
            return Problem(409, message, "conflict_error", "session_busy")
        case errors.WrongRevision():
            return Problem(412, message, "conflict_error", "wrong_revision")
        case errors.NoRoom() if math.isinf(error.retry_after):
            return Problem(400, message, "invalid_request_error", "too_large")
        case errors.NoRoom():
            return Problem(429, message, "rate_limit_error", None, None, error.retry_after)
        case errors.Cancelled():
            return Problem(503, message, "unavailable_error", "cancelled", None, 1.0)
        case errors.HeldElsewhere():
            wait = max(1.0, error.until - time.time())
            more = {"writer": error.writer}
            return Problem(409, message, "conflict_error", "held", None, wait, more)
        case errors.Moved():
            return Problem(409, message, "conflict_error", "moved", None, 1.0)
        case errors.Locked():
            return Problem(409, message, "conflict_error", "locked")
        case errors.KvkeepError():
            return Problem(500, message, "server_error")
    return Problem(500, "something failed inside the server; its log says what", "server_error")

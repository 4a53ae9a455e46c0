"""Idempotent changes of sessions: a request repeated with its `Idempotency-Key` runs once.

As in the IETF draft of that header: a client that repeats a request because the response was lost
receives the first response again. The newest 1,000 keys are remembered, in this process only.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.types import Message, Receive, Scope, Send

from kvkeep.server.errors import ApiError

_METHODS = frozenset(("POST", "PUT", "DELETE"))
_PATHS = ("/v1/sessions", "/v1/snapshots")
_TRANSIENT = frozenset((401, 409, 412, 429, 503))  # statuses after which a retry may succeed
_MAX_KEYS = 1_000
_MAX_RESPONSE = 100_000  # bytes of a response that is remembered
MAX_KEY_LENGTH = 200  # characters


@dataclass
class _KeyedRequest:
    key: tuple[str, str]  # the owner and the key
    digest: str  # of the request
    messages: list[Message] = field(default_factory=list)  # of the response
    complete: bool = False  # whether `messages` are the whole response


class IdempotencyMiddleware:
    """Middleware between the security checks and the routes. Keys belong to `scope["owner"]`."""

    def __init__(self, app: Any):
        self._app = app
        self._requests: OrderedDict[tuple[str, str], _KeyedRequest] = OrderedDict()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        key = _idempotency_key(scope)
        if key is None:
            await self._app(scope, receive, send)
            return
        try:
            await self._run_once(key, scope, receive, send)
        except ApiError as error:
            await error.response()(scope, receive, send)

    async def _run_once(self, key: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Run a request, or repeat the response to an earlier one. Raises ApiError."""
        if not 0 < len(key) <= MAX_KEY_LENGTH:
            raise bad_key_error()
        body = await read_body(receive)
        if body is None:
            return
        content = b"\0".join((scope["method"].encode(), scope["path"].encode(), body))
        owned_key = (str(scope.get("owner")), key)
        request = _KeyedRequest(owned_key, hashlib.sha256(content).hexdigest())
        earlier = self._requests.get(owned_key)
        if earlier is None:
            messages: list[Message] = [{"type": "http.request", "body": body}]
            await self._run(request, scope, replay(messages, receive), send)
        elif earlier.digest != request.digest:
            raise key_reused_error()
        elif not earlier.complete:
            message = "the request with this Idempotency-Key is still running"
            raise ApiError(409, message, "conflict_error", "key_at_work")
        else:
            for response_message in earlier.messages:
                await send(dict(response_message))

    async def _run(
        self, request: _KeyedRequest, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Run a request, and remember its response unless a retry may succeed."""
        self._requests[request.key] = request
        size = 0

        async def record_and_send(message: Message) -> None:
            nonlocal size
            size += len(message.get("body", b""))
            if size <= _MAX_RESPONSE:
                request.messages.append(dict(message))
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                request.complete = size <= _MAX_RESPONSE
            await send(message)

        try:
            await self._app(scope, receive, record_and_send)
        finally:
            status = request.messages[0]["status"] if request.messages else 503
            if not request.complete or status in _TRANSIENT or status >= 500:
                self._requests.pop(request.key, None)
            while len(self._requests) > _MAX_KEYS:
                self._requests.popitem(last=False)


def _idempotency_key(scope: Scope) -> str | None:
    """Return the key of a request that changes sessions or snapshots."""
    changes = scope["type"] == "http" and scope["method"] in _METHODS
    if not changes or not scope["path"].startswith(_PATHS):
        return None
    key = dict(scope["headers"]).get(b"idempotency-key")
    return None if key is None else key.decode("latin-1")


def bad_key_error() -> ApiError:
    return ApiError(400, f"an Idempotency-Key has 1 to {MAX_KEY_LENGTH} characters")


def key_reused_error() -> ApiError:
    message = "this Idempotency-Key was used with another request"
    return ApiError(400, message, code="key_reused")


async def read_body(receive: Receive) -> bytes | None:
    """Read a request's whole body. Returns None if the client disconnects first."""
    try:
        return await HttpRequest({"type": "http"}, receive).body()
    except ClientDisconnect:
        return None


def replay(messages: Iterable[Message], receive: Receive) -> Receive:
    """Return a `receive` that returns these messages again, then later ones."""
    replayed = iter(messages)

    async def receive_again() -> Message:
        message = next(replayed, None)
        return await receive() if message is None else message

    return receive_again

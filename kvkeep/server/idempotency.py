"""Idempotent changes of sessions: a request repeated with its `Idempotency-Key` runs once.

As in the IETF draft of that header: a client that repeats a request because the response was lost
receives the first response again, or status 409 if that was too large to be kept. The newest 1,000
keys are remembered, in this process only.

A request whose connection is lost goes on for a while, so that a retry finds it whole. A stream
ends at once, also before its response starts: its client closes the connection to cancel the rest.
A detached turn goes on once it was admitted, and its response is remembered. A response with a
transient error is not, nor a stream that ends with an error.
"""

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import pydantic
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.types import Message, Receive, Scope, Send

from kvkeep.server.errors import ApiError
from kvkeep.server.limits import parse_json

_CHANGING_METHODS = frozenset(("POST", "PUT", "DELETE"))
COMPACTION_PATHS = ("/v1/responses/compact", "/responses/compact")
_PATH_PREFIXES = ("/v1/sessions", "/v1/snapshots", *COMPACTION_PATHS)
_TRANSIENT_STATUSES = frozenset((401, 409, 412, 429, 503))  # a retry may succeed
_MAX_KEYS = 1_000  # of all owners together; older ones are forgotten
_MAX_RESPONSE_BYTES = 100_000  # of a response that is remembered
MAX_KEY_LENGTH = 200  # characters
_RETRY_SECONDS = 10.0  # for which a request goes on whose client is gone, after its last retry
_POLL_SECONDS = 0.1
_STREAM_TYPES = (b"text/event-stream", b"application/x-ndjson")
_NO_EVENTS = (b": keepalive", b"data: [DONE]")  # which may follow an error
_ERROR_TYPES = ("error", "response.failed")  # of events' data


@dataclass
class _KeyedRequest:
    owner_and_key: tuple[str, str]
    request_digest: str  # of method, path and body: a repeated request has the same
    response_start: Message | None = None
    response_body: bytearray = field(default_factory=bytearray)
    response_complete: bool = False  # whether it was sent to its end
    response_bytes: int = 0
    is_stream: bool = False
    is_detached: bool = False  # whether it goes on without its client
    last_event: bytes = b""  # of a stream
    retry_deadline: float = 0.0  # of time.monotonic(), once the client is gone

    @property
    def is_too_large(self) -> bool:
        """Whether the response's body is not kept whole."""
        return self.response_bytes > _MAX_RESPONSE_BYTES

    @property
    def has_failed(self) -> bool:
        """Whether a retry may succeed."""
        if self.response_start is None or not self.response_complete:
            return True
        status = self.response_start["status"]
        return status in _TRANSIENT_STATUSES or status >= 500 or _is_error(self.last_event)

    def record(self, message: Message) -> None:
        """Add a message of the response to what is kept of it."""
        if message["type"] == "http.response.start":
            self.response_start = dict(message)  # outer middleware adds headers to the message
            content_type = dict(message.get("headers", ())).get(b"content-type", b"")
            self.is_stream = content_type.startswith(_STREAM_TYPES)
            return
        body = message.get("body", b"")
        if self.is_stream and body.strip() and body.strip() not in _NO_EVENTS:
            self.last_event = body
        self.response_bytes += len(body)
        if self.is_too_large:
            self.response_body.clear()
        else:
            self.response_body += body
        self.response_complete = not message.get("more_body", False)

    async def repeat_response(self, send: Send) -> None:
        assert self.response_start is not None, "the response must be complete"
        await send(dict(self.response_start))
        await send({"type": "http.response.body", "body": bytes(self.response_body)})

    @property
    def awaits_retry(self) -> bool:
        """Whether it goes on, although its client is gone."""
        if self.is_detached and self.response_start is not None:  # it was admitted
            return not self.response_complete
        return not self.is_stream and time.monotonic() < self.retry_deadline

    def expect_retry(self) -> None:
        self.retry_deadline = time.monotonic() + _RETRY_SECONDS


class IdempotencyMiddleware:
    """Middleware between the security checks and the routes. Keys belong to `scope["owner"]`.

    path_prefixes, methods: of the requests whose keys count.
    """

    def __init__(
        self,
        app: Any,
        path_prefixes: tuple[str, ...] = _PATH_PREFIXES,
        methods: Collection[str] = _CHANGING_METHODS,
    ):
        self._app, self._path_prefixes, self._methods = app, path_prefixes, methods
        self._requests: OrderedDict[tuple[str, str], _KeyedRequest] = OrderedDict()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        key = self._idempotency_key(scope)
        if key is None:
            await self._app(scope, receive, send)
            return
        try:
            await self._run_once(key, scope, receive, send)
        except ApiError as error:
            await error.response(scope["path"])(scope, receive, send)

    def _idempotency_key(self, scope: Scope) -> str | None:
        """Return the key of a request that changes sessions or snapshots, or compacts."""
        may_change = scope["type"] == "http" and scope["method"] in self._methods
        if not may_change or not scope["path"].startswith(self._path_prefixes):
            return None
        key = dict(scope["headers"]).get(b"idempotency-key")
        return None if key is None else key.decode("latin-1")

    async def _run_once(self, key: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Run a request, or repeat the response to an earlier one. Raises ApiError."""
        if not 0 < len(key) <= MAX_KEY_LENGTH:
            raise bad_key_error()
        body = await read_body(receive)
        if body is None:
            return
        digest_input = b"\0".join((scope["method"].encode(), scope["path"].encode(), body))
        owner_and_key = (str(scope.get("owner")), key)
        request = _KeyedRequest(owner_and_key, hashlib.sha256(digest_input).hexdigest())
        earlier_request = self._requests.get(owner_and_key)
        if earlier_request is None:
            await self._run(request, body, scope, receive, send)
        elif earlier_request.request_digest != request.request_digest:
            raise key_reused_error()
        elif not earlier_request.response_complete:
            earlier_request.expect_retry()
            message = "the request with this Idempotency-Key is still running"
            raise ApiError(409, message, "conflict_error", "key_at_work", retry_after=1.0)
        elif earlier_request.is_too_large:
            raise response_too_long_error()
        else:
            await earlier_request.repeat_response(send)

    async def _run(
        self, request: _KeyedRequest, body: bytes, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Run a request, and remember its response unless a retry may succeed."""
        self._requests[request.owner_and_key] = request
        is_turn = scope["path"].endswith("/turns")
        request.is_detached = is_turn and _has_flag(body, b"detached")
        receive_again = replay([{"type": "http.request", "body": body}], receive)

        async def receive_while_awaited() -> Message:
            message = await receive_again()
            if message["type"] == "http.disconnect":
                request.expect_retry()
                if request.response_start is None:
                    request.is_stream = _has_flag(body, b"stream")
                while request.awaits_retry:
                    await asyncio.sleep(_POLL_SECONDS)
            return message

        async def record_and_send(message: Message) -> None:
            request.record(message)
            await send(message)

        try:
            await self._app(scope, receive_while_awaited, record_and_send)
        finally:
            if request.has_failed and self._requests.get(request.owner_and_key) is request:
                del self._requests[request.owner_and_key]
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        """Forget the oldest responses beyond the limit. Keys of running requests stay."""
        excess = max(0, len(self._requests) - _MAX_KEYS)
        complete = (key for key, request in self._requests.items() if request.response_complete)
        for key in list(islice(complete, excess)):
            del self._requests[key]


def _has_flag(body: bytes, name: bytes) -> bool:
    """Whether a body has a field that is true."""
    try:
        fields = parse_json(body) if name in body else None
        flag = fields.get(name.decode(), False) if isinstance(fields, dict) else False
        return pydantic.TypeAdapter(bool).validate_python(flag)
    except (ValueError, RecursionError):  # the route reports it
        return False


def _is_error(event: bytes) -> bool:
    """Whether an event of a stream is an error, in the form of any API."""
    for line in event.splitlines():
        name, _, value = line.partition(b": ")
        if name == b"event" and value.decode() in _ERROR_TYPES:
            return True
        data = value if name == b"data" else line  # a line of JSON in Ollama's API
        with suppress(ValueError, RecursionError):
            fields = parse_json(data)
            if isinstance(fields, dict) and (
                fields.get("error") or fields.get("type") in _ERROR_TYPES
            ):
                return True
    return False


def bad_key_error() -> ApiError:
    return ApiError(400, f"an Idempotency-Key must have 1 to {MAX_KEY_LENGTH} characters")


def response_too_long_error() -> ApiError:
    message = "the request with this key has completed, but its response was too long to store"
    return ApiError(409, f"{message}: fetch the session", "conflict_error", "key_answered")


def key_reused_error() -> ApiError:
    message = "this Idempotency-Key was already used with another request"
    return ApiError(400, message, code="key_reused")


async def read_body(receive: Receive) -> bytes | None:
    """Read a request's whole body. Returns None if the client disconnects first."""
    try:
        return await HttpRequest({"type": "http"}, receive).body()
    except ClientDisconnect:
        return None


def replay(messages: Iterable[Message], receive: Receive) -> Receive:
    """Return a `receive` that returns these messages again, then later ones."""
    remaining = iter(messages)

    async def receive_again() -> Message:
        message = next(remaining, None)
        return await receive() if message is None else message

    return receive_again

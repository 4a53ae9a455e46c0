"""A request that targets a session, and its response, withheld until the session is committed."""

import asyncio
import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import pydantic
import pydantic.dataclasses
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send

from kvkeep.fleet.session_target import SessionTarget, parse_json_object
from kvkeep.server.errors import ApiError
from kvkeep.server.idempotency import MAX_KEY_LENGTH, bad_key_error

_NOTES_KEY = "answered"  # key in a snapshot's notes (JSON), part of the stored format
_ASGI_VERSIONS = {"version": "3.0", "spec_version": "2.3"}  # starlette then watches for disconnects
_MAX_RECORDED_BODY_BYTES = 100_000  # longer bodies of responses are not recorded
_SEND_TIMEOUT_SECONDS = 60.0  # in which a client must take a message
_MAX_RECORDS = 256  # a session's newest responses that are recorded
_MAX_BODIES = 8  # of these, the newest keep their bodies
_DONE_EVENT, _ERROR_EVENT = b"event: done", b"event: error"


class WithheldResponse:
    """A response that tells the client of no success until `release`, after the commit.

    Of a stream of events only the last event is withheld; any other response is withheld whole.
    """

    def __init__(self, send: Send, max_body_bytes: int = 0):
        """send: to the client. max_body_bytes: a longer body is not kept for `body`."""
        self._send, self._max_body_bytes, self._body_size = send, max_body_bytes, 0
        self._withheld, self._body_parts = list[Message](), list[bytes]()
        self.status, self.headers = 0, Headers()
        self.started = False  # whether the client has received anything
        self._ended = False
        self._failed = False  # whether the stream has reported an error

    @property
    def succeeded(self) -> bool:
        """Whether the application has sent a complete response without an error."""
        return self._ended and 0 < self.status < 400 and not self._failed

    @property
    def body(self) -> bytes | None:
        """The body, or None if it was too long to keep."""
        return b"".join(self._body_parts) if self._body_size <= self._max_body_bytes else None

    async def send(self, message: Message) -> None:
        """Send or withhold a message of the application."""
        body = message.get("body", b"")
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], Headers(raw=message.get("headers", ()))
        is_stream = self.headers.get("content-type", "").startswith("text/event-stream")
        if message["type"] == "http.response.body":
            self._body_size += len(body)
            if self._body_size <= self._max_body_bytes:
                self._body_parts.append(body)
            self._failed = self._failed or (is_stream and body.startswith(_ERROR_EVENT))
            self._ended = self._ended or not message.get("more_body", False)
        is_last = body.startswith((_DONE_EVENT, _ERROR_EVENT)) or self._ended
        if self._withheld or is_last or not is_stream:  # what follows a withheld message is, too
            self._withheld.append(message)
        else:
            await self.send_now(message)

    async def send_now(self, message: Message) -> None:
        """Send a message at once, for requests that change nothing."""
        self.started = True
        await self._send(message)

    def report_saved(self) -> None:
        """Set `saved_revision` in a withheld session: it is released once that is committed."""
        if not self.succeeded or self.headers.get("content-type") != "application/json":
            return
        entry = json.loads(b"".join(message.get("body", b"") for message in self._withheld))
        if entry.get("object") != "session":
            return
        body = bytes(JSONResponse({**entry, "saved_revision": entry["revision"]}).body)
        headers = MutableHeaders(raw=list(self.headers.raw))
        headers["content-length"] = str(len(body))
        start = {**self._withheld[0], "headers": headers.raw}
        self._withheld = [start, {"type": "http.response.body", "body": body}]
        self._body_parts, self._body_size = [body], len(body)

    async def release(self) -> None:
        """Send the withheld messages."""
        withheld, self._withheld = self._withheld, []
        for message in withheld:
            await self._send(message)

    async def fail(self, error_response: JSONResponse, error_event: bytes) -> None:
        """Replace the withheld messages by the error: an event if a stream has started."""
        self._withheld.clear()
        if self.started:
            last_message = {"type": "http.response.body", "body": error_event, "more_body": False}
            await self._send(last_message)
        else:
            await error_response({"type": "http"}, _receive_disconnect, self._send)


class ReplayedRequest:
    """A request whose body was read: `receive` gives it, or another body, to the application."""

    def __init__(self, body: bytes, receive: Receive, is_detached: bool = False):
        """is_detached: whether the application goes on when the client disconnects."""
        self._body: bytes | None = body
        self._receive, self.is_detached = receive, is_detached
        self.client_gone = asyncio.Event()  # set also to treat a client as disconnected
        self.is_reachable = True  # whether the client can be sent more

    async def receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        return await self.receive_rest()

    def lose_client(self) -> None:
        """Send the client nothing more, and unless the request is detached, end it."""
        self.is_reachable = False
        if not self.is_detached:
            self.client_gone.set()

    async def receive_rest(self) -> Message:
        """Wait for a message after the body: usually for the client to disconnect."""
        if not self.client_gone.is_set():
            receive_task = asyncio.ensure_future(self._receive())
            gone_task = asyncio.ensure_future(self.client_gone.wait())
            try:
                await asyncio.wait((receive_task, gone_task), return_when=asyncio.FIRST_COMPLETED)
                if receive_task.done() and receive_task.result()["type"] != "http.disconnect":
                    return receive_task.result()
                if self.is_detached:
                    await gone_task
            finally:
                receive_task.cancel()
                gone_task.cancel()
            self.client_gone.set()
        return {"type": "http.disconnect"}


def _is_detached(target: SessionTarget, raw_body: bytes) -> bool:
    """Whether a request goes on when its client is gone: a turn that is `detached`."""
    if target.action != "turns":
        return False
    try:
        detached = parse_json_object(raw_body).get("detached", False)
        return pydantic.TypeAdapter(bool).validate_python(detached)
    except (ApiError, pydantic.ValidationError):  # the route reports it
        return False


async def _receive_disconnect() -> Message:
    """Receive from a client that is gone."""
    return {"type": "http.disconnect"}


async def _send_or_disconnect(send: Send, request: ReplayedRequest, message: Message) -> None:
    """Send a message; if that fails or stalls, treat the client as disconnected."""
    if not request.is_reachable:
        return
    try:
        await asyncio.wait_for(send(message), _SEND_TIMEOUT_SECONDS)
    except Exception:  # TimeoutError too: the lease must not wait for a stalled client
        request.lose_client()


class SessionKey(NamedTuple):
    name: str
    owner: str  # of the request's API key; names are unique for each owner


@dataclass(frozen=True)
class Exchange:
    """A request that targets a session, and its response."""

    target: SessionTarget
    scope: Scope
    raw_body: bytes  # as the client sent it
    request: ReplayedRequest  # with the raw body, or another one, for the application
    response: WithheldResponse

    @classmethod
    def begin(
        cls, target: SessionTarget, scope: Scope, raw_body: bytes, receive: Receive, send: Send
    ) -> "Exchange":
        request = ReplayedRequest(raw_body, receive, _is_detached(target, raw_body))
        has_idempotency_key = b"idempotency-key" in dict(scope["headers"])
        send = partial(_send_or_disconnect, send, request)
        response = WithheldResponse(send, _MAX_RECORDED_BODY_BYTES if has_idempotency_key else 0)
        return cls(target, {**scope, "asgi": _ASGI_VERSIONS}, raw_body, request, response)

    @property
    def session_key(self) -> SessionKey:
        return SessionKey(self.target.name, self.scope["owner"])  # set by SecurityMiddleware

    @cached_property
    def idempotency_key_digest(self) -> str | None:
        """The key's digest: readers of the store must not learn the key. Raises ApiError."""
        header = dict(self.scope["headers"]).get(b"idempotency-key")
        if header is not None and not 0 < len(header) <= MAX_KEY_LENGTH:
            raise bad_key_error()
        return None if header is None else _digest(self.scope["owner"].encode(), header)

    @cached_property
    def request_digest(self) -> str:
        """A digest by which a repeated request is told from another one with the same key."""
        path = self.scope["path"].encode()
        if self.target.operation in ("create", "fork"):
            return _digest(path, json.dumps(parse_json_object(self.raw_body)).encode())
        return _digest(self.scope["method"].encode(), path, self.raw_body)

    def with_json_body(self, fields: dict[str, Any]) -> "Exchange":
        """Return the exchange with another JSON body for the application."""
        body, receive = json.dumps(fields).encode(), self.request.receive_rest
        request = ReplayedRequest(body, receive, self.request.is_detached)
        headers = [item for item in self.scope["headers"] if item[0].lower() != b"content-length"]
        return replace(self, request=request, scope={**self.scope, "headers": headers})

    async def respond(self, content: dict[str, Any]) -> None:
        await JSONResponse(content)(self.scope, _receive_disconnect, self.response.send)


@pydantic.dataclasses.dataclass(frozen=True, config=pydantic.ConfigDict(extra="forbid"))
class RecordedResponse:
    """The response to a request with an Idempotency-Key, stored with the session."""

    key: str  # digest of the Idempotency-Key
    request: str  # digest by which a repeated request is recognised
    status: int
    headers: list[tuple[str, str]] = field(default_factory=list)
    body: str | None = None  # None if it was too long or is too old to be kept

    @classmethod
    def from_exchange(cls, exchange: Exchange) -> "RecordedResponse | None":
        """Record a response; None for a request without a key."""
        key_digest, response = exchange.idempotency_key_digest, exchange.response
        if key_digest is None:
            return None
        headers = [item for item in response.headers.items() if item[0] != "content-length"]
        body = None if response.body is None else response.body.decode()
        return cls(key_digest, exchange.request_digest, response.status, headers, body)

    async def send(self, response: WithheldResponse) -> None:
        headers = [(name.encode("latin1"), value.encode("latin1")) for name, value in self.headers]
        start = {"type": "http.response.start", "status": self.status, "headers": headers}
        await response.send(start)
        await response.send({"type": "http.response.body", "body": (self.body or "").encode()})


def pop_responses(notes: dict[str, Any]) -> list[RecordedResponse]:
    """Remove the recorded responses from a snapshot's notes; return the well-formed ones."""
    responses, entries = list[RecordedResponse](), notes.pop(_NOTES_KEY, None)
    for entry in entries if isinstance(entries, list) else ():
        with suppress(TypeError, ValueError):
            responses.append(RecordedResponse(**entry))
    return responses


def newest_responses(
    responses: Sequence[RecordedResponse], added: RecordedResponse | None
) -> list[RecordedResponse]:
    """Return the responses to keep: the newest 256, of which 8 have their headers and bodies."""
    kept = [*responses, *([added] if added else [])][-_MAX_RECORDS:]
    stripped = [replace(response, body=None, headers=[]) for response in kept[:-_MAX_BODIES]]
    return [*stripped, *kept[-_MAX_BODIES:]]


def response_notes(responses: Sequence[RecordedResponse]) -> dict[str, Any]:
    """Return notes for a snapshot."""
    return {_NOTES_KEY: [asdict(response) for response in responses]}


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()

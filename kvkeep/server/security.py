"""Checks on every request before any route: Host, Origin, size, API key; and security headers."""

import asyncio
from collections.abc import Collection
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from kvkeep.server.errors import ApiError
from kvkeep.server.host_names import ANY_ORIGIN, host_name
from kvkeep.server.limits import MAX_BODY_BYTES
from kvkeep.server.service import Service

# A body must be there this long after the headers, and one second later for each so many bytes.
BODY_SECONDS = 30.0
_MIN_BYTES_PER_SECOND = 1000
_MAX_BODY_SECONDS = 600.0  # for any body
PAGE_PREFIX = "/page/"  # static files of the web UI, which hold no user's data
PUBLIC_PATHS = frozenset(("/", "/favicon.ico", "/health", "/v1/health", "/v1/models", "/models"))
_SAFE_METHODS = frozenset(("GET", "HEAD", "OPTIONS"))
_READ_ONLY_POST_PATHS = frozenset(("/v1/prefix/explain",))
_CSP = (
    b"default-src 'self'; object-src 'none'; base-uri 'none'; frame-ancestors 'none'; "
    b"form-action 'none'"
)
_SECURITY_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
    (b"content-security-policy", _CSP),
    (b"cross-origin-resource-policy", b"same-origin"),
)
_FORM_CONTENT_TYPE = "application/x-www-form-urlencoded"


class OriginMiddleware:
    """Rejects requests of unclear length, or with a wrong Host (DNS rebinding) or Origin.

    Browsers name the page's Origin in what scripts send, but not in what a page loads by <img> or
    by fetch in mode no-cors: such requests of foreign pages are rejected by Sec-Fetch-Site.
    Adds security headers to each response, and counts its status.
    """

    def __init__(
        self, app: Any, service: Service, hosts: Collection[str], origins: Collection[str] = ()
    ):
        """hosts: allowed, beside any port. origins: allowed beside the server's own."""
        self._app, self._status_counts = app, service.status_counts
        self._origins, self._allow_edit = frozenset(origins), service.allow_edit
        self._hosts = frozenset(map(host_name, hosts))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(Headers(scope=scope).items())  # the last one of each name

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._status_counts[message["status"]] += 1
                message["headers"] = [*message.get("headers", ()), *_SECURITY_HEADERS]
            await send(message)

        try:
            _require_one_length(headers)  # first: no other response may leave the connection open
            self._check_host_and_origin(scope, headers)
        except ApiError as error:
            await error.response(scope["path"])(scope, receive, send_with_headers)
        else:
            await self._app(scope, receive, send_with_headers)

    def _check_host_and_origin(self, scope: Scope, headers: dict[str, str]) -> None:
        """Raise ApiError for a Host or Origin that is not allowed, and for edits by the web UI."""
        host, origin = host_name(headers.get("host", "")), headers.get("origin")
        without_host = not host and scope.get("http_version") == "1.0"  # no browser sends that
        if host not in self._hosts and not without_host:
            advice = "start the server with --allow-host to allow it"
            raise ApiError(421, f"host {host!r} is not allowed; {advice}", code="host")
        if origin is None:  # not a browser, or a request that reads
            if ANY_ORIGIN not in self._origins and _is_loaded_by_foreign_page(scope, headers):
                message = "pages of other origins can load nothing without CORS and --allow-origin"
                raise ApiError(403, message, "permission_error", "origin")
            return
        from_web_ui = origin.partition("://")[2] == headers.get("host")
        if not from_web_ui and not {origin, ANY_ORIGIN} & self._origins:
            message = f"origin {origin} is not allowed; start the server with --allow-origin"
            raise ApiError(403, message, "permission_error", "origin")
        is_read_only = scope["method"] in _SAFE_METHODS or scope["path"] in _READ_ONLY_POST_PATHS
        if from_web_ui and not self._allow_edit and not is_read_only:
            message = "the web UI is read-only; start the server with --allow-edit"
            raise ApiError(403, message, "permission_error", "read_only")


class SecurityMiddleware:
    """Rejects requests with a wrong API key, or that are too large.

    Without a key only public paths and OPTIONS are answered, and only without a body.
    Sets `scope["owner"]` to the key's owner.
    """

    def __init__(self, app: Any, service: Service):
        self._app, self._keys = app, service.keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(Headers(scope=scope).items())  # the last one of each name
        try:
            _check_size(headers)
            scope["owner"] = self._authenticate(scope, headers)
        except ApiError as error:
            await error.response(scope["path"])(scope, receive, send)
            return
        if headers.get("content-type", _FORM_CONTENT_TYPE).startswith(_FORM_CONTENT_TYPE):
            # `curl -d` sends JSON as a form, and no route takes forms.
            other_headers = [header for header in scope["headers"] if header[0] != b"content-type"]
            scope = {**scope, "headers": [*other_headers, (b"content-type", b"application/json")]}
        exchange = _Exchange(receive, send)
        await self._app(scope, exchange.receive_limited, exchange.send_unless_rejected)
        if exchange.rejection is not None:
            await exchange.rejection.response(scope["path"])(scope, receive, send)

    def _authenticate(self, scope: Scope, headers: dict[str, str]) -> str | None:
        """Return the owner, or None for a public path without one. Raises ApiError (401, 413)."""
        scheme, _, token = headers.get("authorization", "").partition(" ")
        key = token.strip() if scheme.lower() == "bearer" and token else headers.get("x-api-key")
        owner = self._keys.owner(key)
        is_public = scope["path"] in PUBLIC_PATHS or scope["path"].startswith(PAGE_PREFIX)
        if owner is None and not is_public and scope["method"] != "OPTIONS":
            raise ApiError(401, "missing or unknown API key", "authentication_error", "key")
        if owner is None and _has_body(headers):  # it would be held in memory
            message = "a request without a valid API key cannot have a body"
            raise ApiError(413, message, code="too_large", closes=True)
        return owner


def _is_loaded_by_foreign_page(scope: Scope, headers: dict[str, str]) -> bool:
    """Whether a page of another origin sends a request, except by a link to a public path."""
    is_link = headers.get("sec-fetch-mode") == "navigate" and scope["path"] in PUBLIC_PATHS
    return headers.get("sec-fetch-site") in ("cross-site", "same-site") and not is_link


def _require_one_length(headers: dict[str, str]) -> None:
    """Raise ApiError for a body that a proxy may see end elsewhere."""
    if "content-length" in headers and "transfer-encoding" in headers:
        message = "use Content-Length or Transfer-Encoding, not both"
        raise ApiError(400, message, closes=True)


def _has_body(headers: dict[str, str]) -> bool:
    return "transfer-encoding" in headers or int(headers.get("content-length", "0")) > 0


def _check_size(headers: dict[str, str]) -> None:
    """Raise ApiError for a body that is too large."""
    content_length = headers.get("content-length", "0")
    if not (content_length.isascii() and content_length.isdigit()):
        raise ApiError(400, "Content-Length must be a number")
    if len(content_length) > 12 or int(content_length) > MAX_BODY_BYTES:
        raise too_large_error()


def too_large_error() -> ApiError:
    """Return the error for a body that is too large."""
    return ApiError(413, f"a request can have at most {MAX_BODY_BYTES:,} bytes", code="too_large")


class _Exchange:
    """One request: limits the size and the time of its body.

    rejection: the error for a body beyond the limits, if it can still be sent.
    """

    def __init__(self, receive: Receive, send: Send):
        self._receive, self._send = receive, send
        self._received_bytes, self._body_complete, self._response_started = 0, False, False
        self._start = asyncio.get_running_loop().time()
        self.rejection: ApiError | None = None

    async def receive_limited(self) -> Message:
        if self._body_complete:
            return await self._receive()
        seconds = BODY_SECONDS + self._received_bytes / _MIN_BYTES_PER_SECOND
        seconds = min(seconds, _MAX_BODY_SECONDS)
        try:
            async with asyncio.timeout_at(self._start + seconds):
                message = await self._receive()
        except TimeoutError:
            late = ApiError(408, "the request's body did not arrive in time", closes=True)
            return self._reject(late)
        self._received_bytes += len(message.get("body", b""))
        self._body_complete = not message.get("more_body", False)
        if self._received_bytes > MAX_BODY_BYTES:
            return self._reject(too_large_error())
        return message

    def _reject(self, error: ApiError) -> Message:
        if not self._response_started:
            self.rejection = error
        return {"type": "http.disconnect"}

    async def send_unless_rejected(self, message: Message) -> None:
        if self.rejection is None:  # a response to a part of the body is discarded
            self._response_started = True
            await self._send(message)

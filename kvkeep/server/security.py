"""What holds of every request, before any route sees it: hosts, sizes, keys, headers."""

from collections.abc import Awaitable, Callable, Collection, MutableMapping
from typing import Any

from kvkeep.server.errors import Problem
from kvkeep.server.service import Service

LARGEST = 8_000_000  # bytes of a body
PAGE = "/page/"  # the files of the page, which hold nothing of anybody's
PUBLIC = frozenset(("/", "/favicon.ico", "/health", "/v1/health", "/v1/models", "/models"))
SAFE = frozenset(("GET", "HEAD", "OPTIONS"))
ASKING = frozenset(("/v1/prefix/explain",))  # by POST, but it changes nothing

_TOO_LARGE = Problem(413, f"a request has at most {LARGEST:,} bytes", code="too_large")
_Scope = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
_Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
    (
        b"content-security-policy",
        b"default-src 'self'; object-src 'none'; base-uri 'none'; frame-ancestors 'none'",
    ),
)
_FORM = "application/x-www-form-urlencoded"


class Safety:
    """Refuses requests for another host (DNS rebinding), without a key, or too large to be meant.

    hosts: names under which the server is asked, without ports. origins: pages, beside the
    server's own, that may ask it: a browser sends what any page says, so those of others are
    refused here. The owner of the key is `scope["owner"]` from here on.
    """

    def __init__(
        self, app: Any, service: Service, hosts: Collection[str], origins: Collection[str] = ()
    ):
        self._app, self._keys = app, service.keys
        self._origins, self._edits = frozenset(origins), service.edits
        self._statuses = service.statuses
        self._hosts = frozenset(host.lower() for host in hosts)

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = _headers(scope)
        problem = self._refused(scope, headers)
        if problem is not None:
            anthropic = scope["path"].startswith("/v1/messages")
            await problem.response(anthropic)(scope, receive, self._guarded(send))
            return
        if headers.get("content-type", _FORM).startswith(_FORM):
            scope = {**scope, "headers": _as_json(scope["headers"])}
        body = _Body(receive, self._guarded(send))
        await self._app(scope, body.receive, body.send)
        if body.too_large:
            await _TOO_LARGE.response()(scope, receive, self._guarded(send))

    def _guarded(self, send: _Send) -> _Send:
        async def guarded(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                self._statuses[message["status"]] += 1
                message["headers"] = [*message.get("headers", ()), *_HEADERS]
            await send(message)

        return guarded

    def _refused(self, scope: _Scope, headers: dict[str, str]) -> Problem | None:
        host = _without_port(headers.get("host", ""))
        if host.lower() not in self._hosts:
            return Problem(
                421, f"this server is not {host!r}: name that host when it is started", code="host"
            )
        problem = self._page_refused(scope, headers)
        if problem is not None:
            return problem
        length = headers.get("content-length", "0")
        if not (length.isascii() and length.isdigit()):
            return Problem(400, "Content-Length must be a number")
        if len(length) > 12 or int(length) > LARGEST:
            return _TOO_LARGE
        owner = self._keys.owner(_key(headers))
        public = scope["path"] in PUBLIC or scope["path"].startswith(PAGE)
        if owner is None and not public and scope["method"] != "OPTIONS":
            return Problem(401, "no key that this server knows", "authentication_error", "key")
        scope["owner"] = owner
        return None

    def _page_refused(self, scope: _Scope, headers: dict[str, str]) -> Problem | None:
        """What browsers say of the page that asks: other programs say nothing."""
        origin = headers.get("origin")
        own = origin is not None and origin.partition("://")[2] == headers.get("host")
        if origin is not None and not own and origin not in self._origins:
            return Problem(
                403,
                f"pages of {origin} may not ask this server: allow that when it is started",
                "permission_error",
                "origin",
            )
        if own and not self._edits and scope["path"] not in ASKING and scope["method"] not in SAFE:
            return Problem(
                403,
                "the page only shows: start the server with --allow-edit to change anything by it",
                "permission_error",
                "read_only",
            )
        return None


def _key(headers: dict[str, str]) -> str | None:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key:
        return key.strip()
    return headers.get("x-api-key")


def _headers(scope: _Scope) -> dict[str, str]:
    return {
        name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]
    }


def _as_json(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """No form is taken here: what is named one, or nothing, is the JSON of `curl -d`."""
    others = [(name, value) for name, value in headers if name.lower() != b"content-type"]
    return [*others, (b"content-type", b"application/json")]


def _without_port(host: str) -> str:
    if host.startswith("[") and "]" in host:  # an address of IPv6
        return host.partition("]")[0] + "]"
    return host.rpartition(":")[0] if ":" in host else host


class _Body:
    """A body of any length that was named, or of none: no more than so many bytes are taken in."""

    def __init__(self, receive: _Receive, send: _Send):
        self._receive, self._send, self._taken = receive, send, 0
        self._begun = False

    @property
    def too_large(self) -> bool:
        """Whether the client is still to be told."""
        return self._taken > LARGEST and not self._begun

    async def receive(self) -> MutableMapping[str, Any]:
        message = await self._receive()
        self._taken += len(message.get("body", b""))
        return {"type": "http.disconnect"} if self.too_large else message

    async def send(self, message: MutableMapping[str, Any]) -> None:
        if not self.too_large:  # what the application makes of the half of a body is no answer
            self._begun = True
            await self._send(message)

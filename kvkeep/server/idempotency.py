"""A change that is sent twice is made once: `Idempotency-Key`.

As in the IETF's draft of that header: whoever sends a key again, because an answer was lost on its
way, is given the first answer again. Keys are remembered by the process, the newest 1,000.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from kvkeep.server.errors import Problem

_CHANGES = frozenset(("POST", "PUT", "DELETE"))
_PLACES = ("/v1/sessions", "/v1/snapshots")
_TRANSIENT = frozenset((401, 409, 412, 429, 503))  # another try may well end otherwise
_KEPT = 1_000
_LARGEST = 100_000  # bytes of an answer that is remembered
_LONGEST = 200  # characters of a key

_Message = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]


@dataclass
class _Told:
    """What a request was, and the messages that answered it; `whole` once all of them are there."""

    request: str
    messages: list[_Message] = field(default_factory=list)
    whole: bool = False


class Idempotent:
    """Between what is let in and the routes. `scope["owner"]`: whose keys they are."""

    def __init__(self, app: Any):
        self._app = app
        self._known: OrderedDict[tuple[str, str], _Told] = OrderedDict()

    async def __call__(
        self, scope: MutableMapping[str, Any], receive: _Receive, send: _Send
    ) -> None:
        key = _key(scope)
        if key is None:
            await self._app(scope, receive, send)
            return
        if not 0 < len(key) <= _LONGEST:
            problem = Problem(400, f"an Idempotency-Key has 1 to {_LONGEST} characters")
            await problem.response()(scope, receive, send)
            return
        body = await whole(receive)
        if body is None:
            return
        request = hashlib.sha256(
            b"\0".join((scope["method"].encode(), scope["path"].encode(), body))
        ).hexdigest()
        place = (str(scope.get("owner")), key)
        known = self._known.get(place)
        if known is None:
            await self._first(place, _Told(request), scope, _again(body, receive), send)
        elif known.request != request:
            problem = Problem(
                400, "this Idempotency-Key came with another request", code="key_reused"
            )
            await problem.response()(scope, receive, send)
        elif not known.whole:
            problem = Problem(
                409, "the request with this key is at work", "conflict_error", "key_at_work"
            )
            await problem.response()(scope, receive, send)
        else:
            for message in known.messages:
                await send(dict(message))

    async def _first(
        self,
        place: tuple[str, str],
        told: _Told,
        scope: MutableMapping[str, Any],
        receive: _Receive,
        send: _Send,
    ) -> None:
        self._known[place] = told
        size = 0

        async def kept(message: _Message) -> None:
            nonlocal size
            size += len(message.get("body", b""))
            if size <= _LARGEST:
                told.messages.append(dict(message))
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                told.whole = size <= _LARGEST
            await send(message)

        try:
            await self._app(scope, receive, kept)
        finally:
            status = told.messages[0]["status"] if told.messages else 503
            if not told.whole or status in _TRANSIENT or status >= 500:
                self._known.pop(place, None)
            while len(self._known) > _KEPT:
                self._known.popitem(last=False)


def _key(scope: MutableMapping[str, Any]) -> str | None:
    if scope["type"] != "http" or scope["method"] not in _CHANGES:
        return None
    if not scope["path"].startswith(_PLACES):
        return None
    found = dict(scope["headers"]).get(b"idempotency-key")
    return None if found is None else found.decode("latin-1")


async def whole(receive: _Receive) -> bytes | None:
    """All of a body; None for one that does not come to its end."""
    parts = list[bytes]()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


def _again(body: bytes, receive: _Receive) -> _Receive:
    """Gives a body that was taken in, and then whatever comes."""
    given = False

    async def receives() -> _Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receives

"""Between what is let in and the routes: sessions come from the store, and go there.

A request that changes a session holds it in the store from its first byte to its commit, and its
end is told once that is done. One with an `Idempotency-Key` is carried out once: as a whole, or not
at all.
"""

import asyncio
import json
import logging
import secrets
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from starlette.responses import JSONResponse

from kvkeep.engine import SessionRecord
from kvkeep.engine.registry import NOTES
from kvkeep.errors import InvalidArgument, NoSuchSession, StoreError, WrongRevision
from kvkeep.fleet.idempotency_log import LARGEST, Answered, digest, record, seed_of
from kvkeep.fleet.leases import Custody, Writing
from kvkeep.fleet.responses import Body, Message, Receive, Response, Send
from kvkeep.fleet.session_target import DRAWING, About, about, checked_new, fields_of
from kvkeep.server.errors import ApiError, api_error_for
from kvkeep.server.idempotency import read_body
from kvkeep.server.sessions.entry import parse_if_match, session_entry
from kvkeep.server.sse import sse_event
from kvkeep.storage.sessions.shared import SessionPlace
from kvkeep.storage.snapshots.snapshot import describe

_log = logging.getLogger("kvkeep.server")
_PATIENCE = 10.0  # seconds for which a request that came again waits for its first try
_SENDING = 60.0  # seconds for which a client may not take what it is sent
_LONGEST = 200  # characters of a key
_ASGI = {"version": "3.0", "spec_version": "2.3"}  # streams listen for who goes away
_Scope = dict[str, Any]


class Keeper:
    """An ASGI application around another. `scope["owner"]`: who asks."""

    def __init__(self, app: Any, custody: Custody, server: str):
        """server: as the header `x-kvkeep-server` of each answer calls it."""
        self._app, self._custody, self._server = app, custody, server.encode()
        self._running = set[asyncio.Task[None]]()

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        found = About("none")
        if scope["type"] == "http":
            found = about(scope["method"], scope["path"])
        send = self._signed(send)
        if found.kind == "none":
            await self._app(scope, receive, send)
            return
        given = await read_body(receive)
        if given is None:
            return
        body = Body(given, receive)
        scope = {**scope, "asgi": _ASGI}
        # A client that goes away ends its answer, and not what must be done about the session.
        task = asyncio.create_task(self._answered(found, scope, given, body, _safe(send, body)))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            body.gone.set()
            raise

    def _signed(self, send: Send) -> Send:
        async def sends(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [*message.get("headers", ()), (b"x-kvkeep-server", self._server)]
                message = {**message, "headers": headers}
            await send(message)

        return sends

    async def drained(self) -> None:
        """Once all that was begun is in the store."""
        while self._running:
            await asyncio.wait(set(self._running))

    async def _answered(
        self, found: About, scope: _Scope, given: bytes, body: Body, send: Send
    ) -> None:
        keyed = b"idempotency-key" in dict(scope["headers"])
        response = Response(send, LARGEST if keyed else 0)
        try:
            await self._done(found, scope, given, body, response)
        except Exception as error:
            problem = api_error_for(error)
            if problem.status >= 500:
                _log.error("%s %s", scope["method"], scope["path"], exc_info=error)
            await response.replace(problem.response(), sse_event(problem.openai_body(), "error"))
        else:
            await response.finish()

    async def _done(
        self, found: About, scope: _Scope, given: bytes, body: Body, response: Response
    ) -> None:
        owner, custody = scope["owner"], self._custody
        match found.kind:
            case "unknown":
                raise ApiError(404, "there is nothing of that name", "not_found_error")
            case "list":
                await self._list(scope, response)
            case "begin":
                await self._begin(given, scope, body, response)
            case "fork":
                async with custody.reading(owner, found.name, settled=True):
                    await self._begin(given, scope, body, response)
            case "label":
                async with custody.reading(owner, found.name, settled=True):
                    await self._app(scope, body.receive, response.send)
            case "watch":
                with suppress(NoSuchSession):
                    async with custody.reading(owner, found.name):
                        pass
                await self._app(scope, body.receive, response.through)
            case "read":
                await self._read(found, scope, body, response)
            case "save":
                async with custody.reading(owner, found.name, settled=True):
                    path = f"/v1/sessions/{found.name}"
                    looked = {**scope, "method": "GET", "path": path, "raw_path": path.encode()}
                    await self._app(looked, body.receive, response.send)
            case "delete":
                await self._delete(found, scope, response)
            case _:
                await self._write(found, scope, given, body, response)

    async def _read(self, found: About, scope: _Scope, body: Body, response: Response) -> None:
        """Of a session in the store; or of one of this server's own, such as a stored response."""
        for again in (True, False):
            tried = response if not again else Response(response.send)
            try:
                async with self._custody.reading(scope["owner"], found.name):
                    await self._app(scope, body.receive, tried.send)
            except NoSuchSession:
                await self._app(scope, body.receive, response.send)
                return
            if tried is response:
                return
            if tried.status != 404:  # else it was taken back in between, and is read anew
                await tried.finish()
                return

    async def _begin(self, given: bytes, scope: _Scope, body: Body, response: Response) -> None:
        """What makes a session: it is in the store before anybody is told."""
        owner, fields, key = scope["owner"], fields_of(given), _key(scope)
        chosen = f"s-{key[:16]}" if key else f"s-{secrets.token_hex(8)}"
        name = checked_new(fields.get("name") or chosen)
        request = digest(scope["path"].encode(), json.dumps(fields).encode())
        if key and await self._begun_before(owner, name, key, request, response):
            return
        changed = Body(json.dumps({**fields, "name": name}).encode(), body.receive_on)
        try:
            async with self._custody.beginning(owner, name) as writing:
                await self._app(_sized(scope), changed.receive, response.send)
                if response.whole:
                    await self._commit(writing, key, request, response)
        except InvalidArgument:  # the same request at another server was faster, perhaps
            if not key or not await self._begun_before(owner, name, key, request, response):
                raise

    async def _begun_before(
        self, owner: str, name: str, key: str, request: str, response: Response
    ) -> bool:
        """Whether that very request has made the session: then it is answered again."""
        try:
            async with self._custody.writing(owner, name, _PATIENCE) as writing:
                writing.clean = True
                return await _again(writing.answered, key, request, response)
        except NoSuchSession:
            return False

    async def _write(
        self, found: About, scope: _Scope, given: bytes, body: Body, response: Response
    ) -> None:
        key = _key(scope)
        request = digest(scope["method"].encode(), scope["path"].encode(), given)
        if key and found.action in DRAWING:
            body, scope = _seeded(given, key, body, scope)
        patience = _PATIENCE if key else 0.0
        async with self._custody.writing(scope["owner"], found.name, patience) as writing:
            if key and await _again(writing.answered, key, request, response):
                writing.clean = True
                return
            _ends_with(writing, body)
            await self._app(scope, body.receive, response.send)
            writing.lease.check()
            # Without a key, what was written before the client went away stays, as at any server.
            if response.whole if key else await self._custody.changed(writing):
                await self._commit(writing, key, request, response)

    async def _delete(self, found: About, scope: _Scope, response: Response) -> None:
        """Also of one that cannot be read."""
        wanted = parse_if_match(
            dict(scope["headers"]).get(b"if-match", b"").decode("latin-1") or None
        )
        owner, name = scope["owner"], found.name
        async with self._custody.removing(owner, name) as writing:
            if wanted is not None:
                entry = await self._custody.at_store(
                    lambda: _entry(SessionPlace(writing.lease.place))
                )
                if entry is None or entry["revision"] != wanted:
                    raise WrongRevision(
                        f"session {name!r} is not at revision {wanted}: look at it again"
                    )
            await self._custody.remove(writing)
        told = JSONResponse({"name": name, "object": "session", "deleted": True})
        await told(scope, _never, response.send)

    async def _commit(
        self, writing: Writing, key: str | None, request: str, response: Response
    ) -> None:
        answer = None
        if key and response.whole:
            headers = [pair for pair in response.headers if pair[0].lower() != b"content-length"]
            answer = record(key, request, response.status, headers, response.body)
        await self._custody.commit(writing, answer)

    async def _list(self, scope: _Scope, response: Response) -> None:
        custody = self._custody
        sessions = custody.sessions(scope["owner"])
        places = await custody.at_store(lambda: list(sessions.newest()))
        entries = await asyncio.gather(
            *(custody.at_store(partial(_entry, place)) for place in places)
        )
        data = [entry for entry in entries if entry is not None]
        told = JSONResponse({"object": "list", "data": data})
        await told(scope, _never, response.send)


def _entry(place: SessionPlace) -> dict[str, Any] | None:
    """As clients read it, of what was committed last; None for one that is gone or not sound."""
    try:
        noted = describe(place)["notes"][NOTES]
        kept = SessionRecord(place.stem, "", True, None, None)
        kept.goes_on(noted)
        return session_entry(kept)
    except (StoreError, LookupError, TypeError, ValueError, AttributeError):
        return None


def _ends_with(writing: Writing, body: Body) -> None:
    """An answer ends, as if its client had gone, once another server has the session."""
    loop = asyncio.get_running_loop()

    def ends() -> None:
        loop.call_soon_threadsafe(body.gone.set)

    writing.lease.when_lost(ends)


async def _again(answered: Sequence[Answered], key: str, request: str, response: Response) -> bool:
    """Whether a request has been carried out: it is told what it was told."""
    known = next((each for each in answered if each.key == key), None)
    if known is None:
        return False
    if known.request != request:
        raise ApiError(400, "this Idempotency-Key came with another request", code="key_reused")
    if known.body is None:
        raise ApiError(
            409,
            "the request with this key was carried out; its answer was too long to be kept: look "
            "at the session",
            "conflict_error",
            "key_answered",
        )
    headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in known.headers]
    start = {"type": "http.response.start", "status": known.status, "headers": headers}
    await response.send(start)
    await response.send({"type": "http.response.body", "body": known.body.encode()})
    return True


def _key(scope: _Scope) -> str | None:
    """A digest of the request's key, of no meaning to who reads the store."""
    found = dict(scope["headers"]).get(b"idempotency-key")
    if found is None:
        return None
    if not 0 < len(found) <= _LONGEST:
        raise ApiError(400, f"an Idempotency-Key has 1 to {_LONGEST} characters")
    return digest(str(scope["owner"]).encode(), found)


def _seeded(given: bytes, key: str, body: Body, scope: _Scope) -> tuple[Body, _Scope]:
    """Tokens that are drawn by chance are drawn by the key, if no seed was given."""
    try:
        fields = fields_of(given)
    except ApiError:  # the route says what is wrong with it
        return body, scope
    seed = fields.get("seed")
    if seed is None or (isinstance(seed, int) and seed < 0):
        fields["seed"] = seed_of(key)
    return Body(json.dumps(fields).encode(), body.receive_on), _sized(scope)


def _sized(scope: _Scope) -> _Scope:
    """Of a request whose body was changed."""
    headers = [pair for pair in scope["headers"] if pair[0].lower() != b"content-length"]
    return {**scope, "headers": headers}


def _safe(send: Send, body: Body) -> Send:
    """A client that cannot be told anything is gone: what it asked for ends as it ends then."""

    async def sends(message: Message) -> None:
        try:
            await asyncio.wait_for(send(message), _SENDING)
        except Exception:  # or it has stopped reading, and others are not to wait for it
            body.gone.set()

    return sends


async def _never() -> Message:
    return {"type": "http.disconnect"}

"""ASGI middleware between the security checks and the routes, for sessions in a shared store.

A request that changes a session leases it until the commit. The response is withheld until then,
so that no client learns of a change that may be lost. A request with an `Idempotency-Key` is
carried out at most once, and completely.
"""

import asyncio
import logging
import secrets
from asyncio import wrap_future
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from kvkeep.engine import SessionRecord
from kvkeep.engine.session_files import ENGINE_NOTES_KEY
from kvkeep.errors import (
    Cancelled,
    InvalidArgument,
    NoSuchPin,
    NoSuchSession,
    StoreError,
    WrongRevision,
)
from kvkeep.fleet.exchange import Exchange, RecordedResponse, SessionKey, WithheldResponse
from kvkeep.fleet.leases import LeasedSession, SessionLeases
from kvkeep.fleet.pins import SharedPins
from kvkeep.fleet.session_target import parse_json_object, require_new_name, session_target
from kvkeep.server.errors import ApiError, api_error_for
from kvkeep.server.idempotency import key_reused_error, read_body, response_too_long_error
from kvkeep.server.sessions.entry import parse_if_match, session_entry
from kvkeep.server.sessions.pins import pin_entry
from kvkeep.server.sse import sse_event
from kvkeep.storage.sessions.interface import is_valid_name
from kvkeep.storage.sessions.shared import SessionPath
from kvkeep.storage.snapshots.header import rounded_by
from kvkeep.storage.snapshots.snapshot import read_snapshot_document

_log = logging.getLogger("kvkeep.server")
_SEED_COUNT = 2**53  # JavaScript represents every integer below
_RETRY_TIMEOUT_SECONDS = 10.0  # for which a repeated request waits for the first attempt


class SessionMiddleware:
    """ASGI middleware that leases, commits and releases the sessions that requests target."""

    def __init__(self, app: Any, leases: SessionLeases, pins: SharedPins, server_name: str):
        """server_name: the value of the response header `x-kvkeep-server`."""
        self._app, self._leases, self._server_name = app, leases, server_name.encode()
        self._pins = pins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_http, send = scope["type"] == "http", partial(self._send_with_server_name, send)
        target = session_target(scope["method"], scope["path"]) if is_http else None
        if target is None or target.operation == "none":
            await self._app(scope, receive, send)
            return
        raw_body = await read_body(receive)
        if raw_body is None:
            return
        exchange = Exchange.begin(target, scope, raw_body, receive, send)
        # In a task: a client that disconnects cancels its generation unless it is detached, but
        # not the commit.
        task = asyncio.create_task(self._respond(exchange))
        self._leases.request_tasks.add(task)
        task.add_done_callback(self._leases.request_tasks.discard)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            exchange.request.lose_client()
            raise

    async def _send_with_server_name(self, send: Send, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = [*message.get("headers", ()), (b"x-kvkeep-server", self._server_name)]
            message = {**message, "headers": headers}
        await send(message)

    async def _respond(self, exchange: Exchange) -> None:
        """Handle a request, and release its response, or report the error in its place."""
        scope, response = exchange.scope, exchange.response
        try:
            await self._dispatch(exchange)
        except asyncio.CancelledError:  # by `SessionLeases.drain`
            error = api_error_for(Cancelled("the server is shutting down"))
        except Exception as exception:
            error = api_error_for(exception)
            if error.status >= 500:
                _log.error("%s %s", scope["method"], scope["path"], exc_info=exception)
        else:
            await response.release()
            return
        event = sse_event(error.openai_body(), "error")
        await response.fail(error.response(scope["path"]), event)

    async def _dispatch(self, exchange: Exchange) -> None:
        """Handle a request by its operation; the response is still withheld."""
        scope, request, response = exchange.scope, exchange.request, exchange.response
        session_key, leases = exchange.session_key, self._leases
        match exchange.target.operation:
            case "unknown":
                raise ApiError(404, "not found", "not_found_error")
            case "list":
                await self._list(exchange)
            case "pins":
                await self._list_pins(exchange)
            case "release_pin":
                await self._release_pin(exchange)
            case "create":
                await self._create(exchange)
            case "fork" | "snapshot" as operation:
                async with leases.reading(session_key, committed=True):
                    await (self._create if operation == "fork" else self._run_route)(exchange)
            case "revert":
                await self._revert(exchange)
            case "events":  # the session is loaded, but not held as long as the stream lasts
                with suppress(NoSuchSession):
                    async with leases.reading(session_key):
                        pass
                await self._app(scope, request.receive, response.send_now)
            case "read":
                await self._read(exchange)
            case "save":  # committed sessions are saved: respond with the session
                async with leases.reading(session_key, committed=True):
                    await self._retrieve(exchange)
            case "stop":
                await self._stop(exchange)
            case "delete":
                await self._delete(exchange)
            case _:
                await self._write(exchange)

    async def _run_route(self, exchange: Exchange) -> None:
        await self._app(exchange.scope, exchange.request.receive, exchange.response.send)

    async def _retrieve(self, exchange: Exchange) -> None:
        """Respond with the session, which is in the engine."""
        path = f"/v1/sessions/{exchange.target.name}"
        scope = {**exchange.scope, "method": "GET", "path": path, "raw_path": path.encode()}
        await self._run_route(replace(exchange, scope=scope))

    async def _stop(self, exchange: Exchange) -> None:
        """End an answer of this server. If another server has the session, this is refused."""
        if not await self._leases.stop(exchange.session_key, _if_match(exchange)):
            await self._write(exchange)
            return
        headers = [item for item in exchange.scope["headers"] if item[0].lower() != b"if-match"]
        async with self._leases.reading(exchange.session_key):
            await self._retrieve(replace(exchange, scope={**exchange.scope, "headers": headers}))

    async def _read(self, exchange: Exchange) -> None:
        """Read a session of the store, or one local to this server, such as a stored response."""
        first_response = WithheldResponse(exchange.response.send)
        with suppress(NoSuchSession):
            async with self._leases.reading(exchange.session_key):
                await self._run_route(replace(exchange, response=first_response))
            if first_response.status != 404:
                await first_response.release()
                return
            # It was rolled back between loading and reading: try once more.
            async with self._leases.reading(exchange.session_key):
                await self._run_route(exchange)
            return
        await self._run_route(exchange)

    async def _create(self, exchange: Exchange) -> None:
        """Create a session and commit it before the response is released."""
        fields, key_digest = parse_json_object(exchange.raw_body), exchange.idempotency_key_digest
        generated_name = f"s-{key_digest[:16]}" if key_digest else f"s-{secrets.token_hex(8)}"
        name = require_new_name(fields.get("name") or generated_name)
        session_key = exchange.session_key._replace(name=name)
        if key_digest and await self._repeat_creation(exchange, session_key):
            return
        try:
            async with self._leases.creating(session_key) as leased:
                await self._run_route(exchange.with_json_body({**fields, "name": name}))
                if exchange.response.succeeded:
                    await self._commit(leased, exchange)
        except InvalidArgument:  # the name is taken, perhaps by this request at another server
            if not key_digest or not await self._repeat_creation(exchange, session_key):
                raise

    async def _repeat_creation(self, exchange: Exchange, session_key: SessionKey) -> bool:
        """Repeat the response if this very request has created the session before."""
        try:
            async with self._leases.writing(session_key, _RETRY_TIMEOUT_SECONDS) as leased:
                return await _repeat_response(leased, exchange)
        except NoSuchSession:
            return False

    async def _write(self, exchange: Exchange) -> None:
        """Change a session under its lease, commit, and only then release the response."""
        leases, key_digest = self._leases, exchange.idempotency_key_digest
        if key_digest and exchange.target.action in ("generate", "turns"):  # they sample tokens
            exchange = _with_seed(exchange, key_digest)
        timeout = _RETRY_TIMEOUT_SECONDS if key_digest else 0.0
        async with leases.writing(exchange.session_key, timeout) as leased:
            if await _repeat_response(leased, exchange):
                return
            loop, client_gone = asyncio.get_running_loop(), exchange.request.client_gone
            # Another server takes the session: cancel the generation, as a disconnect does.
            leased.lease.on_lost(lambda: loop.call_soon_threadsafe(client_gone.set))
            leased.is_detached = exchange.request.is_detached
            leased.in_sync = False
            await self._run_route(exchange)
            leased.lease.check()
            succeeded = exchange.response.succeeded
            if not await leases.has_changes(leased):
                leased.in_sync = True
                if succeeded:
                    leased.remember(RecordedResponse.from_exchange(exchange))
            # Without a key, tokens sampled before the client disconnected stay, as on one server.
            elif succeeded or leased.stopped or not key_digest:
                await self._commit(leased, exchange)

    async def _revert(self, exchange: Exchange) -> None:
        """Revert a session to another one, which is loaded first if it is there.

        The other one may be gone when the request is repeated.
        """
        other = parse_json_object(exchange.raw_body).get("to")
        async with AsyncExitStack() as stack:
            if isinstance(other, str) and is_valid_name(other):  # the route refuses another one
                key = exchange.session_key._replace(name=other)
                with suppress(NoSuchSession):
                    await stack.enter_async_context(self._leases.reading(key, committed=True))
            await self._write(exchange)

    async def _commit(self, leased: LeasedSession, exchange: Exchange) -> None:
        exchange.response.report_saved()
        await self._leases.commit(leased, RecordedResponse.from_exchange(exchange))

    async def _delete(self, exchange: Exchange) -> None:
        """Delete a session, which may be too damaged to be loaded."""
        revision, name = _if_match(exchange), exchange.target.name

        def require_revision(path: SessionPath) -> None:
            if revision is None:
                return
            entry = _stored_entry(path)
            if entry is None or entry["revision"] != revision:
                message = f"session {name!r} is not at revision {revision}: fetch it again"
                raise WrongRevision(message)

        request = exchange.idempotency_key_digest or ""
        await self._leases.remove(exchange.session_key, require_revision, request)
        await exchange.respond({"name": name, "object": "session", "deleted": True})

    async def _list_pins(self, exchange: Exchange) -> None:
        owner, leases = exchange.session_key.owner, self._leases
        own = [pin_entry(pin) for pin in await wrap_future(leases.engine.pins(owner))]
        entries = [*own, *await leases.call_store(self._pins.others, owner)]
        entries.sort(key=lambda entry: entry["expires_in"])
        await exchange.respond({"object": "list", "data": entries})

    async def _release_pin(self, exchange: Exchange) -> None:
        owner, pin_id = exchange.session_key.owner, exchange.target.action
        try:
            await wrap_future(self._leases.engine.release_pin(pin_id, owner))
        except NoSuchPin:
            await self._leases.call_store(self._pins.release, pin_id, owner)
        await exchange.respond({"id": pin_id, "object": "prefix_pin", "deleted": True})

    async def _list(self, exchange: Exchange) -> None:
        leases, sessions = self._leases, self._leases.sessions_of(exchange.session_key.owner)
        paths = await leases.call_store(lambda: list(sessions.newest_first()))
        entries = await asyncio.gather(*(leases.call_store(_stored_entry, path) for path in paths))
        data = [entry for entry in entries if entry is not None]
        await exchange.respond({"object": "list", "data": data})


def _if_match(exchange: Exchange) -> int | None:
    """Return the revision that the session must have; None for any. Raises ApiError."""
    return parse_if_match(Headers(scope=exchange.scope).get("if-match") or None)


def _stored_entry(path: SessionPath) -> dict[str, Any] | None:
    """Return a session's fields for a response, as last committed; None if gone or damaged."""
    try:
        document = read_snapshot_document(path)
        fields = document.get("notes", {}).get(ENGINE_NOTES_KEY, {})
        record = SessionRecord(path.stem, "", named=True, file=None, session=None)
        # Sessions of the command line have none of an engine's fields.
        record.restore_from({ENGINE_NOTES_KEY: {"created": document["created"], **fields}})
        record.file_rounded = rounded_by(document)
        return session_entry(record)
    except (StoreError, LookupError, TypeError, ValueError, AttributeError):
        return None


async def _repeat_response(leased: LeasedSession, exchange: Exchange) -> bool:
    """Repeat the recorded response to an earlier request with this key. False if there is none."""
    key_digest = exchange.idempotency_key_digest
    recorded = next((earlier for earlier in leased.responses if earlier.key == key_digest), None)
    if recorded is None:
        return False
    if recorded.request != exchange.request_digest:
        raise key_reused_error()
    if recorded.body is None:
        raise response_too_long_error()
    await recorded.send(exchange.response)
    return True


def _with_seed(exchange: Exchange, key_digest: str) -> Exchange:
    """Derive a missing seed from the request's key, so that a retry samples the same tokens."""
    try:
        fields = parse_json_object(exchange.raw_body)
    except ApiError:  # the route reports it
        return exchange
    seed = fields.get("seed")
    if seed is None or (isinstance(seed, int) and seed < 0):
        fields["seed"] = int(key_digest[:16], 16) % _SEED_COUNT
    return exchange.with_json_body(fields)

"""Clients of `kvkeep serve`, synchronous and asynchronous, for what OpenAI's clients lack."""

import asyncio
import json
import math
import re
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager
from operator import itemgetter
from typing import Any

import httpx

from kvkeep import errors
from kvkeep.client.remote import (
    ApiClient,
    ApiRequest,
    FromJson,
    RemoteSession,
    Text,
    path_segment,
    text_fields,
)
from kvkeep.client.transport import http_options

DEFAULT_URL = "http://127.0.0.1:8080"
ServerEvent = tuple[str, Any]  # a name and its data
_MAX_TRIES = 3  # of a request whose response is lost
_RUNNING_SECONDS = 0.2  # until a retry is sent again while the first try is still running
_get_data = itemgetter("data")  # the entries in the JSON of a list


class _StillRunning(errors.Busy):
    """The server has not answered an earlier try of the same request yet."""


_ERROR_TYPES: dict[Any, type[errors.KvkeepError]] = {  # by the code in the response
    "session_not_found": errors.NoSuchSession,
    "snapshot_not_found": errors.NoSuchSnapshot,
    "pin_not_found": errors.NoSuchPin,
    "session_busy": errors.Busy,
    "held": errors.Busy,  # by another server of a fleet
    "moved": errors.Busy,
    "key_at_work": _StillRunning,
    "wrong_revision": errors.WrongRevision,
    "context_length_exceeded": errors.ContextFull,
    "cancelled": errors.Cancelled,
    "locked": errors.Locked,
}


class _BaseClient(ApiClient):
    """The requests of both clients. Methods return results, or in `AsyncClient` awaitables."""

    def require_kvkeep(self) -> Any:
        """Raise ServerError if what answers at the address is not kvkeep."""
        return self.send(ApiRequest("GET", "/v1/models"), _require_owner)

    def session(self, name: str) -> RemoteSession:
        """Return an existing session; no request is sent yet."""
        return RemoteSession(self, name)

    def create(self, name: str | None = None, **settings: Any) -> Any:
        """Create a RemoteSession. settings: as for `Model.session`, or from_snapshot, a name."""
        request = ApiRequest("POST", "/v1/sessions", {"name": name, **settings})
        return self.send(request, self._remote_session)

    def sessions(self, unnamed: bool = False) -> Any:
        """List sessions, the last used first. unnamed: include those made for a prompt."""
        return self.send(ApiRequest("GET", "/v1/sessions", params={"unnamed": unnamed}), _get_data)

    def delete(self, name: str, revision: int | None = None) -> Any:
        """Delete a session, on disk too."""
        path = f"/v1/sessions/{path_segment(name)}"
        return self.send(ApiRequest("DELETE", path, revision=revision))

    def snapshots(self) -> Any:
        """List snapshots."""
        return self.send(ApiRequest("GET", "/v1/snapshots"), _get_data)

    def restore(self, snapshot: str, name: str | None = None) -> Any:
        """Return a new RemoteSession that continues, to the bit, from a snapshot.

        Raises NoSuchSnapshot.
        """
        path = f"/v1/snapshots/{path_segment(snapshot)}/restore"
        return self.send(ApiRequest("POST", path, {"name": name}), self._remote_session)

    def delete_snapshot(self, snapshot: str) -> Any:
        return self.send(ApiRequest("DELETE", f"/v1/snapshots/{path_segment(snapshot)}"))

    def explain(self, text: Text) -> Any:
        """Report how many tokens of a prompt would be reused, and why not more."""
        return self.send(ApiRequest("POST", "/v1/prefix/explain", text_fields(text)))

    def misses(self) -> Any:
        """List recent prompts that were not fully reused, in the form of `explain`."""
        return self.send(ApiRequest("GET", "/v1/prefix/misses"), _get_data)

    def pins(self) -> Any:
        """List the prefixes of prompts that requests have protected from eviction."""
        return self.send(ApiRequest("GET", "/v1/prefix/pins"), _get_data)

    def release_pin(self, pin_id: str) -> Any:
        return self.send(ApiRequest("DELETE", f"/v1/prefix/pins/{path_segment(pin_id)}"))

    def operations(self) -> Any:
        """List recent operations, the newest first."""
        return self.send(ApiRequest("GET", "/v1/operations"), _get_data)

    def events(self) -> Any:
        """Stream the operations on all sessions as pairs of a name and its data."""
        return self.stream(ApiRequest("GET", "/v1/events"))

    def _remote_session(self, entry: dict[str, Any]) -> RemoteSession:
        return RemoteSession(self, entry["name"])


class Client(_BaseClient, AbstractContextManager["Client"]):
    """A synchronous client.

        with kvkeep.Client() as client:
            notes = client.create("notes", policy="sliding", max_kv_size=4096)
            notes.feed(open("manual.txt").read(), span="manual")
            print(notes.say("What is this about?")["text"])

    options: for httpx. A request without a response is sent again; the server applies it once.
    """

    def __init__(self, url: str = DEFAULT_URL, api_key: str | None = None, **options: Any):
        self._http = httpx.Client(**http_options(url, api_key, options))

    def __exit__(self, *failure: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def send(self, request: ApiRequest, convert: FromJson = lambda x: x) -> Any:
        tries = _Tries(self._http.base_url)
        while True:
            with tries.one():
                response = self._http.request(**request.arguments())
                return _result(response, convert)
            time.sleep(tries.pause)

    def stream(self, request: ApiRequest) -> Iterator[ServerEvent]:
        """Yield events. Closing the iterator cancels the generation."""
        parser = _EventParser()
        with (
            _transport_errors(self._http.base_url),
            self._http.stream(**request.arguments()) as response,
        ):
            if not _has_events(response):
                response.read()
                raise _error_of(response)
            for data in response.iter_bytes():
                yield from parser.push(data)


class AsyncClient(_BaseClient, AbstractAsyncContextManager["AsyncClient"]):
    """An asyncio client: await methods, and iterate over streams by `async for`."""

    def __init__(self, url: str = DEFAULT_URL, api_key: str | None = None, **options: Any):
        self._http = httpx.AsyncClient(**http_options(url, api_key, options))

    async def __aexit__(self, *failure: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def send(self, request: ApiRequest, convert: FromJson = lambda x: x) -> Any:
        tries = _Tries(self._http.base_url)
        while True:
            with tries.one():
                response = await self._http.request(**request.arguments())
                return _result(response, convert)
            await asyncio.sleep(tries.pause)

    async def stream(self, request: ApiRequest) -> AsyncIterator[ServerEvent]:
        """Yield events. Closing the iterator cancels the generation."""
        parser = _EventParser()
        with _transport_errors(self._http.base_url):
            async with self._http.stream(**request.arguments()) as response:
                if not _has_events(response):
                    await response.aread()
                    raise _error_of(response)
                async for data in response.aiter_bytes():
                    for event in parser.push(data):
                        yield event


class _Tries:
    """The tries of one request. pause: seconds before the next one."""

    def __init__(self, url: object):
        self._url, self._left, self.pause = url, _MAX_TRIES, 0.0

    @contextmanager
    def one(self) -> Iterator[None]:
        """Suppress an error after which the request is to be sent again. Raises ServerError."""
        try:
            yield
        except _StillRunning:
            self.pause = _RUNNING_SECONDS
        except httpx.TransportError as error:
            self._left, self.pause = self._left - 1, 0.0
            if not self._left or isinstance(error, httpx.ConnectError):
                raise _no_response_error(self._url, error) from error


def _no_response_error(url: object, error: httpx.TransportError) -> errors.ServerError:
    return errors.ServerError(f"no response from {url}: {str(error) or type(error).__name__}")


@contextmanager
def _transport_errors(url: object) -> Iterator[None]:
    """Raise ServerError if the connection is lost."""
    try:
        yield
    except httpx.TransportError as error:
        raise _no_response_error(url, error) from error


def _result(response: httpx.Response, convert: FromJson) -> Any:
    """Return the result in a response. Raises the error that it reports."""
    if not response.is_success:
        raise _error_of(response)
    try:
        return convert(response.json())
    except (ValueError, LookupError, TypeError) as error:
        raise _error_of(response) from error


def _require_owner(models: Any) -> None:
    """Raise ValueError if a list of models is not of kvkeep."""
    if models["data"][0]["owned_by"] != "kvkeep":
        raise ValueError("a list of models of another server")


def _has_events(response: httpx.Response) -> bool:
    content_type = response.headers.get("Content-Type", "")
    return response.is_success and content_type.startswith("text/event-stream")


def _error_of(response: httpx.Response) -> Exception:
    """Return the engine's error that a response reports, or that for a response of no engine."""
    if response.is_success:
        url = response.url.copy_with(raw_path=b"/")
        return errors.ServerError(f"{url} is not a kvkeep server: its response cannot be read")
    try:
        error = response.json()["error"]
        message, code = str(error["message"]), error.get("code")
    except (ValueError, KeyError, TypeError, AttributeError):
        message, code = f"the server answered with status {response.status_code}", None
    seconds = response.headers.get("Retry-After", "")
    retry_after = float(seconds) if re.fullmatch("[0-9]+", seconds) else 1.0
    return _error_for(message, code, response.status_code, retry_after)


def _error_for(message: str, code: object, status: object, retry_after: float) -> Exception:
    """Return the engine's error that a server reports. retry_after: seconds."""
    if status == 429:
        return errors.NoRoom(message, retry_after)
    if code == "too_large":
        return errors.NoRoom(message, math.inf)
    default_type = errors.InvalidArgument if status in (400, 404) else errors.ServerError
    return _ERROR_TYPES.get(code, default_type)(message)


class _EventParser:
    """Parses the bytes of a stream of server-sent events."""

    def __init__(self) -> None:
        self._line = bytearray()  # so far
        self._name, self._data = "message", list[str]()

    def push(self, data: bytes) -> Iterator[ServerEvent]:
        """Yield the events that end in these bytes. Raises the error of an error event."""
        first, *others = data.split(b"\n")  # a text in an event may have other ends of lines
        self._line += first
        for start in others:
            if event := self._push_line(self._line.decode().removesuffix("\r")):
                yield event
            self._line = bytearray(start)

    def _push_line(self, line: str) -> ServerEvent | None:
        """Return the event if this line ends one."""
        if line.startswith("event:"):
            self._name = line[6:].strip()
        elif line.startswith("data:"):
            self._data.append(line[5:].removeprefix(" "))
        if line or not self._data:
            return None
        name, data = self._name, json.loads("\n".join(self._data))
        self._name, self._data = "message", []
        if name == "error":
            error = data["error"]
            code = error.get("code")  # the status, if the error has none
            raise _error_for(error["message"], code, code, retry_after=1.0)
        return name, data

"""Clients of `kvkeep serve`: what its OpenAI clients cannot do. One waits, one is awaited."""

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx

from kvkeep.client.remote import RemoteSession, Text, given, set_fields
from kvkeep.client.wire import TRIES, Call, Event, Parser, Then, answer_of, events, unreachable

_TIMEOUT = httpx.Timeout(10.0, read=None)  # a long prompt takes what it takes
URL = "http://127.0.0.1:8080"


class _Calls:
    """What both clients can be asked. Methods return answers, or what is awaited for them."""

    send: Callable[..., Any]
    stream: Callable[[Call], Any]

    def session(self, name: str) -> RemoteSession:
        """One that exists; nothing is asked yet."""
        return RemoteSession(self, name)

    def create(self, name: str | None = None, **settings: Any) -> Any:
        """A new RemoteSession. settings: policy, max_kv_size, keep, kv_bits, ..., as of
        `Model.session`; from_snapshot: a snapshot's name."""
        call = Call("POST", "/v1/sessions", set_fields(name=name, **settings))
        return self.send(call, self._session)

    def sessions(self, unnamed: bool = False) -> Any:
        """What there is of each, the one used last first. unnamed: with those of prompts."""
        return self.send(Call("GET", "/v1/sessions", params={"unnamed": unnamed}), _data)

    def delete(self, name: str, revision: int | None = None) -> Any:
        """Forgets a session, on disk too."""
        return self.send(Call("DELETE", f"/v1/sessions/{name}", revision=revision))

    def snapshots(self) -> Any:
        return self.send(Call("GET", "/v1/snapshots"), _data)

    def restore(self, snapshot: str, name: str | None = None) -> Any:
        """A new RemoteSession that goes on, to the bit, where a snapshot was taken."""
        call = Call("POST", f"/v1/snapshots/{snapshot}/restore", set_fields(name=name))
        return self.send(call, self._session)

    def delete_snapshot(self, snapshot: str) -> Any:
        return self.send(Call("DELETE", f"/v1/snapshots/{snapshot}"))

    def explain(self, text: Text) -> Any:
        """How much of a prompt would be reused, and why not more."""
        return self.send(Call("POST", "/v1/prefix/explain", given(text)))

    def misses(self) -> Any:
        """The same of the last prompts that were evaluated from some token on."""
        return self.send(Call("GET", "/v1/prefix/misses"), _data)

    def operations(self) -> Any:
        """What was done lately, the last one first."""
        return self.send(Call("GET", "/v1/operations"), _data)

    def events(self) -> Any:
        """A stream of what is done to any session: pairs of a name and what is told."""
        return self.stream(Call("GET", "/v1/events"))

    def _session(self, made: dict[str, Any]) -> RemoteSession:
        return RemoteSession(self, made["name"])


class Client(_Calls):
    """Sessions of a server, from a program that waits.

        with kvkeep.Client() as client:
            notes = client.create("notes", policy="sliding", max_kv_size=4096)
            notes.feed(open("manual.txt").read(), span="manual")
            print(notes.say("What is this about?")["text"])

    A request whose answer is lost on its way is sent again, and the server makes a change once.
    """

    def __init__(self, url: str = URL, api_key: str | None = None, **options: Any):
        """options: for httpx."""
        self._http = httpx.Client(**_options(url, api_key, options))

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def send(self, call: Call, then: Then = lambda found: found) -> Any:
        for left in reversed(range(TRIES)):
            try:
                return then(answer_of(self._http.request(call.method, call.path, **call.fields)))
            except httpx.TransportError as error:
                if not left or isinstance(error, httpx.ConnectError):
                    raise unreachable(error, self._http.base_url) from error
        raise AssertionError("unreachable")

    def stream(self, call: Call) -> Iterator[Event]:
        """Letting go of it cancels what the server makes."""
        try:
            with self._http.stream(call.method, call.path, **call.fields) as response:
                if not response.is_success:
                    response.read()
                    answer_of(response)
                yield from events(response.iter_lines())
        except httpx.TransportError as error:
            raise unreachable(error, self._http.base_url) from error


class AsyncClient(_Calls):
    """The same for asyncio: methods are awaited, streams are iterated by `async for`."""

    def __init__(self, url: str = URL, api_key: str | None = None, **options: Any):
        """options: for httpx."""
        self._http = httpx.AsyncClient(**_options(url, api_key, options))

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, *failure: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def send(self, call: Call, then: Then = lambda found: found) -> Any:
        for left in reversed(range(TRIES)):
            try:
                response = await self._http.request(call.method, call.path, **call.fields)
                return then(answer_of(response))
            except httpx.TransportError as error:
                if not left or isinstance(error, httpx.ConnectError):
                    raise unreachable(error, self._http.base_url) from error
        raise AssertionError("unreachable")

    async def stream(self, call: Call) -> AsyncIterator[Event]:
        parser = Parser()
        try:
            async with self._http.stream(call.method, call.path, **call.fields) as response:
                if not response.is_success:
                    await response.aread()
                    answer_of(response)
                async for line in response.aiter_lines():
                    event = parser.push(line)
                    if event is not None:
                        yield event
        except httpx.TransportError as error:
            raise unreachable(error, self._http.base_url) from error


def _options(url: str, key: str | None, options: dict[str, Any]) -> dict[str, Any]:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return {"base_url": url, "headers": headers, "timeout": _TIMEOUT, **options}


def _data(found: dict[str, Any]) -> Any:
    return found["data"]

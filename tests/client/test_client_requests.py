"""Requests of kvkeep's clients and their reading of responses, without a server."""

import asyncio
import json
import ssl
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import httpx
import pytest

from kvkeep import AsyncClient, Client, errors
from kvkeep.client.transport import http_options

URL = "http://server"
EVENTS = {"Content-Type": "text/event-stream; charset=utf-8"}
Handler = Callable[[httpx.Request], httpx.Response]


def client_of(handler: Handler) -> Client:
    return Client(URL, transport=httpx.MockTransport(handler))


@pytest.mark.parametrize("name", ["notes#2", "notes?x=1", "notes%2Fold", "a b", "é", "notes\n"])
@pytest.mark.parametrize(
    ("call", "path"),
    [
        (lambda client, name: client.delete(name), "/v1/sessions/NAME"),
        (lambda client, name: client.restore(name), "/v1/snapshots/NAME/restore"),
        (lambda client, name: client.delete_snapshot(name), "/v1/snapshots/NAME"),
        (lambda client, name: client.release_pin(name), "/v1/prefix/pins/NAME"),
        (lambda client, name: client.session(name).rewind(1), "/v1/sessions/NAME/rewind"),
        (lambda client, name: list(client.session(name).events()), "/v1/sessions/NAME/events"),
    ],
)
def test_a_name_is_one_segment_of_the_path(
    name: str, call: Callable[[Client, str], object], path: str
) -> None:
    requests = list[httpx.Request]()

    def handler(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        if request.url.path.endswith("/events"):
            return httpx.Response(200, headers=EVENTS)
        return httpx.Response(200, json={"name": name})

    call(client_of(handler), name)
    (request,) = requests
    assert request.url.path == path.replace("NAME", name)
    assert (request.url.query, request.url.fragment) == (b"", "")


@pytest.mark.parametrize("name", ["notes/old", "", ".", "..", "../snapshots/then"])
def test_a_name_that_would_be_another_path_is_refused(name: str) -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        raise AssertionError(request.url)

    client = client_of(handler)
    for call in (client.delete, client.restore, client.delete_snapshot, client.release_pin):
        with pytest.raises(errors.InvalidArgument, match="not a valid name"):
            call(name)
    with pytest.raises(errors.InvalidArgument, match="not a valid name"):
        client.session(name).info()


def events_of(content: bytes, chunk_size: int) -> list[Any]:
    """Stream events through both clients, in pieces of `chunk_size` bytes."""

    async def pieces() -> Any:
        for start in range(0, len(content), chunk_size):
            yield content[start : start + chunk_size]

    def handler(request: httpx.Request) -> httpx.Response:
        pieces = (content[at : at + chunk_size] for at in range(0, len(content), chunk_size))
        return httpx.Response(200, headers=EVENTS, content=pieces)

    async def read() -> list[Any]:
        transport = httpx.MockTransport(
            lambda _: httpx.Response(200, headers=EVENTS, content=pieces())
        )
        async with AsyncClient(URL, transport=transport) as client:
            return [event async for event in client.events()]

    events = list(client_of(handler).events())
    assert asyncio.run(read()) == events
    return events


@pytest.mark.parametrize("chunk_size", [1, 7, 10_000])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_an_event_may_contain_characters_that_end_lines_elsewhere(
    chunk_size: int, end: str
) -> None:
    texts = ["a\x85b", "a\u2028\u2029b", "\x0b\x0c\x1c", "é\r\n", ""]
    lines = [": keepalive", ""]
    for text in texts:
        lines += ["event: token", f"data: {json.dumps({'text': text}, ensure_ascii=False)}", ""]
    content = end.join([*lines, ""]).encode()
    expected = [("token", {"text": text}) for text in texts]
    assert events_of(content, chunk_size) == expected


ERRORS: list[tuple[int, str | int, type[errors.KvkeepError]]] = [
    (503, "cancelled", errors.Cancelled),
    (400, "context_length_exceeded", errors.ContextFull),
    (400, "too_large", errors.NoRoom),
    (429, 429, errors.NoRoom),
    (400, 400, errors.InvalidArgument),
    (404, "session_not_found", errors.NoSuchSession),
    (404, "snapshot_not_found", errors.NoSuchSnapshot),
    (404, "pin_not_found", errors.NoSuchPin),
    (409, "session_busy", errors.Busy),
    (409, "held", errors.Busy),
    (409, "moved", errors.Busy),
    (409, "locked", errors.Locked),
    (500, 500, errors.ServerError),
]


@pytest.mark.parametrize(("status", "code", "expected"), ERRORS)
def test_errors_have_the_same_type_as_response_and_in_a_stream(
    status: int, code: str | int, expected: type[errors.KvkeepError]
) -> None:
    body = {"error": {"message": "why", "type": "x", "param": None, "code": code}}
    with pytest.raises(expected, match="why") as whole:
        client_of(lambda _: httpx.Response(status, json=body)).sessions()
    content = f"event: error\ndata: {json.dumps(body)}\n\n".encode()
    with pytest.raises(expected, match="why") as streamed:
        list(client_of(lambda _: httpx.Response(200, headers=EVENTS, content=content)).events())
    assert type(whole.value) is type(streamed.value) is expected


@pytest.mark.parametrize(
    "answer",
    [
        {"text": "<html>It works!</html>"},
        {"json": {"status": "ok"}},
        {"json": [1]},
        {"content": b"\xff"},
    ],
    ids=["page", "object", "list", "bytes"],
)
def test_an_answer_of_another_kind_of_server_is_a_server_error(answer: dict[str, Any]) -> None:
    client = client_of(lambda _: httpx.Response(200, **answer))
    calls: list[Callable[[], object]] = [
        client.sessions,
        client.create,
        client.require_kvkeep,
        client.session("a").fork,
        lambda: list(client.events()),
        lambda: list(client.session("a").stream("Hi")),
    ]
    for call in calls:
        with pytest.raises(errors.ServerError, match="http://server/ is not a kvkeep server"):
            call()

    async def stream() -> None:
        transport = httpx.MockTransport(lambda _: httpx.Response(200, **answer))
        async with AsyncClient(URL, transport=transport) as client:
            with pytest.raises(errors.ServerError, match="not a kvkeep server"):
                await client.create()
            async for _ in client.events():
                pass

    with pytest.raises(errors.ServerError, match="not a kvkeep server"):
        asyncio.run(stream())


def test_models_of_another_server_are_told_apart() -> None:
    def models_of(owner: str) -> Client:
        models = {"data": [{"id": "m", "owned_by": owner}]}
        return client_of(lambda _: httpx.Response(200, json=models))

    models_of("kvkeep").require_kvkeep()
    with pytest.raises(errors.ServerError, match="not a kvkeep server"):
        models_of("someone").require_kvkeep()


@pytest.mark.parametrize(
    "url", ["http://localhost:80x80", "localhost:8080", "", "http://", "ftp://x"]
)
def test_an_address_that_is_none_is_refused(url: str) -> None:
    for kind in (Client, AsyncClient):
        with pytest.raises(errors.InvalidArgument, match="not the address of a server"):
            kind(url)


@pytest.mark.parametrize("key", ["cl\u00e9", "two words", "line\n", ""])
def test_a_key_that_no_header_can_hold_is_refused(key: str) -> None:
    with pytest.raises(errors.InvalidArgument, match="API key"):
        Client(URL, key)


def test_headers_are_sent_beside_the_key() -> None:
    seen = list[httpx.Headers]()

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers)
        return httpx.Response(200, json={"data": []})

    transport = httpx.MockTransport(handler)
    Client(URL, "K", headers={"X-Session-Id": "s"}, transport=transport).sessions()
    Client(URL, "K", headers={"authorization": "own"}, transport=transport).sessions()
    assert (seen[0]["authorization"], seen[0]["x-session-id"]) == ("Bearer K", "s")
    assert seen[1].get_list("authorization") == ["own"]


@pytest.mark.parametrize(
    "call",
    [
        lambda session: session.compress(float("nan")),
        lambda session: session.feed("\ud83d"),
        lambda session: session.generate("Hi", stop={"a"}),
        lambda session: list(session.stream("Hi", temperature=float("inf"))),
    ],
)
def test_what_json_lacks_is_an_invalid_argument(call: Callable[[Any], object]) -> None:
    client = client_of(lambda _: httpx.Response(200, json={}))
    with pytest.raises(errors.InvalidArgument, match="cannot be sent as JSON"):
        call(client.session("a"))
    with pytest.raises(errors.InvalidArgument, match="not a valid name"):
        client.session("\ud83d").info()


def test_a_server_on_this_machine_is_reached_without_a_proxy(
    monkeypatch: pytest.MonkeyPatch, one_answer: str
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    with Client(one_answer) as client:
        assert client.sessions() == []
    with Client(one_answer, trust_env=True) as client, pytest.raises(errors.ServerError):
        client.sessions()


@pytest.fixture
def one_answer() -> Iterator[str]:
    """The address of a server that answers each request with an empty list."""

    class EmptyList(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            content = b'{"data": []}'
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), EmptyList) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("url", ["http://127.0.0.1:8080", "http://localhost", "http://[::1]:8080"])
def test_certificates_are_not_loaded_for_a_server_on_this_machine(url: str) -> None:
    context = http_options(url, None, {})["verify"]
    assert context.cert_store_stats()["x509"] == 0
    assert context.verify_mode == ssl.CERT_REQUIRED  # of a server that it is redirected to


@pytest.mark.parametrize("url", ["https://127.0.0.1", "https://localhost", "http://192.0.2.1"])
def test_other_servers_are_verified_by_the_certificates_of_the_system(url: str) -> None:
    assert "verify" not in http_options(url, None, {})

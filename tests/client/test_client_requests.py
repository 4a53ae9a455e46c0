"""Requests of kvkeep's clients and their reading of responses, without a server."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from kvkeep import AsyncClient, Client, errors

URL = "http://server"
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
        return httpx.Response(200, content=pieces)

    async def read() -> list[Any]:
        transport = httpx.MockTransport(lambda _: httpx.Response(200, content=pieces()))
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
        list(client_of(lambda _: httpx.Response(200, content=content)).events())
    assert type(whole.value) is type(streamed.value) is expected

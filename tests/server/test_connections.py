"""Connections of clients that are slow, too many, or that send requests of unclear meaning."""

import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import unquote

import pytest
from server.conftest import RunningServer, serving
from small_models import small_model

from kvkeep.engine import Engine
from kvkeep.server import connections, security
from kvkeep.server.keys import ApiKeys

HEALTH = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n"
POST = b"POST /tokenize HTTP/1.1\r\nHost: 127.0.0.1\r\n"


@contextmanager
def connection_to(server: RunningServer) -> Iterator[socket.socket]:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        yield connection


def answer_to(server: RunningServer, request: bytes) -> bytes:
    """Send bytes, and return all that comes until the server closes the connection."""
    with connection_to(server) as connection:
        connection.sendall(request)
        return all_bytes(connection)


def all_bytes(connection: socket.socket) -> bytes:
    try:
        return b"".join(iter(lambda: connection.recv(65536), b""))
    except ConnectionResetError:
        return b""


def test_idle_connections_outlive_those_of_clients() -> None:
    assert connections.IDLE_CONNECTION_SECONDS == 75


@pytest.mark.parametrize("sent", [b"", b"G", HEALTH, HEALTH + b"\r\nGET /"])
def test_headers_that_do_not_arrive_in_time_close_the_connection(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    """Also behind an answered request. Each byte that comes later changes nothing."""
    monkeypatch.setattr(connections, "HEADER_SECONDS", 0.4)
    start = time.monotonic()
    with connection_to(server) as connection:
        connection.sendall(sent)
        time.sleep(0.25)
        if sent:
            connection.sendall(b"X")
        answer = all_bytes(connection)
    assert time.monotonic() - start < 10
    assert answer.startswith(b"HTTP/1.1 200") == (b"\r\n\r\n" in sent)


def test_a_body_that_does_not_arrive_in_time_is_refused(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(security, "BODY_SECONDS", 0.3)
    for path in (b"/tokenize", b"/v1/messages"):
        head = POST.replace(b"/tokenize", path) + b"Content-Length: 20\r\n\r\n"
        answer = answer_to(server, head + b'{"content"')
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"did not arrive in time" in answer
    with server.client() as client:
        assert client.post("/tokenize", json={"content": "a"}).status_code == 200


def test_a_body_has_ten_minutes_at_most(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However much of it has arrived: the time does not grow with it for hours."""
    monkeypatch.setattr(security, "_MAX_BODY_SECONDS", 0.3)
    head = POST + b"Content-Length: 100000\r\n\r\n"
    answer = answer_to(server, head + b'{"content": "' + b"a" * 40_000)
    assert answer.startswith(b"HTTP/1.1 408 ")


WITHOUT_KEY = (
    *(b"GET /health", b"POST /health", b"POST /v1/models", b"PUT /page/main.js", b"POST /"),
    b"OPTIONS /v1/chat/completions",
)


def test_without_a_key_no_body_is_read() -> None:
    """Nor are paths that need no key a way to fill the server's memory."""
    closing = b"Connection: close\r\nContent-Length: 0\r\n\r\n"
    with serving(Engine(small_model()), ApiKeys(("a-key-of-sixteen-or-more",))) as server:
        for line in WITHOUT_KEY:
            head = line + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n"
            for length in (b"Content-Length: 1000000", b"Transfer-Encoding: chunked"):
                answer = answer_to(server, head + length + b"\r\n\r\n")
                assert answer.startswith(b"HTTP/1.1 413 "), line
                assert b"without a valid API key" in answer
            assert not answer_to(server, head + closing).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize("header", [b"X-A: " + b"a" * 200_000, b"X-A: a\r\n" * 30_000])
def test_headers_are_limited(server: RunningServer, header: bytes) -> None:
    with connection_to(server) as connection:
        connection.sendall(HEALTH)
        try:
            for start in range(0, len(header), 4096):
                connection.sendall(header[start : start + 4096])
        except ConnectionError:  # closed before it had all
            return
        assert all_bytes(connection)[:13] in (b"", b"HTTP/1.1 400 ")


def test_connections_beyond_the_limit_are_closed(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert 16 < connections.max_connections() <= 4096
    with server.client() as client:
        client.get("/health")
        monkeypatch.setattr(connections, "max_connections", lambda: 1)
        assert answer_to(server, HEALTH + b"\r\n") == b""
        assert client.get("/health").status_code == 200


def test_an_upgrade_to_a_websocket_is_ignored(server: RunningServer) -> None:
    upgrade = b"Connection: Upgrade, close\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    key = b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    assert answer_to(server, HEALTH + upgrade + key).startswith(b"HTTP/1.1 200")


SMUGGLED = b"GET /v1/sessions HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
AMBIGUOUS = [
    b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
    b"Content-Length: 0\r\nContent-Length: 50\r\n\r\n" + SMUGGLED,
    b"Content-Length : 0\r\n\r\n" + SMUGGLED,
    b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n" + SMUGGLED,
    b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
    b"Transfer-Encoding: chunked\r\n\r\n0x1\r\na\r\n0\r\n\r\n" + SMUGGLED,
    b"X: a\r\x00b: c\r\n\r\n" + SMUGGLED,
]


@pytest.mark.parametrize("rest", AMBIGUOUS)
def test_a_request_of_unclear_length_is_refused_or_is_the_last(
    server: RunningServer, rest: bytes
) -> None:
    """A proxy may see its end elsewhere, and take what follows for another client's request."""
    answer = answer_to(server, POST + rest)
    assert re.match(rb"HTTP/1.1 4\d\d ", answer) or answer == b""
    assert answer.count(b"HTTP/1.1 ") <= 1


ORIGIN = b"https://app.example"
PREFLIGHT = (
    b"OPTIONS /tokenize HTTP/1.1\r\nHost: 127.0.0.1\r\nAccess-Control-Request-Method: POST\r\n"
)


@pytest.mark.parametrize(
    "start",
    [
        PREFLIGHT + b"Origin: " + ORIGIN + b"\r\n",
        PREFLIGHT + b"Origin: https://elsewhere.example\r\n",
        PREFLIGHT,
        POST + b"Origin: https://elsewhere.example\r\n",
        POST.replace(b"127.0.0.1", b"elsewhere.example"),
    ],
    ids=["preflight", "refused-preflight", "no-origin", "other-origin", "other-host"],
)
def test_no_response_leaves_a_connection_open_after_a_request_of_two_lengths(start: bytes) -> None:
    """Neither that to a CORS preflight, nor a refusal of the host or the origin."""
    with serving(Engine(small_model()), origins=[ORIGIN.decode()]) as server:
        answer = answer_to(server, start + AMBIGUOUS[0])
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1 ") == 1


NAMES = (
    *("../escaped", "..%2fescaped", "%2e%2e%2fescaped", "..%5cescaped", "%2fescaped", "a%2fb"),
    *("a%00b", "a%0d%0aX: y", "%e2%80%ae", "a%20", ".hidden", "caf%c3%a9", "a" * 101, "%ff"),
    *("a%0a", ".", "..", "%ef%bc%8e%ef%bc%8e", "con%00.kvkeep"),
)


def test_names_of_sessions_and_snapshots_are_no_paths(
    server: RunningServer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Neither in the path of a request nor in its body; nothing is written outside the folder."""
    root = tmp_path_factory.getbasetemp()
    before = sorted(root.rglob("*"))
    body = b'Connection: close\r\nContent-Length: 13\r\n\r\n{"text": "a"}'
    for name in NAMES:
        for path in (f"/v1/sessions/{name}/feed", f"/slots/{name}?action=save", f"/page/{name}"):
            head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n"
            assert re.match(rb"HTTP/1.1 4\d\d ", answer_to(server, head.encode() + body)), path
            page = answer_to(server, head.replace("POST", "GET").encode() + body)
            assert re.match(rb"HTTP/1.1 4\d\d ", page), path
        with server.client() as client:
            decoded = unquote(name)
            assert client.post("/v1/sessions", json={"name": decoded}).status_code == 400
            saved = {"name": decoded}
            assert client.post("/v1/sessions/none/snapshot", json=saved).status_code in (400, 404)
            filename = {"filename": decoded}
            answer = client.post("/slots/0?action=restore", json=filename)
            assert 400 <= answer.status_code < 500
    assert sorted(root.rglob("*")) == before


def test_after_an_internal_error_the_connection_is_used_again(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged once."""

    def fail() -> None:
        raise RuntimeError("a fault")

    monkeypatch.setattr(server.service.engine, "totals", fail)
    with connection_to(server) as connection:
        connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        received = b""
        while b"internal server error" not in received:
            received += (chunk := connection.recv(65536))
            assert chunk, received
        assert received.startswith(b"HTTP/1.1 500 ")
        connection.sendall(HEALTH + b"Connection: close\r\n\r\n")
        assert b"200 OK" in all_bytes(connection)
    failures = [record for record in caplog.records if record.exc_info]
    assert [str(record.exc_info[1]) for record in failures if record.exc_info] == ["a fault"]

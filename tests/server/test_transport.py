"""HTTP features below the APIs: HEAD, compressed bodies, keepalives, queues, old clients."""

import asyncio
import gzip
import json
import socket
import struct
import threading
import time
import zlib
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import uvicorn
import zstandard
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from kvkeep.engine import Limits
from kvkeep.model import Model
from kvkeep.server import sse
from kvkeep.server.connections import connection_config
from kvkeep.server.limits import MAX_BODY_BYTES
from kvkeep.server.sse import KeepaliveResponse, sse_event, sse_response
from tests.server.conftest import RunningServer, ScriptedServer, running_server

COMPLETION = {"prompt": "Hello", "max_tokens": 2, "temperature": 0}
COMPRESS = {"gzip": gzip.compress, "deflate": zlib.compress, "zstd": zstandard.compress}


def test_head_answers_as_get_without_a_body(server: RunningServer) -> None:
    with server.client() as client:
        for path in ("/", "/health", "/v1/models"):
            head, get = client.head(path), client.get(path)
            assert head.status_code == 200
            assert head.content == b""
            assert head.headers["content-type"] == get.headers["content-type"]


@pytest.mark.parametrize("encoding", COMPRESS)
def test_request_bodies_may_be_compressed(server: RunningServer, encoding: str) -> None:
    body = COMPRESS[encoding](json.dumps(COMPLETION).encode())
    headers = {"Content-Encoding": encoding, "Content-Type": "application/json"}
    with server.client() as client:
        plain = client.post("/v1/completions", json=COMPLETION).json()
        compressed = client.post("/v1/completions", content=body, headers=headers)
    assert compressed.status_code == 200
    assert compressed.json()["choices"] == plain["choices"]


@pytest.mark.parametrize(
    ("encoding", "padding"),
    [("gzip", b""), ("gzip", bytes(1000)), ("zstd", b"")],
    ids=["gzip", "gzip-padded", "zstd"],
)
def test_all_members_of_a_compressed_body_are_read(
    server: RunningServer, encoding: str, padding: bytes
) -> None:
    body = json.dumps({**COMPLETION, "user": "x" * 20_000}).encode()
    parts = [body[:5], b"", body[5:9000], body[9000:]]
    members = b"".join(COMPRESS[encoding](part) + padding for part in parts)
    headers = {"Content-Encoding": encoding, "Content-Type": "application/json"}
    with server.client() as client:
        response = client.post("/v1/completions", content=members, headers=headers)
        cut = client.post("/v1/completions", content=members[:-12], headers=headers)
        many = COMPRESS[encoding](b" " * (MAX_BODY_BYTES // 2 + 1)) * 2
        large = client.post("/v1/completions", content=many, headers=headers)
    assert response.status_code == 200, response.text
    assert cut.status_code == 400 or padding
    assert large.status_code == 413


@pytest.mark.parametrize("encoding", COMPRESS)
def test_a_body_that_decompresses_to_too_much_is_refused(
    server: RunningServer, encoding: str
) -> None:
    bomb = COMPRESS[encoding](b" " * (MAX_BODY_BYTES + 1))
    assert len(bomb) < 200_000
    headers = {"Content-Encoding": encoding}
    with server.client() as client:
        response = client.post("/v1/completions", content=bomb, headers=headers)
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "too_large"


@pytest.mark.parametrize(
    ("encoding", "body", "status"),
    [
        ("gzip", b"not gzip", 400),
        ("gzip", b"", 400),
        ("gzip", gzip.compress(b"{}", mtime=0) + b"garbage", 400),
        ("gzip", gzip.compress(b'{"prompt": "a"}', mtime=0)[:-9], 400),
        ("zstd", b"not zstd", 400),
        ("br", b"{}", 415),
    ],
    ids=["not-gzip", "empty", "garbage", "gzip-cut-off", "not-zstd", "unknown"],
)
def test_other_encodings_and_damaged_bodies_are_refused(
    server: RunningServer, encoding: str, body: bytes, status: int
) -> None:
    with server.client() as client:
        response = client.post(
            "/v1/completions", content=body, headers={"Content-Encoding": encoding}
        )
    assert response.status_code == status
    assert "error" in response.json()


def test_http_1_0_without_a_host_is_answered(server: RunningServer) -> None:
    url = httpx.URL(server.url)
    with socket.create_connection((url.host, url.port)) as connection:
        connection.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        answer = b"".join(iter(lambda: connection.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 200")
    assert answer.endswith(b'{"status":"ok"}')


async def _sent_messages(response: StreamingResponse) -> list[bytes]:
    """Return the bodies that a response sends."""
    bodies: list[bytes] = []

    async def receive() -> dict[str, str]:
        await asyncio.sleep(60)
        return {"type": "http.disconnect"}

    async def send(message: dict[str, object]) -> None:
        body = message.get("body")
        if isinstance(body, bytes):
            bodies.append(body)

    await response({"type": "http", "asgi": {"spec_version": "2.3"}}, receive, send)
    return bodies


def test_no_text_in_a_stream_ends_its_line(scripted: ScriptedServer) -> None:
    """Clients split streams at all characters at which Python's `splitlines` does."""
    ends = [char for char in map(chr, range(0x3000)) if len(f"a{char}b".splitlines()) > 1]
    data = {"text": "é".join(ends)}
    event, data_line, empty = sse_event(data, "token").decode().splitlines()
    assert (event, empty) == ("event: token", "")
    assert json.loads(data_line.removeprefix("data: ")) == data
    text = "a\x85b\u2028c\u2029d"  # JSON has escapes for all others
    scripted.write(text)
    with scripted.client() as client:
        body = {"messages": [{"role": "user", "content": "Hi"}]}
        lines = client.post("/api/chat", json=body).text.splitlines()
    assert "".join(json.loads(line)["message"]["content"] for line in lines) == text


def test_silence_is_filled_with_keepalives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "_FIRST_SILENCE_SECONDS", 0.05)
    monkeypatch.setattr(sse, "_SILENCE_SECONDS", 0.1)

    async def events() -> AsyncIterator[bytes]:
        await asyncio.sleep(0.4)
        yield b"data: 1\n\n"
        yield b"data: 2\n\n"

    bodies = asyncio.run(_sent_messages(KeepaliveResponse(events(), b": keepalive\n\n")))
    count = bodies.count(b": keepalive\n\n")
    assert 2 <= count <= 5
    assert bodies[count:] == [b"data: 1\n\n", b"data: 2\n\n", b""]


def test_events_without_silence_have_no_keepalives() -> None:
    async def events() -> AsyncIterator[bytes]:
        for number in range(100):
            yield b"%d" % number

    bodies = asyncio.run(_sent_messages(KeepaliveResponse(events(), b"keepalive")))
    assert b"keepalive" not in bodies


def test_requests_beyond_the_limit_wait_for_room(smollm2: Model, tmp_path: Path) -> None:
    limits = Limits(memory=1_000_000_000, running_per_owner=2)
    with running_server(smollm2, tmp_path, limits=limits) as server, server.client() as client:

        def complete(number: int) -> int:
            body = {**COMPLETION, "prompt": f"Number {number}", "max_tokens": 8}
            return client.post("/v1/completions", json=body).status_code

        with ThreadPoolExecutor(8) as pool:
            assert set(pool.map(complete, range(8))) == {200}


def test_a_full_queue_refuses_with_a_time_to_retry(smollm2: Model, tmp_path: Path) -> None:
    limits = Limits(memory=1_000_000_000, running_per_owner=1)
    with running_server(smollm2, tmp_path, limits=limits) as server, server.client() as client:
        queue = server.service.admission_queue
        queue.patience, queue.max_waiting = 0.1, 1
        long_request = {**COMPLETION, "max_tokens": 1_000, "ignore_eos": True, "stream": True}
        with client.stream("POST", "/v1/completions", json=long_request) as stream:
            lines = stream.iter_lines()  # closes the stream once it is deleted
            next(lines)
            response = client.post("/v1/completions", json=COMPLETION)
        assert response.status_code == 429
        assert int(response.headers["retry-after"]) >= 1


def test_a_request_waits_for_its_own_generations_however_long(
    smollm2: Model, tmp_path: Path
) -> None:
    limits = Limits(memory=1_000_000_000, running_per_owner=1)
    with running_server(smollm2, tmp_path, limits=limits) as server, server.client() as client:
        server.service.admission_queue.patience = 2.0
        # Each of them takes longer.
        prompts, long = ["One", "Two"], {"max_tokens": 300, "ignore_eos": True}
        body = {**COMPLETION, "prompt": prompts, **long}
        response = client.post("/v1/completions", json=body)
        assert response.status_code == 200
        assert len(response.json()["choices"]) == 2


@pytest.mark.parametrize("path", ["/v1/completions", "/completion"])
def test_a_stream_that_waits_for_admission_begins_with_keepalives(
    smollm2: Model, tmp_path: Path, path: str
) -> None:
    limits = Limits(memory=1_000_000_000, running_per_owner=1)
    with running_server(smollm2, tmp_path, limits=limits) as server, server.client() as client:
        body = {**COMPLETION, "max_tokens": 1_000, "n_predict": 1_000, "ignore_eos": True}
        with client.stream("POST", path, json={**body, "stream": True}) as running:
            lines = running.iter_lines()  # closes the stream once it is deleted
            next(lines)
            short = {**body, "max_tokens": 2, "n_predict": 2, "stream": True}
            with server.client() as other, other.stream("POST", path, json=short) as waiting:
                assert waiting.status_code == 200
                assert next(waiting.iter_lines()) == ": keepalive"


def test_a_waiting_request_is_dropped_when_its_client_hangs_up(
    smollm2: Model, tmp_path: Path
) -> None:
    limits = Limits(memory=1_000_000_000, running_per_owner=1)
    with running_server(smollm2, tmp_path, limits=limits) as server, server.client() as client:
        long_request = {**COMPLETION, "max_tokens": 1_000, "ignore_eos": True, "stream": True}
        with client.stream("POST", "/v1/completions", json=long_request) as running:
            lines = running.iter_lines()  # closes the stream once it is deleted
            next(lines)
            with pytest.raises(httpx.ReadTimeout):
                client.post("/v1/completions", json={**long_request, "prompt": "b"}, timeout=0.5)
        with server.client() as other:  # both are cancelled: there is room at once
            start = time.monotonic()
            assert other.post("/v1/completions", json=COMPLETION).status_code == 200
            assert time.monotonic() - start < 20


def test_any_origin_may_be_allowed(smollm2: Model, tmp_path: Path) -> None:
    from kvkeep.server.app import LOCAL_HOSTS, application

    with running_server(smollm2, tmp_path) as server:
        app = application(server.service, LOCAL_HOSTS, ["*"])
        headers = {"Origin": "https://example.org", "Host": "127.0.0.1"}

        async def get() -> httpx.Response:
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as local:
                return await local.get("/v1/models", headers=headers)

        response = asyncio.run(get())
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == "*"
        with server.client() as client:
            assert client.get("/v1/models", headers=headers).status_code == 403


def test_streams_of_many_threads_end(server: RunningServer) -> None:
    def stream() -> str:
        body = {**COMPLETION, "stream": True}
        with server.client() as client, client.stream("POST", "/v1/completions", json=body) as s:
            return list(s.iter_lines())[-2]

    results: list[str] = []
    threads = [threading.Thread(target=lambda: results.append(stream())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == ["data: [DONE]"] * 4


def test_events_that_are_ready_are_not_written_to_a_client_that_is_gone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The loop was busy, as it is with a computation, while the client went."""
    is_gone = threading.Event()

    async def events() -> AsyncIterator[bytes]:
        yield sse_event("begins")
        is_gone.wait()
        for number in range(20):
            yield sse_event(number)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await sse_response(events(), None)(scope, receive, send)

    server = uvicorn.Server(connection_config(app, port=0, loop="asyncio"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    address = server.servers[0].sockets[0].getsockname()
    with socket.create_connection(address) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        while b"begins" not in client.recv(4096):
            pass
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    is_gone.set()
    server.should_exit = True
    thread.join()  # once the response has ended
    assert "socket.send() raised exception" not in caplog.text
